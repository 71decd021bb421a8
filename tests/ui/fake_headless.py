"""`dsv41chat` with a scripted engine as a process of its own: python -m tests.ui.fake_headless SCRIPT_JSON ARGUMENTS..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dsv41chat import cli
from dsv41chat.ui.host import EngineHost
from tests.ui.fakes import Script, fake_host


def main() -> None:
    script = Script(**json.loads(sys.argv.pop(1)))
    cli.leave(cli.main(make_host=lambda settings, store: EngineHost(settings, store, **fake_host(script, Path("fake-pack")))))


if __name__ == "__main__":
    main()

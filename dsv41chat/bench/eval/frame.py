"""What every arm of `dsv41chat eval` shares: builds, resumable runs, progress, receipts.

An arm's `run(context)` looks like this:

    (build,) = builds(context, [args.pack])                        # by name or folder; fingerprint from the headers
    parameters = {...} | numeric_options(context)                  # everything that can change a figure; JSON values
    with Run(context, "needle", [build], parameters, fresh=args.fresh) as run:
        with opened(context, build) as engine:                     # only if there is work left
            for i in range(run.state.get("done", 0), n):           # run.state: JSON; what an earlier process had finished
                ...
                run.state["done"] = i + 1
                run.save()                                         # temporary file, fsync, rename: after every unit of work
                run.progress("needles", i + 1, n)
        receipt = run.finish(result, summary="needle 20 of 20 up to 2,000 tokens", command=command("needle", args.pack, ...))
    show(context, receipt, text)                                   # --json: the receipt's `result`; else the text

A run killed at any moment and started again with the same words gives the same `result`: whatever goes into it comes from `run.state`
(and files beside it, see `Run.write`), never from clocks or from what this process happened to do. Times go to `run.seconds` only.
The state lies in `<state folder>/eval/<arm>-<key>/`; the key is a digest of the builds' fingerprints, the parameters, the commit,
the versions and the device, so that one result is never made of two versions' work. `finish` puts the receipts in their folder (by
fingerprint, `store/receipts.py`) and deletes the state; `--fresh` deletes it before the run. A second process with the same key is refused.

Exit codes: 0 measured; 2 usage; 4 a promise is broken or a build cannot be read (return 4 after `show`, or raise a PackError); 5 does not
fit; 8 nothing can be written; 130 interrupted (what was finished is kept).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41chat.bench.receipt import environment, write_receipt
from dsv41chat.store.files import private_folder, write_private
from dsv41chat.store.receipts import Receipts
from dsv41chat.ui.output import UsageError

STALE_S = 30 * 86400.0  # state of a run that nobody went on with
_LINE_S = 10.0


@dataclass(frozen=True)
class Build:
    """A build by its headers. name: as people call it; bytes: on disk."""

    name: str
    folder: Path
    fingerprint: str
    family: str
    bytes: int

    def described(self) -> dict[str, Any]:
        """As it stands in a receipt."""
        return {"name": self.name, "fingerprint": self.fingerprint, "family": self.family, "bytes": self.bytes}


def builds(context: Any, names: Sequence[str]) -> list[Build]:
    """The builds that the arguments name, in their order. Raises PackError, BuildAmbiguous."""
    host, found = context.host(), []
    for name in names:
        ref = host.find(name)
        view = host.probe(ref)
        found.append(Build(ref.name, ref.folder, view.fingerprint, view.family, view.bytes))
    return found


def numeric_options(context: Any) -> dict[str, Any]:
    """The settings that change a build's arithmetic, for a run's parameters."""
    e = context.settings.engine
    return {"cache_quant": e.cache_quant, "linear_input_fp8": e.linear_input_fp8, "qat_sim": e.qat_sim, "exact": e.exact, "routes": e.routes}


@contextmanager
def opened(context: Any, build: Build, dtype: str | None = None) -> Iterator[Any]:
    """The Engine of a build, as the chat would open it; on the calling thread. Raises PackError, DoesNotFit, BackendMissing.

    What was measured about this machine is read from the database; what is measured now is forgotten.
    """
    from dsv41chat.engine.backend import require_backend

    require_backend()
    from dsv41chat.engine import open_engine
    from dsv41chat.ui.builds import table_settings

    settings, e = context.settings, context.settings.engine
    engine = open_engine(
        build.folder, dtype=dtype, **numeric_options(context), facts=dict(context.store().facts), cache_dir=settings.paths.cache,
        engram=table_settings(settings), context=None if e.context == "auto" else e.context,
        margin=None if e.memory_margin == "auto" else e.memory_margin,
        progress=lambda event: context.stderr.status(f"loading {build.name}: {event.stage} {event.done:,} of {event.total:,} {event.unit}"),
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every arm that measures."""
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run of the same words had finished")
    parser.add_argument("-o", "--output", type=Path, metavar="PATH", help="write the receipt there too: a .json file or a folder")


def command(arm: str, *words: object) -> str:
    """The command line of a receipt. A path is shown by its last part: a receipt names no folder of this machine."""
    shown = [str(word) for word in words]
    return " ".join(["dsv41chat eval", arm, *(Path(word).name if os.sep in word else word for word in shown)])


class Run:
    """One measurement that survives being killed. As a context manager it holds a lock on its folder.

    state: a JSON object, {} at first; `save` makes it durable. seconds: work of all processes so far, up to the last save.
    parameters, builds: what the key is made of, with the environment. Raises UsageError when another process runs the same.
    """

    def __init__(self, context: Any, arm: str, builds: Sequence[Build], parameters: dict[str, Any], *, fresh: bool = False):
        self.context, self.arm, self.builds, self.parameters = context, arm, list(builds), parameters
        device, _ = context.host().backend()
        self.environment = environment() | {"device": device}
        identity = [arm, [build.fingerprint for build in builds], parameters, self.environment]
        self.key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        paths = context.settings.paths
        self.receipts = Receipts(paths.state)
        self.folder = paths.state / "eval" / f"{arm}-{self.key}"
        self.state: dict[str, Any] = {}
        self.seconds = 0.0
        self._fresh, self._lock, self._since = fresh, -1, time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> Run:
        private_folder(self.folder)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"Another process is running this very eval {self.arm}.", hint="wait for it, or change a parameter") from None
        _sweep(self.folder)
        if self._fresh:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
        path = self.folder / "state.json"
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.state, self.seconds = saved["state"], saved["seconds"]
            self.context.stderr.notice(f"eval {self.arm}: going on where an earlier run was stopped (--fresh starts anew)")
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def save(self) -> None:
        """Make `state` durable: a process that is killed now goes on from here. Raises StoreError."""
        now = time.monotonic()
        self.seconds, self._since = self.seconds + now - self._since, now
        write_private(self.folder / "state.json", json.dumps({"seconds": self.seconds, "state": self.state}).encode())

    def write(self, name: str, fill: Callable[[Path], None]) -> Path:
        """A file beside the state, for what JSON cannot hold: `fill(path)` writes a temporary file, which takes its name when it is on
        the disk. Refer to it from `state`, and `save` after it: until then a restart sees the old state."""
        path = self.folder / name
        temporary = self.folder / f".{name}.tmp"
        fill(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return path

    def progress(self, what: str, done: float, total: float, note: str = "") -> None:
        """A line on stderr: on a terminal drawn over itself, else one every ten seconds."""
        stderr, now = self.context.stderr, time.monotonic()
        text = f"eval {self.arm}: {what} {done:,} of {total:,}" + (f", {note}" if note else "")
        if stderr.terminal:
            stderr.status(text)
        elif now - self._shown >= _LINE_S or done == total:
            self._shown = now
            stderr.notice(text)

    def finish(
        self,
        result: dict[str, Any],
        *,
        summary: str | Mapping[str, str],
        command: str,
        short: str | Mapping[str, str] | None = None,
        builds: Sequence[Build] | None = None,
    ) -> dict[str, Any]:
        """Keep the receipt under the fingerprint of each of `builds` (default: the first one), delete the state. Returns the first one's.

        result: the figures, JSON, the same however often the run was stopped. summary: one line for people, with the figure first; short:
        two or three words of it for lists of builds, by default all of it. Where builds differ in them, by fingerprint.
        """
        self.save()
        receipt: dict[str, Any] = {}
        for build in self.builds[:1] if builds is None else builds:
            line, few = (t if t is None or isinstance(t, str) else t[build.fingerprint] for t in (summary, short))
            own = self._receipt(result, build, line, few or line, command)
            self.receipts.put(build.fingerprint, self.arm, self.key, own)
            receipt = receipt or own
        self.context.stderr.clear()
        shutil.rmtree(self.folder)
        return receipt

    def _receipt(self, result: dict[str, Any], build: Build, summary: str, short: str, command: str) -> dict[str, Any]:
        return {
            "what": f"eval {self.arm}", "arm": self.arm, "summary": summary, "short": short, "time": round(time.time(), 3), "command": command,
            **self.environment, "build": build.described(), "builds": [build.described() for build in self.builds],
            "parameters": self.parameters, "seconds": round(self.seconds, 1), "result": result,
        }  # fmt: skip


def show(context: Any, receipt: dict[str, Any], text: str) -> None:
    """Print the result (--json: as one object, else `text`) and write the receipt to where -o says."""
    if context.args.output is not None:
        accelerator = "cpu" if receipt["device"] == "cpu" else "gpu"
        path = write_receipt(context.args.output.expanduser(), receipt["what"].replace(" ", "-"), receipt, accelerator)
        context.stderr.notice(f"receipt: {path}")
    if context.args.json:
        context.json({"arm": receipt["arm"], "build": receipt["build"], "parameters": receipt["parameters"]} | receipt["result"])
    else:
        context.out.write(text if text.endswith("\n") else text + "\n")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table. The one place where cells are joined: a bar inside a cell is escaped, so that it begins no other."""
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def _sweep(mine: Path) -> None:
    """Delete the states that nobody has gone on with for a month."""
    for folder in mine.parent.iterdir():
        try:
            age = time.time() - (folder / "state.json").stat().st_mtime
        except OSError:  # no state yet, or another run has just finished
            continue
        if folder != mine and age > STALE_S:
            shutil.rmtree(folder, ignore_errors=True)

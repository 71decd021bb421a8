"""`python -m dsv41chat` and the console script `dsv41chat`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from dsv41chat.cli import leave
        from dsv41chat.cli import main as run

        exit = run()
    except KeyboardInterrupt:  # while modules are loaded: nothing was begun
        sys.exit(130)
    leave(exit)


if __name__ == "__main__":
    main()

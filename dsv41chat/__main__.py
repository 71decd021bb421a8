"""`python -m dsv41chat` and the console script `dsv41chat`."""

from __future__ import annotations


def main() -> None:
    from dsv41chat.cli import leave
    from dsv41chat.cli import main as run

    leave(run())


if __name__ == "__main__":
    main()

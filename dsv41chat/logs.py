"""The log file: `dsv41chat.log`, five files of 2 MB, ids and sizes and times but no message text."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from dsv41chat.ui.sanitize import visible

_BYTES = 2_000_000
_FILES = 5
_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


class _Visible(logging.Formatter):
    """For a terminal: an exception's text may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _PrivateFile(RotatingFileHandler):
    def _open(self):
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=lambda path, flags: os.open(path, flags, 0o600))

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written (the disk is full) is lost; the base class would print a traceback over the screen."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def start_logging(folder: Path, level: str, file: Path | None = None, *, stderr: bool = False) -> str | None:
    """Send the package's log to `file`, or to dsv41chat.log in `folder`. Returns why it cannot, or None.

    level: error, warning, info or debug. stderr: debug lines to standard error as well.
    """
    logger = logging.getLogger("dsv41chat")
    stop_logging()
    logger.setLevel(logging.DEBUG if stderr else level.upper())
    logger.propagate = False
    problem = None
    path = file or folder / "dsv41chat.log"
    try:
        for folder in (*reversed(path.parent.parents), path.parent):  # parents=True would leave those above open to others
            folder.mkdir(mode=0o700, exist_ok=True)
        handler: logging.Handler = _PrivateFile(path, maxBytes=_BYTES, backupCount=_FILES - 1, encoding="utf-8", delay=False)
        handler.setLevel(level.upper())
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    except OSError as error:
        logger.addHandler(logging.NullHandler())
        problem = f"the log {path} cannot be written: {error.strerror}"
    if stderr:
        handler = logging.StreamHandler()
        handler.setFormatter(_Visible(_FORMAT))
        logger.addHandler(handler)
    return problem


def stop_logging() -> None:
    """Close the handlers; a later start begins anew."""
    logger = logging.getLogger("dsv41chat")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()

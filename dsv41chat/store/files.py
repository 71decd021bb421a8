"""Private files and folders: nobody but the user may read what is said here.

Folders that we make are 0700 and files 0600, whatever the umask. A folder that was there before keeps its mode: it may be a
folder of the user's own that --data-dir names.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dsv41chat.store.errors import StoreError, from_os

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def refuse_file(folder: Path) -> None:
    """Raise StoreError where a file stands in the place of `folder` or of a folder above it; one that is not there may come yet."""
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise StoreError(f"{place} is not a folder", "move it aside, or choose another folder with --data-dir")


def mounted_readonly(path: Path) -> bool:
    """Whether the file system of an existing `path` is mounted so that nobody may write there, whatever the rights say."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def private_folder(path: Path) -> Path:
    """Make `path` and its missing parents, the ones made with mode 0700. Raises StoreReadOnly, StoreFull or StoreError."""
    path = Path(path)
    missing = []
    folder = path
    while not folder.exists() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    try:
        refuse_file(folder)
        for folder in reversed(missing):
            try:
                os.mkdir(folder, FOLDER_MODE)
            except FileExistsError:
                # Another process was faster.
                continue
            os.chmod(folder, FOLDER_MODE)
        refuse_file(path)
    except OSError as error:
        raise from_os(error, path) from error
    return path


def private_file(path: Path) -> Path:
    """Make sure that `path` exists with mode 0600, before a library opens it with a mode of its own. Raises as `private_folder`.

    A file that is there and can be written is not opened: closing it again would take away every lock that SQLite has on it in this
    process, and another process would then remove the log that is still written to.
    """
    try:
        usable = path.is_file() and os.access(path, os.R_OK | os.W_OK) and path.stat().st_mode & FILE_MODE == FILE_MODE
        if not usable:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        if os.stat(path).st_mode & 0o777 != FILE_MODE:
            os.chmod(path, FILE_MODE)
    except OSError as error:
        raise from_os(error, path) from error
    return path


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path` whole or not at all: temporary file in the same folder, fsync, rename. Raises as `private_folder`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            # The rename itself survives a power cut only once its folder is on the disk.
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise from_os(error, path) from error

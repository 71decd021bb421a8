"""Receipts: what was measured, with what, as JSON. Nothing in them names a machine, a folder or a person."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

RECEIPTS = Path(__file__).parent / "receipts"
OUTPUT_HELP = "receipt file or folder; default: bench/receipts of a checkout, for an installed program the user's state folder"


def receipts_folder(data_dir: str | Path | None = None) -> Path:
    """Where receipts go that were not sent elsewhere: to those of a checkout, else into the user's state folder. data_dir: of --data-dir."""
    project = RECEIPTS.parents[2] / "pyproject.toml"
    if project.is_file() and 'name = "dsv41chat"' in project.read_text(encoding="utf-8"):
        return RECEIPTS
    from dsv41chat.settings import state_folder

    return state_folder(data_dir) / "bench"


def device_name(accelerator: str = "cpu") -> str:
    """As it stands in a receipt's file name: `linux-x86_64-2cpu`."""
    return f"{platform.system()}-{platform.machine()}-{os.cpu_count()}{accelerator}".lower()


def environment(packages: tuple[str, ...] = ("numpy", "mlx")) -> dict:
    """Commit and versions. dirty: files differ from it. GIT_COMMIT: names the commit of a copy whose git data are absent or older."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    commit, dirty = _commit()
    kernel = ".".join(platform.release().split(".")[:2])
    system = {"system": platform.system(), "release": kernel, "machine": platform.machine(), "cpus": os.cpu_count()}
    return {"commit": commit, "dirty": dirty, "python": platform.python_version(), "versions": versions, **system}


def _commit() -> tuple[str | None, bool | None]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()

    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"], None
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def write_receipt(target: Path | None, what: str, payload: dict, accelerator: str = "cpu") -> Path:
    """Write `<date>-<what>-<device>.json` into the folder `target`, or to `target` itself when it ends in .json. Returns the whole path.

    target None: `receipts_folder()`. In a folder no receipt takes the place of another: later ones of a day have a number.
    """
    target = receipts_folder() if target is None else target.expanduser().absolute()
    if target.suffix != ".json":
        target.mkdir(parents=True, exist_ok=True)
        name = f"{datetime.date.today().isoformat()}-{what}-{device_name(accelerator)}"
        names = (f"{name}{'' if number == 1 else f'-{number}'}.json" for number in itertools.count(1))
        target = next(path for path in map(target.joinpath, names) if not path.exists())
    target.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return target

"""Which device computes, and how much memory there is: of the machine, of a cgroup, of the device."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


def device_kind() -> str:
    """metal, cuda or cpu: what MLX computes on by default."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


@dataclass(frozen=True)
class Machine:
    """Bytes. total: memory that this process may use, which a cgroup can cut below the machine's. available: of that, not in use; what
    the page cache holds counts as available. device: what the device may hold. limit: what the device's number is, in words."""

    kind: str
    total: int
    available: int
    device: int
    limit: str


def read_machine(root: Path = Path("/"), kind: str | None = None) -> Machine:
    """This machine as it is now. root: where /proc and /sys are looked for, for tests; kind: a device kind instead of the real one."""
    kind = kind or device_kind()
    total, available = _memory(root)
    for limit, used in _cgroups(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    if kind == "cpu":
        return Machine(kind, total, available, total, "memory")
    info = mx.device_info()
    if kind == "metal":
        size = int(info.get("max_recommended_working_set_size") or 0.75 * total)
        return Machine(kind, total, available, min(size, total), "Metal's working set (sudo sysctl iogpu.wired_limit_mb=N raises it)")
    size = int(info.get("free_memory") or info.get("total_memory") or info.get("memory_size") or total)
    return Machine(kind, total, available, size, "free GPU memory")


def _memory(root: Path) -> tuple[int, int]:
    """(total, available) of the machine."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:]}
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, _mac_available(total) if sys.platform == "darwin" else total // 2


def _mac_available(total: int) -> int:
    """Free, inactive, speculative and purgeable pages; half of all when the system does not say."""
    try:
        lines = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
        page = int(lines[0].split("page size of ")[1].split()[0])
        parts = [line.partition(":") for line in lines[1:]]
        pages = {name.strip(): int(value.strip(" .")) for name, _, value in parts if value.strip(" .").isdigit()}
        names = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
        return min(total, page * sum(pages.get(name, 0) for name in names))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return total // 2


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use without what can be dropped) of every cgroup above this process that has a limit, versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    places = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            places.append((root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            places.append((root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    found = []
    for base, path, limit_name, used_name, cache_name in places:
        below = [part for part in path.split("/") if part]
        # Inside a container the own group is often mounted as the root, so a path that is not there is no fault.
        for folder in [base.joinpath(*below[:i]) for i in range(len(below) + 1)]:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and limit < 1 << 60:
                found.append((limit, max(0, (used or 0) - _stat(folder / "memory.stat", cache_name))))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name + " ")), 0)
    except (OSError, ValueError):
        return 0

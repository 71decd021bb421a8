"""What the operating system is asked for, behind one object, so that tests can put another in its place.

`PosixLayer` is what every platform has; `LinuxLayer` and `MacLayer` add what only they have. A layer never decides
anything: it does one call, or raises `Unsupported` with the reason, or OSError.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import sys
import threading
import time

import numpy as np

MIB = 1 << 20
LATENCY_WARM_S = 15e-6


class Unsupported(Exception):
    """This call does not exist here (or is forbidden); str() is the reason. The next means is to be used."""


class MappedFile:
    """A read-only map of a whole file. array: uint8 [size]; it keeps the map alive, so the map is never closed by hand."""

    def __init__(self, mapped: mmap.mmap):
        self.mmap = mapped
        self.array = np.frombuffer(mapped, np.uint8)
        self.address = self.array.ctypes.data


def page_runs(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbours of a sorted int64 [n] page list: (first page, number of pages) of each run."""
    if not pages.size:
        return pages, pages
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = np.concatenate(([0], cuts))
    return pages[starts], np.diff(np.concatenate((starts, [pages.size])))


class PosixLayer:
    """The calls that every platform has. advisers: the means of starting many reads at once, best first."""

    name = "posix"
    advisers: tuple[str, ...] = ()
    probes: tuple[str, ...] = ("mincore", "latency")
    drops_pages = False  # can pages be dropped again after a cached read?

    def __init__(self):
        self.page_size = mmap.PAGESIZE
        self._libc = ctypes.CDLL(None, use_errno=True)

    clock = staticmethod(time.perf_counter)

    # files
    def open(self, path) -> int:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def close(self, fd: int) -> None:
        os.close(fd)

    def identity(self, target) -> tuple[int, int, int, int]:
        """(device, inode, size, mtime in ns) of an open descriptor or of a path."""
        stat = os.stat(target)
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def map(self, fd: int, size: int) -> MappedFile:
        """Map read-only and switch read-ahead off: with it on, one cold row costs megabytes of reads."""
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        return MappedFile(mapped)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(fd, [buffer], offset)
        data = os.pread(fd, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def take(self, rows: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy rows[ids] into out. Page faults happen here; the interpreter lock is released meanwhile."""
        # mode="clip" is what lets numpy write into `out` without a second buffer; ids were checked before.
        np.take(rows, ids, axis=0, out=out, mode="clip")

    def open_uncached(self, path) -> int:
        """A descriptor whose reads leave nothing behind in the page cache."""
        raise Unsupported(f"no uncached reads on {self.name}")

    def direct_alignment(self) -> int:
        """Alignment that reads on an uncached descriptor need; 1 when there is no rule."""
        return 1

    # starting reads, dropping pages
    def advise(self, means: str, fd: int, mapped: MappedFile | None, pages: np.ndarray) -> None:
        raise Unsupported(f"{means} does not exist on {self.name}")

    def drop(self, fd: int, mapped: MappedFile | None, pages: np.ndarray) -> None:
        raise Unsupported(f"pages cannot be dropped on {self.name}")

    def unmap_touched(self, mapped: MappedFile) -> None:
        """Forget the page table entries of a map; the pages stay cached. Bounds the process's resident size."""

    def mapped_resident_bytes(self) -> int:
        """File pages that count as this process's memory; 0 where nobody counts them so."""
        return 0

    # residency
    def mincore(self, mapped: MappedFile, pages: np.ndarray) -> np.ndarray:
        """bool [n]: which pages of the map are in memory."""
        vec = (ctypes.c_ubyte * 1)()
        size = self.page_size
        call, address, length = self._libc.mincore, ctypes.c_void_p, ctypes.c_size_t(size)
        resident = np.zeros(len(pages), bool)
        for i, page in enumerate(pages.tolist()):
            if call(address(mapped.address + page * size), length, vec) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"mincore: {os.strerror(code)}")
            resident[i] = vec[0] & 1
        return resident

    def mincore_truthful(self, path) -> bool:
        return True

    def nowait(self, fd: int, pages: np.ndarray) -> np.ndarray:
        raise Unsupported(f"no RWF_NOWAIT on {self.name}")

    def latency(self, fd: int, pages: np.ndarray) -> np.ndarray:
        """bool [n] by timing one byte of each page. It reads what it measures."""
        resident = np.zeros(len(pages), bool)
        byte = memoryview(bytearray(1))
        for i, page in enumerate(pages.tolist()):
            began = self.clock()
            self.pread_into(fd, byte, page * self.page_size)
            resident[i] = self.clock() - began < LATENCY_WARM_S
        return resident

    # the machine
    def memory(self) -> tuple[int, int]:
        """(physical, available) bytes."""
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2

    def volume(self, path) -> str:
        return f"{os.statvfs(path).f_fsid:x}"

    def removable(self, path) -> bool:
        """True on network or removable volumes, where a file may vanish under a map."""
        return False


class LinuxLayer(PosixLayer):
    """process_madvise, fadvise, RWF_NOWAIT, O_DIRECT. System call numbers are the same on x86-64 and arm64."""

    name = "linux"
    advisers = ("process_madvise", "fadvise")
    probes = ("mincore", "nowait", "latency")
    drops_pages = True
    SYS_PROCESS_MADVISE, MADV_WILLNEED, MAX_RANGES = 440, 3, 1024
    NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "afs", "virtiofs")

    def __init__(self):
        super().__init__()
        self._pidfd: tuple[int, int] | None = None
        self._pidfd_lock = threading.Lock()

    def open(self, path) -> int:
        fd = super().open(path)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open_uncached(self, path) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise Unsupported(f"O_DIRECT: {error.strerror}") from error

    def direct_alignment(self) -> int:
        return 4096

    def _own_pidfd(self) -> int:
        with self._pidfd_lock:
            pid = os.getpid()
            if self._pidfd is None or self._pidfd[0] != pid:
                if not hasattr(os, "pidfd_open"):
                    raise Unsupported("process_madvise: no pidfd_open in this Python")
                try:
                    self._pidfd = pid, os.pidfd_open(pid)
                except OSError as error:
                    raise Unsupported(f"process_madvise: pidfd_open: {error.strerror}") from error
            return self._pidfd[1]

    def advise(self, means, fd, mapped, pages) -> None:
        starts, lengths = page_runs(pages)
        size = self.page_size
        if means == "process_madvise":
            if mapped is None:
                raise Unsupported("process_madvise: the file is not mapped")
            self._process_willneed(mapped.address + starts * size, lengths * size)
        elif means == "fadvise":
            for start, length in zip(starts.tolist(), lengths.tolist()):
                os.posix_fadvise(fd, start * size, length * size, os.POSIX_FADV_WILLNEED)
        else:
            super().advise(means, fd, mapped, pages)

    def _process_willneed(self, addresses: np.ndarray, lengths: np.ndarray) -> None:
        pidfd = self._own_pidfd()
        ranges = np.empty((len(addresses), 2), np.uint64)
        ranges[:, 0], ranges[:, 1] = addresses, lengths
        for lo in range(0, len(ranges), self.MAX_RANGES):
            part = ranges[lo : lo + self.MAX_RANGES]
            done = self._libc.syscall(
                ctypes.c_long(self.SYS_PROCESS_MADVISE),
                ctypes.c_int(pidfd),
                ctypes.c_void_p(part.ctypes.data),
                ctypes.c_size_t(len(part)),
                ctypes.c_int(self.MADV_WILLNEED),
                ctypes.c_uint(0),
            )
            # Less than all, or EAGAIN: the gather will fault for the rest. Anything else will not get better.
            if done < 0 and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ENOMEM):
                raise Unsupported(f"process_madvise: {os.strerror(code)}")

    def drop(self, fd, mapped, pages) -> None:
        if mapped is not None:  # fadvise silently keeps pages that are still mapped somewhere
            self.unmap_touched(mapped)
        starts, lengths = page_runs(pages)
        for start, length in zip(starts.tolist(), lengths.tolist()):
            os.posix_fadvise(fd, start * self.page_size, length * self.page_size, os.POSIX_FADV_DONTNEED)

    def mapped_resident_bytes(self) -> int:
        with open("/proc/self/statm") as fields:
            return int(fields.read().split()[2]) * self.page_size

    def unmap_touched(self, mapped) -> None:
        mapped.mmap.madvise(mmap.MADV_DONTNEED)

    def mincore_truthful(self, path) -> bool:
        # Since 5.2 the kernel answers "resident" for every page to a caller who neither owns the file nor may write it.
        # It judges by the effective ids; os.access uses the real ones unless told.
        if os.stat(path).st_uid == os.geteuid() or os.geteuid() == 0:
            return True
        return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)

    def nowait(self, fd, pages) -> np.ndarray:
        if not hasattr(os, "RWF_NOWAIT"):
            raise Unsupported("no RWF_NOWAIT in this Python")
        resident = np.zeros(len(pages), bool)
        byte = [bytearray(1)]
        for i, page in enumerate(pages.tolist()):
            try:
                resident[i] = os.preadv(fd, byte, page * self.page_size, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                pass
        return resident

    def memory(self) -> tuple[int, int]:
        fields = {}
        with open("/proc/meminfo") as lines:
            for line in lines:
                key, value = line.split(":")
                fields[key] = int(value.split()[0]) * 1024
        return fields["MemTotal"], fields["MemAvailable"]

    def removable(self, path) -> bool:
        best, kind = "", ""
        path = os.path.realpath(path)
        with open("/proc/self/mounts") as lines:
            for line in lines:
                _, point, fs, *_ = line.split()
                if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                    best, kind = point, fs
        return kind.startswith(self.NETWORK)


class MacLayer(PosixLayer):
    """F_RDADVISE, F_NOCACHE and mincore. Every answer of mincore is doubted until the self-check at load has passed."""

    name = "darwin"
    advisers = ("rdadvise",)
    F_RDADVISE, F_NOCACHE = 44, 48

    def _fcntl(self, fd: int, command: int, argument) -> None:
        fcntl.fcntl(fd, command, argument)

    def open_uncached(self, path) -> int:
        fd = super().open(path)
        try:
            self._fcntl(fd, self.F_NOCACHE, 1)
        except OSError as error:
            os.close(fd)
            raise Unsupported(f"F_NOCACHE: {error.strerror}") from error
        return fd

    def advise(self, means, fd, mapped, pages) -> None:
        if means != "rdadvise":
            return super().advise(means, fd, mapped, pages)
        size = self.page_size
        for start, length in zip(*(run.tolist() for run in page_runs(pages))):
            try:
                self._fcntl(fd, self.F_RDADVISE, struct.pack("=qi4x", start * size, length * size))  # struct radvisory
            except OSError as error:
                raise Unsupported(f"F_RDADVISE: {error.strerror}") from error

    def memory(self) -> tuple[int, int]:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        level, size = ctypes.c_int(0), ctypes.c_size_t(4)
        call = getattr(self._libc, "sysctlbyname", None)  # percent of memory that is available
        if call is None or call(b"kern.memorystatus_level", ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
            return total, total // 2
        return total, total * level.value // 100

    def removable(self, path) -> bool:
        return os.path.realpath(path).startswith("/Volumes/")


@functools.cache
def system_layer() -> PosixLayer:
    """The layer of the platform this process runs on; one for all readers."""
    if sys.platform.startswith("linux"):
        return LinuxLayer()
    return MacLayer() if sys.platform == "darwin" else PosixLayer()

"""The exceptions of the engine. Each message says what happened, why and what to do.

    EngineError
      PackError               a pack is missing, incomplete, damaged or not supported
        PackMissing           no such folder or no config.json
        PackIncomplete        a shard, a tensor or the tokenizer is absent
        PackUnsupported       a layout, a format or a value that this engine does not run
          ContextOutOfRange   a context was asked for that the pack does not have
        PackDamaged           bytes that contradict their header or their config
      DoesNotFit              admission refused before any weight was read
      ContextFull             the prompt is longer than the admitted context
      EngramReadError         a table row could not be read (file, offset)
      SnapshotMismatch        a stored state does not belong to this pack, plan or format
      Cancelled               the caller asked to stop
      RouteUnavailable        a demanded kernel route cannot be installed here
      BackendMissing          no MLX back end in this Python environment
      OutOfMemory             the device or the machine had no memory left in the middle of work
      DeviceLost              the device stopped answering; nothing runs on it until the program is started again
"""

from __future__ import annotations


class EngineError(Exception):
    """code: the machine-readable name that scripts see; hint: the next command or option to try."""

    code = "internal"

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


class PackError(EngineError):
    code = "build_damaged"


class PackMissing(PackError):
    code = "build_missing"


class PackIncomplete(PackError):
    code = "build_incomplete"


class PackUnsupported(PackError):
    code = "build_unsupported"


class ContextOutOfRange(PackUnsupported):
    code = "usage"


class PackDamaged(PackError):
    code = "build_damaged"


class DoesNotFit(EngineError):
    code = "does_not_fit"


class ContextFull(EngineError):
    code = "context_full"


class EngramReadError(EngineError):
    code = "build_damaged"


class SnapshotMismatch(EngineError):
    code = "internal"


class Cancelled(EngineError):
    code = "interrupted"


class RouteUnavailable(EngineError):
    code = "build_unsupported"


class BackendMissing(EngineError):
    code = "build_unsupported"


class OutOfMemory(EngineError):
    code = "out_of_memory"


class DeviceLost(EngineError):
    code = "device_lost"


# What MLX and the drivers say, in lower case; MLX has no types for it. Memory comes first: Metal reports both as a failed command buffer.
_NO_MEMORY = (
    "out of memory", "outofmemory", "insufficient memory", "unable to allocate", "failed to allocate", "attempting to allocate",
    "resource limit", "memoryallocation", "bad_alloc",
)  # fmt: skip
_LOST = (
    "timeout", "command buffer execution failed", "device removed", "device lost", "illegal memory access", "launch failed", "unspecified launch",
    "uncorrectable", "impacting interactivity", "device-side",
)  # fmt: skip


def device_failure(error: BaseException) -> EngineError | None:
    """What an exception of MLX means for a turn: OutOfMemory, DeviceLost, or None when it is neither."""
    if isinstance(error, EngineError) or not isinstance(error, RuntimeError | MemoryError):
        return None
    text = str(error)
    low, first = text.lower(), (text.strip().splitlines() or ["no memory"])[0][:200]
    if isinstance(error, MemoryError) or any(part in low for part in _NO_MEMORY):
        return OutOfMemory(f"Memory ran out while computing ({first}).", "--context with a smaller number, a smaller build, or end other programs")
    if any(part in low for part in _LOST):
        return DeviceLost(f"Restart needed: the GPU stopped answering ({first}).", "leave the program and start it again; everything is saved")
    return None

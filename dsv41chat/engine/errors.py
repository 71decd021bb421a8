"""The exceptions of the engine. Each message says what happened, why and what to do.

    EngineError
      PackError               a pack is missing, incomplete, damaged or not supported
        PackMissing           no such folder or no config.json
        PackIncomplete        a shard, a tensor or the tokenizer is absent
        PackUnsupported       a layout, a format or a value that this engine does not run
        PackDamaged           bytes that contradict their header or their config
      DoesNotFit              admission refused before any weight was read
      ContextFull             the prompt is longer than the admitted context
      EngramReadError         a table row could not be read (file, offset)
      SnapshotMismatch        a stored state does not belong to this pack, plan or format
      Cancelled               the caller asked to stop
      RouteUnavailable        a demanded kernel route cannot be installed here
      BackendMissing          no MLX back end in this Python environment
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

"""A lane as plain bytes, and back. Copies both ways: nothing here is a view of a live buffer, nothing live a view of what was stored.

A tensor is (dtype, shape, bytes) with dtype as safetensors spells it. Growing parts are the pools: the rows that the tokens
[first, last) completed. Fixed parts are everything else that position n needs: the visible rows of each ring (windows and open
groups), the n-gram history and the drafter's rings. Names are those of the lane's buffers, so both families need no list here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import EngineError, SnapshotMismatch
from dsv41chat.engine.lane import Lane, PoolSpec

if TYPE_CHECKING:
    from dsv41chat.engine.engine import Engine
    from dsv41chat.engine.session import Session

# Raised by every change that may alter a bit of a state.
NUMERICS_VERSION = 1
HISTORY = "eng.hist"
DRAFT_KEY = "draft_fp"
_HISTORY_IDS = 3

Tensor = tuple[str, tuple[int, ...], Any]
_DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint8: "U8", mx.int32: "I32", mx.uint32: "U32"}
_BACK = {name: dtype for dtype, name in _DTYPES.items()}
_HOST = {"F32": np.float32, "BF16": np.uint16, "F16": np.uint16, "U8": np.uint8, "I32": np.int32, "U32": np.uint32}


def to_bytes(a: mx.array) -> Tensor:
    """A copy of an evaluated array."""
    name = _DTYPES[a.dtype]
    host = np.array(a.view(mx.uint16) if a.dtype in (mx.bfloat16, mx.float16) else a)
    return name, tuple(a.shape), host.tobytes()


def from_bytes(tensor: Tensor) -> mx.array:
    name, shape, data = tensor
    host = mx.array(np.frombuffer(data, _HOST[name]).reshape(shape))
    return host.view(_BACK[name]) if _BACK[name] != host.dtype else host


def growing(lane: Lane, first: int, last: int) -> dict[str, Tensor]:
    """What the tokens [first, last) added to the pools. last <= n."""
    if not 0 <= first <= last <= lane.n:
        raise ValueError(f"tokens {first}..{last} of a lane that holds {lane.n}")
    out = {}
    for name, spec in lane.specs.items():
        if isinstance(spec, PoolSpec) and last // spec.ratio > first // spec.ratio:
            out[name] = to_bytes(lane.rows(name, slice(first // spec.ratio, last // spec.ratio)))
    return out


def fixed(session: Session) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Everything that position n needs beside the pools, and metadata that says whose drafter's rings these are."""
    lane, engine = session.target.lane, session.engine
    out = {}
    for name, spec in lane.specs.items():
        if not isinstance(spec, PoolSpec) and len(rows := lane.saved_rows(spec)):
            out[name] = to_bytes(lane.rows(name, rows))
    history = _history(engine, lane.ids[: lane.n])
    if history is not None:
        out[HISTORY] = ("I32", history.shape, history.tobytes())
    draft = {_draft_name(name): to_bytes(a) for name, a in session.drafter.state().items()}
    return out | draft, {DRAFT_KEY: draft_fingerprint(session)} if draft else {}


def tail_bytes(lane: Lane, n: int) -> int:
    """Bytes of the rings' part of a tail at position n."""
    total = 0
    for spec in lane.specs.values():
        if not isinstance(spec, PoolSpec):
            total += len(spec.visible(n)) * int(np.prod(spec.tail)) * spec.dtype.size
    return total


def restore(session: Session, ids: Sequence[int], tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> None:
    """Put the session at position len(ids). Raises SnapshotMismatch, and leaves an empty lane, when the state is not of this build.

    Rings of another drafter are left out: drafting starts blind, with the same tokens.
    """
    lane, engine = session.target.lane, session.engine
    ids = [int(i) for i in ids]
    state: dict[str, Any] = {"ids": np.asarray(ids, np.int32)}
    try:
        for name, tensor in tensors.items():
            if name in lane.specs:
                state[name] = from_bytes(tensor)
            elif name != HISTORY and not name.startswith("draft."):
                raise SnapshotMismatch(f"stored state: this build has no {name}")
        history, stored = _history(engine, ids), tensors.get(HISTORY)
        if (history is None) != (stored is None) or (history is not None and history.tobytes() != bytes(stored[2])):
            raise SnapshotMismatch("stored state: the n-gram history does not belong to its token ids")
    except BaseException:
        session.clear()
        raise
    session.clear()
    lane.load(state)
    draft = {name: from_bytes(t) for name, t in tensors.items() if name.startswith("draft.")}
    if not draft or meta.get(DRAFT_KEY) != draft_fingerprint(session):
        draft = {}
    try:
        session.drafter.load(draft, lane.n)
    except EngineError:
        session.drafter.load({}, lane.n)


def _history(engine: Engine, ids: Sequence[int]) -> np.ndarray | None:
    """int32: the last compressed ids before a position, None for a build without n-gram tables."""
    hasher = getattr(engine.trunk, "hasher", None)
    if hasher is None:
        return None
    return hasher.compress(np.asarray(ids[-_HISTORY_IDS:], np.int64)).astype(np.int32)


def _draft_name(name: str) -> str:
    return name if name.startswith("draft.") else f"draft.{name}"


def draft_fingerprint(session: Session) -> str:
    """Which drafter's rings these are; its weights and widths follow from the pack."""
    d = session.drafter
    return f"{d.kind}.{d.block}.{d.window}"


def state_facts(engine: Engine) -> dict[str, Any]:
    """Everything that can change a bit or a shape of this engine's states; the folder's name is not among it."""
    specs = []
    for s in engine.trunk.new_lane().specs.values():
        sizes = (s.ratio,) if isinstance(s, PoolSpec) else (s.window, s.group, s.overlap)
        specs.append([s.name, *sizes, list(s.tail), str(s.dtype)])
    return {
        "pack": engine.fingerprint, "family": engine.family, "device": engine.device, "mlx": engine.mlx_version, "numerics": NUMERICS_VERSION,
        "dtype": str(engine.trunk.dtype), "numeric": dict(engine.numeric_options), "grid": engine.prefill_chunk, "lane": specs,
        "history": _HISTORY_IDS,
    }  # fmt: skip

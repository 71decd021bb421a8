"""`models verify --goldens`: run a pack against reference logits, one shot, in chunks and token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackDamaged, PackMissing
from dsv41chat.engine.golden_drafts import greedy_results
from dsv41chat.engine.pack.build import build_drafter, build_trunk, open_pack
from dsv41chat.engine.pack.index import read_header
from dsv41chat.engine.pack.matrix import floats
from dsv41chat.engine.target import Target
from dsv41chat.engine.trial import Trunk

_NEAR_TIE = 2e-3
_SHORT_ATOL, _SHORT_SHARE = 1e-3, 0.6
_FLOAT32_LIMIT_BYTES = 10**9


@dataclass(frozen=True)
class Check:
    """mode: one-shot, chunks or decode. n: rows compared. max_abs: largest logit difference. top1: share of rows with the same
    argmax. first_bad: first position beyond tolerance, None without one. Only hard checks decide the verdict."""

    name: str
    mode: str
    n: int
    max_abs: float
    top1: float
    first_bad: int | None
    hard: bool
    ok: bool


@dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks if c.hard)


def verify_goldens(
    folder: str | Path, golden_file: str | Path, *, dtype: str | None = None, atol: float = 5e-4, chunks: tuple[int, ...] | None = None
) -> Report:
    """Every check of the file that applies; an empty report means that none does.

    dtype: float32 for packs up to 1 GB, else the device's. chunks: piece sizes, one pass each, besides the file's own cuts.
    Raises PackError for a pack or golden file that cannot be read.
    """
    pack, golden = open_pack(folder), _read(Path(golden_file))
    dtype = dtype or ("float32" if pack.weight_bytes <= _FLOAT32_LIMIT_BYTES else None)
    precision = getattr(mx, dtype) if dtype else None
    checks: list[Check] = []
    # The rounding that a family's goldens may be made with; all of it is off in plain ones.
    rounding = "qat_sim" if pack.config.family == "v4" else "cache_quant"
    plain, rounded = _find(golden, "logits", "no_quant"), _find(golden, f"logits.{rounding}", rounding)
    if "input_ids" in golden and (plain or "greedy_ids" in golden):
        trunk = build_trunk(pack, dtype=precision, cache_quant=False)
        if plain and "positions" in golden:
            checks += _logit_checks(trunk, golden, plain, atol, chunks, hard=True)
        if "greedy_ids" in golden:
            model = build_drafter(pack, trunk, rounded=False)
            for found in greedy_results(trunk, model, golden):
                checks.append(Check(found.name, "decode", found.n, 0.0, found.share, found.wrong, True, found.wrong is None))
            del model
        del trunk
    short = f"short_logits.{rounding}"
    if (rounded and "input_ids" in golden and "positions" in golden) or short in golden:
        trunk = build_trunk(pack, dtype=precision, **{rounding: True})
        if rounded and "input_ids" in golden and "positions" in golden:
            checks += _logit_checks(trunk, golden, rounded, atol, chunks, hard=False)
        if short in golden and "short_ids" in golden and "short_positions" in golden:
            checks.append(_short_check(trunk, golden, short))
    return Report(tuple(checks))


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise PackMissing(f"{path} is not a file", "name a golden file in safetensors format")
    kinds = {"I32": np.int32, "I64": np.int64, "U8": np.uint8}
    out = {}
    for name, ref in read_header(path).items():
        if ref.dtype in kinds:
            out[name] = np.frombuffer(ref.bytes(), kinds[ref.dtype]).reshape(ref.shape)
        elif ref.dtype in ("F32", "BF16", "F16"):
            out[name] = floats(ref)
    return out


def _find(golden: dict[str, np.ndarray], name: str, variant: str) -> str | None:
    """The tensor that carries a kind of logits: its plain name, else `logits.engram_on.<variant>.<who>`, ref64 before others."""
    if name in golden:
        return name
    prefix = f"logits.engram_on.{variant}."
    found = [k for k in golden if k.startswith(prefix) and "." not in k[len(prefix) :]]
    return f"{prefix}ref64" if f"{prefix}ref64" in found else min(found, default=None)


def _passes(golden: dict[str, np.ndarray], n: int, chunks: tuple[int, ...] | None) -> Iterator[tuple[str, str, list[int]]]:
    """(label, mode, cut positions from 0 to n) of every pass."""
    yield "", "one-shot", [0, n]
    for name in sorted(k for k in golden if k.startswith("chunk_cuts")):
        yield f" ({name})", "chunks", [int(v) for v in golden[name]]
    if "chunks" in golden:
        ends = [0, *(int(v) for v in np.cumsum(golden["chunks"]) if v <= n)]
        yield " (chunks)", "chunks", ends + list(range(ends[-1] + 1, n + 1))
    for size in chunks or ():
        yield f" (pieces of {size})", "chunks", [*range(0, n, size), n]
    yield "", "decode", list(range(n + 1))
    if "decode_cuts" in golden:
        yield " (decode_cuts)", "decode", [int(v) for v in golden["decode_cuts"]]


def _run(trunk: Trunk, ids: np.ndarray, cuts: list[int], positions: np.ndarray) -> np.ndarray:
    """float32 [positions, vocab]: logits at `positions` of one sequence fed in pieces between the cuts."""
    if cuts[0] != 0 or cuts[-1] != len(ids) or any(a >= b for a, b in zip(cuts, cuts[1:])):
        raise PackDamaged(f"the golden file's cuts {cuts} do not run from 0 to {len(ids)}")
    target, rows = Target(trunk), {}
    for a, b in zip(cuts, cuts[1:]):
        wanted = [int(p) for p in positions if a <= p < b]
        trial = target.rows(ids[a:b], logits_from=0 if wanted else None)
        for p in wanted:
            rows[p] = np.array(trial.logits[p - a])
        target.commit(trial, b - a)
    return np.stack([rows[int(p)] for p in positions])


def _logit_checks(trunk: Trunk, golden: dict[str, np.ndarray], name: str, atol: float, chunks, hard: bool) -> list[Check]:
    ids, positions, want = golden["input_ids"], golden["positions"], golden[name]
    if want.shape[0] != len(positions) or positions.min() < 0 or positions.max() >= len(ids):
        raise PackDamaged(f"the golden file's {name} {list(want.shape)} does not fit its {len(positions)} positions of {len(ids)} ids")
    if want.shape[1] != trunk.config.vocab_size:
        raise PackDamaged(f"the golden file has logits of {want.shape[1]} ids, the pack {trunk.config.vocab_size}")
    top = np.sort(want, axis=-1)
    margin = golden["margin"][positions] if "margin" in golden else top[:, -1] - top[:, -2]
    out, done = [], {}
    for label, mode, cuts in _passes(golden, len(ids), chunks):
        # Token by token is also pieces of 1: the same calls are run once.
        if (key := tuple(cuts)) not in done:
            done[key] = _run(trunk, ids, cuts, positions)
        got = done[key]
        difference = np.abs(got - want).max(axis=-1)
        same = got.argmax(-1) == want.argmax(-1)
        # `not <=` also catches NaN, which compares false with everything.
        bad = ~(difference <= atol) | (~same & (margin > _NEAR_TIE))
        first = int(positions[np.flatnonzero(bad)[0]]) if bad.any() else None
        out.append(Check(name + label, mode, len(positions), float(difference.max()), float(same.mean()), first, hard, not bad.any()))
    return out


def _short_check(trunk: Trunk, golden: dict[str, np.ndarray], name: str) -> Check:
    ids, positions, want = golden["short_ids"], golden["short_positions"], golden[name]
    got = np.stack([_run(trunk, row, [0, len(row)], positions) for row in ids])
    difference = np.abs(got - want).max(axis=(1, 2))
    good = difference <= _SHORT_ATOL
    same = float((got.argmax(-1) == want.argmax(-1)).mean())
    first = None if good.all() else int(np.flatnonzero(~good)[0])
    return Check(name, "one-shot", len(ids), float(difference.max()), same, first, True, bool(good.mean() >= _SHORT_SHARE))

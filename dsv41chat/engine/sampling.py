"""`choose`: the one sampler. A pure function of (logits row, position, history counts, seed); nothing random is consumed.

The token at a position is the argmax of s_i - ln(-ln u_i) over the filtered candidates, with u_i a hash of (seed, position, id):
an exact sample of the filtered softmax that does not depend on drafting, on its depth or on what was rejected before.
Source: spec drafting, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dsv41chat.engine.errors import EngineError

K_MAX = 1024
_SHARES = 32
_MASK = (1 << 64) - 1
_SEED_STEP, _POSITION_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. top_k 0 means 1024 candidates. seed: 63 bits. Penalties count the generated part of the history."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self):
        checks = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "seed": 0 <= self.seed < 2**63,
            "presence_penalty": abs(self.presence_penalty) < float("inf"),
            "frequency_penalty": abs(self.frequency_penalty) < float("inf"),
        }
        for name, holds in checks.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which is outside its range")


def _mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed_bits(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """uint64 [k]: the noise bits of token ids at a position."""
    with np.errstate(over="ignore"):
        k = _mix(np.array([(seed + _SEED_STEP) & _MASK], np.uint64))
        k = _mix(k ^ np.uint64((position * _POSITION_STEP) & _MASK))
        return _mix(k ^ np.asarray(ids, np.uint64))


def keyed_uniform(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """float64 [k] in (0, 1), never 0 or 1."""
    return ((keyed_bits(seed, position, ids) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _largest(z: np.ndarray, k: int) -> np.ndarray:
    """Ascending ids of the k largest values and of all that equal the last of them."""
    ids, width = np.arange(len(z)), len(z) // _SHARES
    if width > k:
        # The largest of each share: k of these reach `bound`, so at least k values do, and few others have to be looked at.
        tops = z[: width * _SHARES].reshape(_SHARES, width).max(axis=0)
        bound = np.partition(tops, width - k)[width - k]
        ids = np.flatnonzero(z >= bound)
    values = z[ids]
    return ids[values >= np.partition(values, len(ids) - k)[len(ids) - k]] if k < len(ids) else ids


def filtered(z: np.ndarray, params: SamplingParams, limit: int = K_MAX) -> tuple[np.ndarray, np.ndarray]:
    """Surviving candidates of a logits row, float64 or float32, best first: (ids int64 [k], scaled logits float64 [k])."""
    k = min(params.top_k or len(z), limit, len(z))
    ids = _largest(z, k)
    ids = ids[np.lexsort((ids, -z[ids]))][:k]
    s = z[ids].astype(np.float64) / max(params.temperature, 1e-6)
    keep = k
    if params.top_p < 1:
        p = np.exp(s - s[0])
        keep = min(k, int(np.count_nonzero(np.cumsum(p / p.sum()) < params.top_p)) + 1)
    if params.min_p > 0:
        keep = min(keep, int(np.count_nonzero(s >= s[0] + np.log(params.min_p))))
    return ids[:keep], s[:keep]


def choose(logits: np.ndarray, position: int, counts: Mapping[int, int], params: SamplingParams, limit: int = K_MAX) -> int:
    """logits [vocab] float32; position the token will occupy; counts of generated ids. Returns the token id.

    Raises EngineError when the row holds nothing to choose from: a device that failed leaves rows of zeros or NaN behind.
    """
    # A NaN is both the largest and the smallest value of its row.
    largest, smallest = logits.max(), logits.min()
    if not (np.isfinite(largest) and np.isfinite(smallest)) or (len(logits) > 1 and largest == smallest):
        raise EngineError(
            f"the logits at position {position} are all equal or not finite; the device has failed or the weights are damaged",
            "restart the program, then run `dsv41chat models verify` on this build",
        )
    penalised = bool(counts) and bool(params.presence_penalty or params.frequency_penalty)
    if params.temperature == 0 and not penalised:
        return int(np.argmax(logits))
    z = logits
    if penalised:
        z = np.array(logits, np.float64)
        seen = np.fromiter(counts.keys(), np.int64, len(counts))
        z[seen] -= params.presence_penalty + params.frequency_penalty * np.fromiter(counts.values(), np.float64, len(counts))
    if params.temperature == 0:
        return int(np.argmax(z))
    ids, s = filtered(z, params, limit)
    score = s - np.log(-np.log(keyed_uniform(params.seed, position, ids)))
    best = np.flatnonzero(score == score.max())
    return int(ids[best].min())

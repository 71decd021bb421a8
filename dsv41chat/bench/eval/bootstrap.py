"""Perplexity from sums per window, with bootstrap intervals; the same resamples for two builds give the interval of their ratio.

Windows are drawn again with replacement, never tokens: the tokens of a window are not independent. Percentiles are widened for few
windows ("expanded percentile"): the plain ones are too narrow by about sqrt((n-1)/n) and by the normal instead of Student's t.
Source: spec, checkpoints, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES, SEED, LEVEL = 2000, 0, 0.95
_BLOCK = 100
_LARGEST = 700.0  # exp of more is no float64


@dataclass(frozen=True)
class Estimate:
    """value with its interval; low and high are None where there are fewer than two windows."""

    value: float
    low: float | None
    high: float | None

    def text(self, digits: int = 4) -> str:
        interval = "" if self.low is None else f" [{self.low:.{digits}f}, {self.high:.{digits}f}]"
        return f"{self.value:.{digits}f}{interval}"

    def percent(self) -> str:
        """A ratio as what it is above 1, in percent."""
        shown = [f"{100 * (value - 1):+.3g}" for value in (self.value, self.low, self.high) if value is not None]
        return f"{shown[0]} %" + (f" [{shown[1]}, {shown[2]}]" if len(shown) == 3 else "")


def perplexity(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """exp(sum of sums / sum of counts). sums: negative log likelihoods in nats per window; counts: of tokens."""
    means = _means([sums], counts)
    return _estimate(math.fsum(sums) / sum(counts), None if means is None else means[0], len(counts))


def ratio(sums: Sequence[float], others: Sequence[float], counts: Sequence[int]) -> Estimate:
    """Perplexity of `sums` by that of `others`, over the same windows in every resample."""
    means = _means([sums, others], counts)
    value = (math.fsum(sums) - math.fsum(others)) / sum(counts)
    return _estimate(value, None if means is None else means[0] - means[1], len(counts))


def _means(series: Sequence[Sequence[float]], counts: Sequence[int]) -> np.ndarray | None:
    """float64 [series, RESAMPLES]: mean NLL per resample; None without a second window."""
    n = len(counts)
    if n < 2:
        return None
    rng = np.random.default_rng(SEED)
    values, weights = np.asarray(series, np.float64), np.asarray(counts, np.float64)
    blocks = []
    for _ in range(0, RESAMPLES, _BLOCK):
        drawn = rng.integers(n, size=(_BLOCK, n))
        blocks.append(values[:, drawn].sum(-1) / weights[drawn].sum(-1))
    return np.concatenate(blocks, axis=1)


def _estimate(mean: float, resampled: np.ndarray | None, n: int) -> Estimate:
    value = math.exp(min(mean, _LARGEST))
    if resampled is None:
        return Estimate(value, None, None)
    tail = tail_share(n)
    low, high = np.exp(np.minimum(np.quantile(resampled, (tail, 1 - tail)), _LARGEST))
    return Estimate(value, float(low), float(high))


def tail_share(n: int, level: float = LEVEL) -> float:
    """Share of the resamples to cut at each end, so that n windows give an interval of this level.

    Student's quantile comes from its expansion in 1 / (n - 1), good to 1 % from five windows on.
    """
    normal, v = NormalDist(), n - 1
    z = normal.inv_cdf((1 + level) / 2)
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return 1 - normal.cdf(t * math.sqrt(n / v))

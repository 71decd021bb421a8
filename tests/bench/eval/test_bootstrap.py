"""Intervals hold what they promise: simulated corpora whose true perplexity is known."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from dsv41chat.bench.eval import bootstrap
from dsv41chat.bench.eval.bootstrap import Estimate, perplexity, ratio, tail_share

CORPORA, TRUE = 200, 1.1


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 600)


def corpus(rng, windows: int, tokens: int = 64) -> np.ndarray:
    """float64 [windows, tokens]: skewed NLLs with mean TRUE; a window's tokens share its difficulty."""
    difficulty = rng.lognormal(-0.125, 0.5, (windows, 1))
    return rng.gamma(0.6, TRUE / 0.6, (windows, tokens)) * difficulty


def share_covered(windows: int, units) -> float:
    hits = 0
    for seed in range(CORPORA):
        sums, counts = units(corpus(np.random.default_rng(seed), windows))
        found = perplexity(sums, counts)
        hits += found.low <= math.exp(TRUE) <= found.high
    return hits / CORPORA


@pytest.mark.parametrize("windows", [12, 40, 160])
def test_the_interval_holds_the_true_value(windows):
    assert 0.90 <= share_covered(windows, lambda nll: (nll.sum(1), [nll.shape[1]] * windows)) <= 0.99


def test_resampling_tokens_would_not():
    """The gate can fail: as if every token were a window of its own, the interval is far too narrow."""
    assert share_covered(12, lambda nll: (nll[:, :32].ravel(), [1] * (32 * len(nll)))) < 0.8


def test_the_interval_of_a_ratio_holds_the_true_ratio_and_is_narrow():
    hits, narrower = 0, 0
    for seed in range(CORPORA):
        rng = np.random.default_rng(1000 + seed)
        nll = corpus(rng, 40)
        worse = nll + 0.02 + rng.normal(0, 0.05, nll.shape)
        counts = [nll.shape[1]] * len(nll)
        found = ratio(worse.sum(1), nll.sum(1), counts)
        hits += found.low <= math.exp(0.02) <= found.high
        alone = perplexity(nll.sum(1), counts)
        narrower += (found.high - found.low) < 0.2 * (alone.high - alone.low) / alone.value
    assert 0.90 <= hits / CORPORA <= 0.99 and narrower == CORPORA


def test_values_are_exact_and_repeat():
    sums, counts = [3.0, 5.5, 1.25], [4, 5, 1]
    found = perplexity(sums, counts)
    assert found.value == math.exp(9.75 / 10) and found == perplexity(sums, counts) and found.low < found.value < found.high
    same = ratio(sums, sums, counts)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    alone = perplexity([2.0], [2])
    assert (alone.value, alone.low, alone.high) == (math.e, None, None) and alone.text() == "2.7183"
    assert Estimate(1.3049, 0.99, 1.00002).percent() == "+30.5 % [-1, +0.002]" and Estimate(0.5, None, None).percent() == "-50 %"
    assert perplexity([1e6, 1e6], [1, 1]).value == math.exp(bootstrap._LARGEST)


def test_few_windows_widen_the_interval():
    assert tail_share(10**6) == pytest.approx(0.025, rel=1e-3)
    # Student's 97.5 % quantile with 9 degrees of freedom is 2.262157, with 4 2.776445.
    for n, t in ((10, 2.262157), (5, 2.776445)):
        assert tail_share(n) == pytest.approx(1 - NormalDist().cdf(t * math.sqrt(n / (n - 1))), rel=0.04)

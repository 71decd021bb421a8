"""The keyed sampler: goldens, purity, and refusal of rows that hold nothing."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.sampling import SamplingParams, choose, filtered, keyed_bits, keyed_uniform
from tests.v41 import DATA

GOLDEN = json.loads((DATA / "drafting/keyed_sampler.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["uniform"], ids=lambda c: f"{c['seed']}-{c['position']}-{c['token']}")
def test_uniform(case):
    ids = np.array([case["token"]])
    assert int(keyed_bits(case["seed"], case["position"], ids)[0]) == int(case["bits"])
    assert keyed_uniform(case["seed"], case["position"], ids)[0] == case["u"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=range(len(GOLDEN["cases"])))
def test_golden_cases(case):
    params = SamplingParams(
        case["temperature"], case["top_k"], case["top_p"], case["min_p"], case["presence"], case["frequency"], case["seed"]
    )
    counts = {int(k): v for k, v in case["counts"].items()}
    z = np.array(case["logits"])
    assert choose(z, case["position"], counts, params) == case["token"]
    if case["temperature"]:
        penalised = z.astype(np.float64)
        for token, count in counts.items():
            penalised[token] -= params.presence_penalty + params.frequency_penalty * count
        assert list(filtered(penalised, params)[0]) == case["candidates"]


@pytest.mark.parametrize("size", [1, 7, 96, 4096, 70_000])
def test_candidates_are_the_largest_by_value_then_by_id(size):
    """Among rows with many equal values too, and of either precision; a whole sort says the same."""
    rng = np.random.default_rng(size)
    for row in (rng.standard_normal(size), np.round(rng.standard_normal(size), 1), np.where(rng.random(size) < 0.99, -1e30, rng.random(size))):
        row = row.astype(np.float32)
        order = np.lexsort((np.arange(size), -row))
        for limit in (1, 5, 64, 1024):
            for z in (row, row.astype(np.float64)):
                ids, s = filtered(z, SamplingParams(temperature=0.7), limit)
                assert list(ids) == list(order[:limit]) and list(s) == list(row[ids].astype(np.float64) / 0.7)


def test_it_samples_the_softmax():
    z = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    got = Counter(choose(z, position, {}, SamplingParams(temperature=1.0, seed=3)) for position in range(4000))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(got[token] / 4000 - share) < 0.03


def test_greedy_takes_the_lowest_of_the_best():
    assert choose(np.array([1.0, 5.0, 5.0]), 0, {}, SamplingParams()) == 1
    assert choose(np.array([1.0, 5.0, 5.0]), 0, {1: 1}, SamplingParams(presence_penalty=0.5)) == 2


@pytest.mark.parametrize("row", [np.zeros(5), np.array([1.0, np.nan, 2.0]), np.array([1.0, np.inf])])
def test_a_dead_device_is_noticed(row):
    with pytest.raises(EngineError, match="all equal or not finite"):
        choose(row, 7, {}, SamplingParams())


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}, {"seed": -1}, {"seed": 2**63}, {"top_k": -1}])
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)

"""Drafter forwards against the goldens (test T9): proposals exact, logits and confidences within 2e-5 of the largest value."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.draft.dspark import DSparkDrafter
from dsv41chat.engine.sampling import SamplingParams
from tests.engine.draft import golden

GREEDY = SamplingParams()
TOLERANCE = 2e-5


def check_dspark(drafter: DSparkDrafter, io: dict, tag: str) -> None:
    """The procedure of the goldens: ingest the prompt, then one row and one block at a time."""
    start, model = int(io["prefill_len"][0]), drafter.model
    taps = mx.array(io["main_hidden"])
    drafter.ingest(taps[:start], 0, [0] * start)
    for i, anchor in enumerate(int(a) for a in io["anchors"]):
        drafter.ingest(taps[start + i : start + i + 1], start + i, [anchor])
        n = start + i + 1
        proposal = drafter.propose(anchor, n, 5, GREEDY)
        ids, logits, _ = model.propose(anchor, n, 5, drafter.rings, GREEDY)
        assert list(proposal.ids) == ids == io["tokens" + tag][i].tolist()
        assert golden.relative(np.array(logits), io["logits" + tag][i]) <= TOLERANCE
        assert golden.relative(np.array(proposal.confidence), io["confidence_logit" + tag][i]) <= TOLERANCE
        shorter = drafter.propose(anchor, n, 2, GREEDY)
        assert shorter.ids == proposal.ids[:2] and np.allclose(shorter.confidence, proposal.confidence[:2], rtol=0, atol=1e-6)
    state, window = drafter.state(), drafter.window
    assert np.array(state["draft.pos"]).tolist() == [n - window, n]
    for s, want in enumerate(io["ring" + tag]):
        rows = want[np.arange(n - window, n) % window]
        assert golden.relative(np.array(state[f"draft.{s}.win"]), rows) <= TOLERANCE


@pytest.mark.parametrize(("tag", "cache_quant"), [("", True), ("_noqat", False)])
def test_v41_dspark(tag: str, cache_quant: bool):
    io = golden.arrays("v41_dspark_io")
    check_dspark(DSparkDrafter(golden.v41_model(cache_quant)), io, tag)


def test_v41_dspark_with_a_ring_that_is_not_full():
    io, drafter = golden.arrays("v41_dspark_io"), DSparkDrafter(golden.v41_model(True))
    drafter.ingest(mx.array(io["main_hidden"][:3]), 0, [0] * 3)
    anchor = int(io["anchors"][0])
    proposal = drafter.propose(anchor, 3, 5, GREEDY)
    _, logits, _ = drafter.model.propose(anchor, 3, 5, drafter.rings, GREEDY)
    assert list(proposal.ids) == io["short_tokens"].tolist()
    assert golden.relative(np.array(logits), io["short_logits"]) <= TOLERANCE
    assert golden.relative(np.array(proposal.confidence), io["short_confidence_logit"]) <= TOLERANCE

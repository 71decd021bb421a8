"""Drafter forwards against the goldens (test T9): proposals exact, logits and confidences within 2e-5 of the largest value."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.draft.dspark import DSparkDrafter
from dsv41chat.engine.draft.mtp import MTPDrafter
from dsv41chat.engine.sampling import SamplingParams
from tests.engine.draft import golden

GREEDY = SamplingParams()
TOLERANCE = 2e-5


def check_dspark(drafter: DSparkDrafter, io: dict, tag: str) -> None:
    """The procedure of the goldens: ingest the prompt, then one row and one block at a time."""
    start = int(io["prefill_len"][0])
    taps = mx.array(io["main_hidden"])
    drafter.ingest(taps[:start], 0, [0] * start)
    for i, anchor in enumerate(int(a) for a in io["anchors"]):
        drafter.ingest(taps[start + i : start + i + 1], start + i, [anchor])
        n = start + i + 1
        proposal = drafter.propose(anchor, n, 5, GREEDY)
        ids, logits, _ = drafter.compute.propose(anchor, n, 5, drafter.rings, GREEDY)
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


@pytest.mark.parametrize(
    ("name", "tag", "rounded"),
    [("v41_dspark", "", True), ("v41_dspark", "_noqat", False), ("v4_dspark", "", False), ("v4_dspark", "_qat", True)],
)
@pytest.mark.parametrize("host", [False, True], ids=["mlx", "host"])
def test_dspark(name: str, tag: str, rounded: bool, host: bool):
    check_dspark(DSparkDrafter(replace(golden.model(name, rounded), host=host)), golden.arrays(f"{name}_io"), tag)


@pytest.mark.parametrize("host", [False, True], ids=["mlx", "host"])
@pytest.mark.parametrize(("name", "rounded"), [("v41_dspark", True), ("v4_dspark", False)])
def test_dspark_with_a_ring_that_is_not_full(name: str, rounded: bool, host: bool):
    io, drafter = golden.arrays(f"{name}_io"), DSparkDrafter(replace(golden.model(name, rounded), host=host))
    drafter.ingest(mx.array(io["main_hidden"][:3]), 0, [0] * 3)
    anchor = int(io["anchors"][0])
    proposal = drafter.propose(anchor, 3, 5, GREEDY)
    _, logits, _ = drafter.compute.propose(anchor, 3, 5, drafter.rings, GREEDY)
    assert list(proposal.ids) == io["short_tokens"].tolist()
    assert golden.relative(np.array(logits), io["short_logits"]) <= TOLERANCE
    assert golden.relative(np.array(proposal.confidence), io["short_confidence_logit"]) <= TOLERANCE


@pytest.mark.parametrize("pieces", [[24], [1] * 24, [5, 11, 1, 7]])
def test_mtp(pieces: list[int]):
    """Entries one by one or many at a time, window borders included; then the chain of four guesses."""
    io, drafter = golden.arrays("v4_mtp_io"), MTPDrafter(golden.model("v4_mtp", False))
    model, at, streams = drafter.model, 0, []
    for size in pieces:
        h, tokens = mx.array(io["hidden"][at : at + size]), mx.array(io["tokens"][at + 1 : at + 1 + size])
        drafter.rings.begin(at)
        streams.append(model.entries(h, tokens, at, drafter.rings))
        drafter.rings.advance(at + size)
        at += size
    streams = mx.concatenate(streams)
    assert golden.relative(np.array(streams), io["stream"]) <= TOLERANCE
    assert golden.relative(np.array(model.logits(streams)), io["logits"]) <= TOLERANCE

    drafter.reset()
    model.block, drafter.block = 4, 4
    drafter.ingest(mx.array(io["hidden"]).reshape(24, -1), 0, io["tokens"][1:].tolist())
    pending = int(io["tokens"][24])
    assert list(drafter.propose(pending, 24, 4, GREEDY).ids) == io["chain_tokens"].tolist()
    again = drafter.propose(pending, 24, 2, GREEDY)
    assert list(again.ids) == io["chain_tokens"][:2].tolist(), "a chain leaves nothing behind"
    assert drafter.propose(pending + 1, 24, 2, GREEDY).ids == (), "the newest entry belongs to its own pending token"
    stream = drafter.last[0]
    for j, want in enumerate(io["chain_logits"]):
        stream = model.entries(stream, mx.array(io["chain_tokens"][j : j + 1]), 24 + j, drafter.rings)
        assert golden.relative(np.array(model.logits(stream)[0]), want) <= TOLERANCE

"""Two layers as wide as V4-Flash, with few experts and short groups: shapes fit, and rows are exact at real widths too."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.config_v4 import parse_v4
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.nn.linear import ExpertLinear, GroupedLinear, Linear
from dsv41chat.engine.pack.names_v4 import expected_v4
from dsv41chat.engine.plan import build_plan
from dsv41chat.engine.published import V4_FLASH as FLASH
from dsv41chat.engine.trunk_v4 import LayerV4, TrunkV4
from tests.engine.v4 import golden as g

pytestmark = pytest.mark.slow
ROWS = 44


@dataclass
class RandomSource:
    """Stands for a WeightSource: seeded values of the shapes that the inventory asks for."""

    expected: dict
    dtype: mx.Dtype

    def array(self, name, dtype=None):
        shape = self.expected[name].shape
        key = mx.random.key(sum(name.encode()))
        value = mx.random.normal(shape, key=key) * (0.02 if len(shape) > 1 else 0.3) + (1.0 if name.endswith("norm.weight") else 0.0)
        return value.astype(dtype or self.dtype)

    def float32(self, name):
        return self.array(name, mx.float32)

    def linear(self, name, *, rounds=True, dtype=None):
        return Linear(self.array(name, dtype))

    def grouped(self, name, groups):
        weight = self.array(name)
        return GroupedLinear(weight.reshape(groups, -1, weight.shape[-1]))

    def experts(self, prefix, which, count):
        return ExpertLinear(self.array(f"{prefix}.{which}.weight").astype(mx.float32), self.dtype)

    def ids(self, name, below):
        vocab, picks = self.expected[name].shape
        return mx.array((np.arange(vocab)[:, None] + np.arange(picks)) % 8, mx.int32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_rows_at_the_widths_of_flash(dtype):
    changes = {"num_hidden_layers": 2, "compress_ratios": [4, 16], "n_routed_experts": 8, "moe_intermediate_size": 256, "vocab_size": 500}
    c = parse_v4(FLASH | changes | {"num_hash_layers": 1, "index_topk": 8})
    plan = build_plan(c)
    source = RandomSource(expected_v4(c, plan, stacked=True), dtype)
    layers = [LayerV4.load(c, source, p, qat_sim=False) for p in plan]
    head = HyperHead.load(c, source, "hc_head")
    trunk = TrunkV4(c, plan, source.array("embed.weight"), head, source.float32("norm.weight"), source.linear("head.weight"), layers, dtype)
    ids = np.random.default_rng(0).integers(0, 500, ROWS).tolist()
    logits, whole = g.feed(trunk, ids, [ROWS])
    assert np.isfinite(logits).all() and logits.std() > 0.1
    out, target = g.feed(trunk, ids, [30, 1, 2, 5, 1, 1, 1, 3])
    assert g.same_bits(out, logits) and not g.differing(g.state_of(target.lane), g.state_of(whole.lane))
    assert target.lane.roll == 128 and len(whole.lane.state()["keys.0"]) == ROWS // 4 > c.index_topk

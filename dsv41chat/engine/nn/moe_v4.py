"""The expert half of a V4 layer: the token id or the scores choose the experts, the scores weigh them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config_v4 import V4Config
from dsv41chat.engine.nn.linear import ExpertLinear, Linear, QuantizedExpertLinear, QuantizedLinear
from dsv41chat.engine.ops import route
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class MoEV4:
    """w1 gate, w3 up, w2 down. table int32 [vocab, picks]: experts by token id; where it is None, scores plus bias choose.

    The routing weight multiplies the activation, before the down projection.
    """

    gate: Linear
    bias: mx.array | None
    table: mx.array | None
    w1: ExpertLinear | QuantizedExpertLinear
    w2: ExpertLinear | QuantizedExpertLinear
    w3: ExpertLinear | QuantizedExpertLinear
    shared1: Linear | QuantizedLinear
    shared2: Linear | QuantizedLinear
    shared3: Linear | QuantizedLinear
    picks: int
    factor: float
    limit: float
    scoring: str
    dtype: mx.Dtype

    @classmethod
    def load(cls, c: V4Config, source: WeightSource, prefix: str, experts: int, hashed: bool = False) -> MoEV4:
        """prefix: such as `layers.0.ffn` or `mtp.0.ffn`; draft blocks are never hashed. experts: of this block; a pruned build has fewer
        in its scored layers."""
        e = [source.experts(f"{prefix}.experts", w, experts) for w in ("w1", "w2", "w3")]
        s = [source.linear(f"{prefix}.shared_experts.{w}.weight") for w in ("w1", "w2", "w3")]
        gate = source.linear(f"{prefix}.gate.weight", rounds=False, dtype=mx.float32)
        bias = None if hashed else source.float32(f"{prefix}.gate.bias")
        table = source.ids(f"{prefix}.gate.tid2eid", below=experts) if hashed else None
        return cls(gate, bias, table, *e, *s, c.num_experts_per_tok, c.routed_scaling_factor, c.swiglu_limit, c.scoring_func, source.dtype)

    def choose(self, x: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """x [n, D], tokens int32 [n] -> (expert ids [n, picks] ascending, weights float32 [n, picks])."""
        score = route.router_scores(self.gate(x.astype(mx.float32)), self.scoring)
        if self.table is not None:
            return route.route_hashed(score, self.table, tokens, self.factor)
        return route.route(score, self.bias, self.picks, self.factor)

    def __call__(self, x: mx.array, tokens: mx.array) -> mx.array:
        """x [n, D] -> [n, D]. Expert outputs are summed in float32 by ascending expert id, the shared one last, cast once."""
        ids, weight = self.choose(x, tokens)
        return self.experts(x, ids, weight)

    def experts(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        """x [n, D], ids [n, picks] ascending, weight float32 [n, picks] -> [n, D]: routed and shared experts."""
        return self.combined(x, self.parts(x, ids, weight))

    def parts(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        """What each picked expert adds, its routing weight included: float32 [n, picks, D]."""
        v = x[:, None, None, :]
        act = route.swiglu(self.w1(v, ids), self.w3(v, ids), self.limit, weight[..., None, None], self.dtype)
        return self.w2(act, ids)[:, :, 0].astype(mx.float32)

    def combined(self, x: mx.array, parts: mx.array) -> mx.array:
        """x [n, D] and `parts` of its routed experts -> [n, D], with the shared one."""
        routed = mx.sum(parts, axis=1)
        shared = self.shared2(route.swiglu(self.shared1(x), self.shared3(x), self.limit, None, self.dtype))
        return (routed + shared.astype(mx.float32)).astype(self.dtype)

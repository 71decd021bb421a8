"""The expert half of a layer: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.config import V41Config
from dsv41chat.engine.nn.linear import ExpertLinear, Linear, QuantizedExpertLinear, QuantizedLinear
from dsv41chat.engine.ops.route import route, router_scores, swiglu
from dsv41chat.engine.pack.source import WeightSource


@dataclass
class MoE:
    """w1 gate, w3 up, w2 down. The routing weight multiplies the activation, before the down projection."""

    gate: Linear
    bias: mx.array
    bias_image: mx.array | None
    w1: ExpertLinear | QuantizedExpertLinear
    w2: ExpertLinear | QuantizedExpertLinear
    w3: ExpertLinear | QuantizedExpertLinear
    shared1: Linear | QuantizedLinear
    shared2: Linear | QuantizedLinear
    shared3: Linear | QuantizedLinear
    picks: int
    factor: float
    gate_temp: float
    limit: float
    scoring: str
    dtype: mx.Dtype

    @classmethod
    def load(cls, c: V41Config, source: WeightSource, prefix: str, experts: int, picks: int, image_bias: bool = True) -> MoE:
        """prefix: such as `layers.0.ffn`; experts and picks differ between trunk and draft stages. image_bias False: rows are text.

        Conversions for text leave the image bias out; then rows of an image span are routed as text.
        """
        e = [source.experts(f"{prefix}.experts", w, experts) for w in ("w1", "w2", "w3")]
        s = [source.linear(f"{prefix}.shared_experts.{w}.weight") for w in ("w1", "w2", "w3")]
        gate = source.linear(f"{prefix}.gate.weight", rounds=False, dtype=mx.float32)
        image_bias = image_bias and source.has(f"{prefix}.gate.bias_vl")
        bias, bias_image = source.float32(f"{prefix}.gate.bias"), source.float32(f"{prefix}.gate.bias_vl") if image_bias else None
        return cls(gate, bias, bias_image, *e, *s, picks, c.routed_scaling_factor, c.gate_temp, c.swiglu_limit, c.scoring_func, source.dtype)

    def choose(self, x: mx.array, image: mx.array | None) -> tuple[mx.array, mx.array]:
        """x [n, D] -> (expert ids [n, picks] ascending, weights float32 [n, picks]). image [n]: rows of an image span."""
        score = router_scores(self.gate(x.astype(mx.float32)) / self.gate_temp, self.scoring)
        bias = self.bias if image is None or self.bias_image is None else mx.where(image[:, None], self.bias_image, self.bias)
        return route(score, bias, self.picks, self.factor)

    def __call__(self, x: mx.array, image: mx.array | None) -> mx.array:
        """x [n, D] -> [n, D]. Expert outputs are summed in float32 by ascending expert id, the shared one last, cast once."""
        ids, weight = self.choose(x, image)
        return self.experts(x, ids, weight)

    def experts(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        """x [n, D], ids [n, picks] ascending, weight float32 [n, picks] -> [n, D]: routed and shared experts."""
        return self.combined(x, self.parts(x, ids, weight))

    def parts(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        """What each picked expert adds, its routing weight included: float32 [n, picks, D]."""
        v = x[:, None, None, :]
        act = swiglu(self.w1(v, ids), self.w3(v, ids), self.limit, weight[..., None, None], self.dtype)
        return self.w2(act, ids)[:, :, 0].astype(mx.float32)

    def combined(self, x: mx.array, parts: mx.array) -> mx.array:
        """x [n, D] and `parts` of its routed experts -> [n, D], with the shared one."""
        routed = mx.sum(parts, axis=1)
        shared = self.shared2(swiglu(self.shared1(x), self.shared3(x), self.limit, None, self.dtype))
        return (routed + shared.astype(mx.float32)).astype(self.dtype)

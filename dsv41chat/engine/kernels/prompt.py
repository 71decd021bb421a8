"""Experts of a prompt by stock operations, rows sorted by expert: each expert's words are read once for all of its rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.nn.linear import QuantizedExpertLinear
from dsv41chat.engine.ops.route import swiglu


class SortedExperts:
    """The `experts` of a MoE module for many rows: x [n, D], ids int32 and weight float32 [n, picks] -> [n, D].

    Sums are those of the module, in its order: by ascending expert, the shared one last.
    """

    def __init__(self, moe: Any, experts: tuple[Any, Any, Any]):
        """experts: w1, w3, w2 of the module, as they are stored. Raises Declined for other than packed ones."""
        if not all(isinstance(w, QuantizedExpertLinear) and not w.round_input for w in experts):
            raise Declined("only packed experts are worth sorting for")
        self.moe, self.experts = moe, experts

    def __call__(self, x: mx.array, ids: mx.array, weight: mx.array) -> mx.array:
        (n, picks), m = ids.shape, self.moe
        order = mx.argsort(ids.reshape(-1))
        expert, rows = ids.reshape(-1)[order], x[order // picks]
        gate, up = (self._product(w, rows, expert) for w in self.experts[:2])
        act = swiglu(gate, up, m.limit, weight.reshape(-1)[order][:, None], m.dtype)
        y = self._product(self.experts[2], act, expert)[mx.argsort(order)]
        routed = mx.sum(y.reshape(n, picks, -1).astype(mx.float32), axis=1)
        shared = m.shared2(swiglu(m.shared1(x), m.shared3(x), m.limit, None, m.dtype))
        return (routed + shared.astype(mx.float32)).astype(m.dtype)

    @staticmethod
    def _product(w: QuantizedExpertLinear, rows: mx.array, expert: mx.array) -> mx.array:
        p = w.packed
        options = dict(rhs_indices=expert, transpose=True, group_size=p.group, bits=p.bits, mode=p.mode, sorted_indices=True)
        return mx.gather_qmm(rows[:, None], p.weight, p.scales, p.biases, **options)[:, 0].astype(w.dtype)

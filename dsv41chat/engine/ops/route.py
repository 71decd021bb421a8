"""Routing a row to its experts, and the gated activation."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.ops.select import ascending, best_mask


def router_scores(logits: mx.array, func: str) -> mx.array:
    """Scores from router logits, float32. sqrtsoftplus uses the stable form of softplus."""
    if func == "sqrtsoftplus":
        return mx.sqrt(mx.maximum(logits, 0) + mx.log1p(mx.exp(-mx.abs(logits))))
    return mx.sigmoid(logits) if func == "sigmoid" else mx.softmax(logits, axis=-1, precise=True)


def route(score: mx.array, bias: mx.array, k: int, factor: float) -> tuple[mx.array, mx.array]:
    """score [n, E] and bias ([E] or [n, E]) -> (expert ids [n, k] ascending, weights float32 [n, k]).

    The bias moves the choice and never enters a weight. Ascending ids fix the order in which expert outputs are summed.
    """
    ids, _ = ascending(best_mask(score + bias, k), k)
    return ids, expert_weights(score, ids, factor)


def route_hashed(score: mx.array, table: mx.array, tokens: mx.array, factor: float) -> tuple[mx.array, mx.array]:
    """The table decides alone: score [n, E], table int32 [vocab, k], tokens [n] -> (expert ids [n, k] ascending, weights [n, k])."""
    ids = mx.sort(table[tokens], axis=-1)
    return ids, expert_weights(score, ids, factor)


def expert_weights(score: mx.array, ids: mx.array, factor: float) -> mx.array:
    """Scores of the chosen experts, normalised over them, times the model's factor: float32 [n, k]."""
    weight = mx.take_along_axis(score, ids, axis=-1)
    return weight / (mx.sum(weight, axis=-1, keepdims=True) + 1e-20) * factor


def swiglu(gate: mx.array, up: mx.array, limit: float, weight: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) [* weight] in float32, cast to dtype. limit <= 0: no clamps.

    The gate is clamped from above only.
    """
    gate, up = gate.astype(mx.float32), up.astype(mx.float32)
    if limit > 0:
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    y = gate * mx.sigmoid(gate) * up
    return (y if weight is None else y * weight).astype(dtype)

"""Router and experts: rows of one expert are multiplied together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsv41chat.engine.kernels.blas.dense import filled, host, joined, multiply, turned
from dsv41chat.engine.kernels.blas.streams import sigmoid
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import Site, bare
from dsv41chat.engine.nn.moe import MoE


def router(site: Site) -> Callable:
    """Scores that choose; hashed layers keep the stock operation."""
    moe = site.owner
    if getattr(moe, "table", None) is not None:
        raise Declined("the token id chooses the experts here")
    if moe.scoring != "sqrtsoftplus":
        raise Declined(f"scores by {moe.scoring}")
    gate, bias, k, factor = filled(bare(moe.gate), site.trunk), host(moe.bias), moe.picks, np.float32(moe.factor)
    bias_image = None if getattr(moe, "bias_image", None) is None else host(moe.bias_image)
    temperature = np.float32(moe.gate_temp) if isinstance(moe, MoE) else None

    def call(x, image):
        logits = multiply(host(x), gate)[:, : len(bias)]
        if temperature is not None:
            logits /= temperature
        score = np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))
        added = bias if bias_image is None or image is None else np.where(host(image)[:, None], bias_image, bias)
        # A stable sort of the negated values puts the smaller id first where scores are equal.
        ids = np.argsort(-(score + added), axis=1, kind="stable")[:, :k].astype(np.int32)
        ids.sort(axis=1)
        weight = np.take_along_axis(score, ids, axis=1)
        weight /= np.add.reduce(weight, axis=1, keepdims=True) + np.float32(1e-20)
        weight *= factor
        return ids, weight

    return call


def experts(site: Site) -> Callable:
    moe = site.owner
    up = joined(site.trunk, bare(moe.w1), bare(moe.w3))
    down = turned(bare(moe.w2), site.trunk)
    shared_up = joined(site.trunk, bare(moe.shared1), bare(moe.shared3))
    shared_down = turned(bare(moe.shared2), site.trunk)
    limit = np.float32(moe.limit)

    def activate(both: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        width = both.shape[1] // 2
        gate, value = both[:, :width], both[:, width:]
        if limit > 0:
            gate, value = np.minimum(gate, limit), np.clip(value, -limit, limit)
        act = sigmoid(gate)
        act *= gate
        act *= value
        if weight is not None:
            act *= weight
        return act

    def call(x, ids, weight):
        rows, chosen = host(x), host(ids)
        n, k = chosen.shape
        flat = chosen.reshape(-1)
        order = np.argsort(flat, kind="stable")
        starts = np.flatnonzero(np.diff(flat[order], prepend=-1))
        ends = np.append(starts[1:], n * k)
        source = rows[order // k]
        both = np.empty((n * k, up.shape[2]), np.float32)
        for a, b in zip(starts, ends):
            both[a:b] = multiply(source[a:b], up[flat[order[a]]])
        act = activate(both, host(weight).reshape(-1)[order, None])
        result = np.empty((n * k, rows.shape[1]), np.float32)
        for a, b in zip(starts, ends):
            result[order[a:b]] = multiply(act[a:b], down[flat[order[a]]])
        out = np.add.reduce(result.reshape(n, k, -1), axis=1)
        out += multiply(activate(multiply(rows, shared_up), None), shared_down)
        return out

    return call

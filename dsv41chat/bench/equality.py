"""Layer by layer against a peer on equal weights and equal inputs: both get the streams that this program's layer got.

Two programs in bfloat16 are no nearer to each other than bfloat16 is to the formula. Where a kind of layer is beyond the limit, the stock
operations in float32 say how far from it either of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.bench.arms import recorded_choices
from dsv41chat.bench.peer import Peer
from dsv41chat.engine.engine import Engine, open_engine
from dsv41chat.engine.nn.hyper_connection import settle
from dsv41chat.engine.target import Target

LIMIT = 2e-2


def compare(engine: Engine, peer: Peer, ids: Sequence[int]) -> dict[str, Any]:
    """Relative L2 distance of the rows that leave each kind of layer, and of the head's logits; of kinds beyond the limit also `to_float32`
    of this program and of the peer.

    A row whose experts differ at a near-tie is counted and left out of its layer's figure.
    """
    inputs, outputs, last, experts = _own_streams(engine, ids)
    layers, others, head = (_mlx_lm if peer.name == "mlx-lm" else _mlx_vlm)(peer, inputs, last, ids)
    kinds: dict[str, float] = {}
    flipped, beyond = 0, {}
    for index, (plan, mine, theirs, a, b) in enumerate(zip(engine.pack.plan, outputs, layers, experts, others)):
        kind = "window" if not plan.ratio else f"ratio {plan.ratio}"
        kind += (", owner" if plan.owns_pool and engine.family == "v41" else ", scoring" if plan.scores else "") + (", hashed" if plan.hashed else "")
        keep = np.all(a == b, axis=-1)
        flipped += int((~keep).sum())
        far = _distance(mine[keep], theirs[keep])
        if far >= kinds.get(kind, 0.0):
            kinds[kind] = far
            beyond |= {kind: index} if far > LIMIT else {}
    kinds["head"] = _distance(last[0], head)
    return {
        "rows": len(ids), "relative_l2": {k: float(f"{v:.3g}") for k, v in kinds.items()}, "rows_with_other_experts": flipped,
        "worst": float(f"{max(kinds.values()):.3g}"), "limit": LIMIT,
        "to_float32": _to_float32(engine, ids, inputs, beyond, (outputs, experts), (layers, others)) if beyond else None,
    }  # fmt: skip


def _to_float32(
    engine: Engine, ids: Sequence[int], inputs: list, beyond: dict[str, int], mine: tuple[list, list], theirs: tuple[list, list]
) -> dict[str, dict[str, float]]:
    """By kind, of the layer given: distances of both programs to the stock operations in float32 on the same inputs."""
    exact = open_engine(engine.pack.folder, routes="stock", dtype="float32", force=True)
    _, outputs, _, experts = _own_streams(exact, ids, inputs)
    found = {}
    for kind, i in beyond.items():
        keep = np.all((experts[i] == mine[1][i]) & (experts[i] == theirs[1][i]), axis=-1)
        found[kind] = {name: float(f"{_distance(rows[0][i][keep], outputs[i][keep]):.3g}") for name, rows in (("own", mine), ("peer", theirs))}
    return found


def _own_streams(engine: Engine, ids: Sequence[int], given: Sequence[tuple] = ()) -> tuple[list, list, tuple, list[np.ndarray]]:
    """([(h, pre) that enters each layer], [h that leaves it], (logits, streams, pre) at the end, expert ids per layer). given: what is to
    enter each layer instead."""
    trunk, inputs, outputs = engine.trunk, [], []
    step = trunk._layer

    def recorded(layer, lane, rows, streams):
        if given:
            h, pre = given[len(inputs)]
            streams = mx.array(h).astype(trunk.dtype), None if pre is None else mx.array(pre), None, None, None
        entering = settle(tuple(mx.array(a) if isinstance(a, np.ndarray) else a for a in streams))
        inputs.append((np.array(entering.astype(mx.float32)), None if streams[1] is None else np.array(streams[1])))
        found = step(layer, lane, rows, streams)
        leaving = settle(tuple(mx.array(a) if isinstance(a, np.ndarray) else a for a in found))
        outputs.append(np.array(leaving.astype(mx.float32)))
        return found

    trunk._layer = recorded
    try:
        with recorded_choices(engine) as choices:
            trial = Target(trunk).rows(list(ids))
    finally:
        del trunk._layer
    pre = None if trial.pre is None else np.array(trial.pre)
    experts = [np.concatenate(mine) for mine in choices]
    return inputs, outputs, (np.array(trial.logits), np.array(trial.streams.astype(mx.float32)), pre), experts


def _mlx_lm(peer: Peer, inputs: list, last: tuple, ids: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """What the peer's layers make of those inputs, the experts that they choose, and its head's logits of our last streams."""
    from mlx_lm.models import deepseek_v41 as module

    model, shared, out, chosen = peer.model.model, {}, [], []
    dtype = model.layers[0].input_layernorm.weight.dtype
    rows = inputs[0][0].shape[0]
    window = module._window_indices(previous=0, length=rows, window=model.args.sliding_window)
    window = mx.broadcast_to(window, (1, *window.shape))
    for layer, cache, (h, pre) in zip(model.layers, model.make_cache(), inputs):
        gate, seen = layer.mlp.gate, []
        layer.mlp.gate = lambda x, gate=gate, seen=seen: seen.append(gate(x)) or seen[-1]
        streams, _ = layer(mx.array(h)[None].astype(dtype), mx.array(pre)[None], start_pos=0, window_idx=window, cache=cache, shared=shared)
        layer.mlp.gate = gate
        out.append(np.array(streams[0].astype(mx.float32)))
        chosen.append(np.sort(np.array(seen[0][0]), axis=-1))
    _, streams, pre = last
    h, p = mx.array(streams)[None], mx.array(pre)[None]
    collapsed = mx.sum(p[..., None] * h.astype(mx.float32), axis=2).astype(h.dtype)
    return out, chosen, np.array(peer.model.lm_head(model.norm(collapsed))[0].astype(mx.float32))


def _mlx_vlm(peer: Peer, inputs: list, last: tuple, ids: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """As `_mlx_lm`. Layers get their caches, as in its own loop: without one a row sees the entries of groups after it, which the release
    never does, so logits of a call without a cache are another model's."""
    from mlx_vlm.models.base import create_attention_mask

    top, out, chosen = getattr(peer.model, "language_model", peer.model), [], []
    model = top.model
    dtype = model.layers[0].attn_norm.weight.dtype
    caches, tokens = top.make_cache(), mx.array(list(ids))[None]
    first = caches[0][0] if hasattr(caches[0], "caches") else caches[0]
    mask = create_attention_mask(mx.zeros((1, len(ids), 1)), first, window_size=model.args.sliding_window, return_array=True)
    for layer, cache, (h, _) in zip(model.layers, caches, inputs):
        gate, seen = layer.ffn.gate, []
        layer.ffn.gate = lambda *args, gate=gate, seen=seen: seen.append(gate(*args)) or seen[-1]
        streams = layer(mx.array(h)[None].astype(dtype), mask, cache, tokens, causal=True)
        layer.ffn.gate = gate
        out.append(np.array(streams[0].astype(mx.float32)))
        chosen.append(np.sort(np.array(seen[0][0][0]), axis=-1))
    h = mx.array(last[1])[None].astype(dtype)
    return out, chosen, np.array(top.lm_head(model.norm(model.hc_head(h)))[0].astype(mx.float32))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

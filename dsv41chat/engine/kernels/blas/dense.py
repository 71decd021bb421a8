"""Products of rows with weights that lie as [in, out]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import EXPERTS, PACKED, Site, sites, values
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear
from dsv41chat.engine.nn.linear import ExpertLinear, GroupedLinear, Linear, QuantizedGroupedLinear
from dsv41chat.engine.ops import exl3

LIMIT_BYTES = 4 << 30
# A sum over more inputs is made of runs of this many, so that no library splits it in another way for many rows than for few.
_RUN = 256
# Wide matrices are multiplied by few rows in strips of columns, which small-matrix kernels take without packing the weight.
_STRIP, _FEW_ROWS = 512, 16
_VECTOR = 32


def host(a: mx.array) -> np.ndarray:
    """The memory of an array, evaluated; not copied."""
    return np.asarray(a)


def turned(module: Any, trunk: Any) -> np.ndarray:
    """The weight of a matrix module as float32 [..., in, out].

    A dense module keeps that very memory and sees it the old way round. A packed one is decoded once where `copies` allows it.
    """
    if getattr(module, "round_input", False):
        raise Declined("inputs are rounded")
    kept = module.__dict__.get("turned")
    if kept is not None and kept[0] is getattr(module, "weight", None):
        return host(kept[1])
    if isinstance(module, (Linear, GroupedLinear, ExpertLinear)):
        if module.weight.dtype != mx.float32:
            raise Declined("its weights are not float32")
        memory = mx.contiguous(mx.swapaxes(module.weight, -1, -2))
        mx.eval(memory)
        module.weight = mx.swapaxes(memory, -1, -2)
        module.turned = module.weight, memory
    else:
        if not copies(trunk):
            raise Declined(f"packed weights of more than {LIMIT_BYTES >> 30} GiB of floats stay packed")
        memory = mx.contiguous(mx.swapaxes(_decoded(module), -1, -2))
        mx.eval(memory)
        module.turned = None, memory
    return host(module.turned[1])


def _decoded(module: Any) -> mx.array:
    """float32 [..., out, in] of a packed module."""
    if isinstance(module, PACKED):
        p = module.packed
        options = dict(group_size=p.group, bits=p.bits, mode=p.mode)
        floats = (lambda a: None if a is None else a.astype(mx.float32)) if p.mode == "affine" else (lambda a: a)
        return mx.dequantize(p.weight, floats(p.scales), floats(p.biases), dtype=mx.float32, **options)
    if isinstance(module, (Exl3GroupedLinear, Exl3ExpertLinear)):
        return mx.stack([_decoded(part) for part in (module.groups if isinstance(module, Exl3GroupedLinear) else module.matrices)])
    if module.bias is not None:
        raise Declined("it has a bias")
    return exl3.dense(module.words, module.codebook, module.suh, module.svh)


def copies(trunk: Any) -> int:
    """Bytes of the float32 copies that the route makes of a trunk's packed matrices; 0 where they would be too many, and none is made."""
    kept = trunk.__dict__.get("copied_bytes")
    if kept is None:
        found = {id(s.stock): s.stock for s in sites(trunk, trunk) if s.op == "matrix" and not hasattr(s.stock, "weight")}
        total = sum(4 * values(module) for module in found.values())
        kept = trunk.copied_bytes = total if total <= LIMIT_BYTES else 0
    return kept


def joined(*weights: np.ndarray) -> np.ndarray:
    """Matrices of the same input side by side."""
    return np.ascontiguousarray(np.concatenate(weights, axis=-1))


def filled(weight: np.ndarray) -> np.ndarray:
    """weight [in, out] with zeros up to whole vectors of outputs: a ragged edge is computed otherwise for many rows than for few."""
    ragged = -weight.shape[1] % _VECTOR
    return np.ascontiguousarray(np.pad(weight, ((0, 0), (0, ragged)))) if ragged else weight


def multiply(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [n, in] @ weight [in, out] -> a new [n, out]."""
    n = x.shape[0]
    rows = np.concatenate([x, x]) if n == 1 else x
    inputs, outputs = weight.shape
    out = np.empty((rows.shape[0], outputs), np.float32)
    if rows.shape[0] <= _FEW_ROWS and outputs > 2 * _STRIP:
        for a in range(0, outputs, _STRIP):
            _summed(rows, weight[:, a : a + _STRIP], out[:, a : a + _STRIP])
    else:
        _summed(rows, weight, out)
    return out[:n]


def _summed(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    np.matmul(x[:, :_RUN], weight[:_RUN], out=out)
    for a in range(_RUN, weight.shape[0], _RUN):
        out += np.matmul(x[:, a : a + _RUN], weight[a : a + _RUN])


def multiply_groups(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [n, G * in], weight [G, in, out] -> [n, G * out], block-diagonal."""
    n, groups = x.shape[0], weight.shape[0]
    rows = np.concatenate([x, x]) if n == 1 else x
    by_group = np.ascontiguousarray(rows.reshape(rows.shape[0], groups, -1).transpose(1, 0, 2))
    y = np.empty((groups, rows.shape[0], weight.shape[2]), np.float32)
    for g in range(groups):
        _summed(by_group[g], weight[g], y[g])
    return y.transpose(1, 0, 2)[:n].reshape(n, -1)


def matrix(site: Site) -> Callable:
    """A dense matrix on its own. Stacked experts are taken whole, with their activation."""
    module = site.stock
    if isinstance(module, EXPERTS):
        raise Declined("")
    if isinstance(module, (GroupedLinear, QuantizedGroupedLinear, Exl3GroupedLinear)):
        weight = turned(module, site.trunk)
        return lambda x: multiply_groups(host(x), weight)
    weight = turned(module, site.trunk)
    width, weight = weight.shape[1], filled(weight)
    return lambda x: multiply(host(x), weight)[:, :width]

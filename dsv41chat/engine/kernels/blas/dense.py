"""Products of rows with weights that lie as [in, out]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.sites import EXPERTS, PACKED, Site, outputs, sites, values, width
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear
from dsv41chat.engine.nn.linear import GroupedLinear, Linear, QuantizedGroupedLinear, QuantizedLinear
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


@dataclass(frozen=True)
class Held:
    """Where the values of a module lie: float32 [..., in, columns], of which it has `width` from `first`; more: zeros follow.

    weight: what the module then had as its own, a view of that memory; None for a packed module, whose words stay beside it.
    """

    weight: mx.array | None
    memory: mx.array
    first: int
    width: int
    more: bool

    @property
    def values(self) -> np.ndarray:
        return host(self.memory)[..., self.first : self.first + self.width]


def turned(module: Any, trunk: Any, name: str = "weight") -> np.ndarray:
    """The weight of a matrix module as float32 [..., in, out].

    A dense module keeps that very memory and sees it the old way round. A packed one is decoded once where `decodes` allows it.
    name: of the attribute, for matrices that are no modules of their own.
    """
    return (_held(module, name) or _hold([module], trunk, name)).values


def joined(trunk: Any, *modules: Any) -> np.ndarray:
    """Matrices of the same input side by side, [..., in, sum of outs]; they share that memory."""
    held = [_held(module) for module in modules]
    if any(h is None or h.memory is not held[0].memory for h in held) or [h.first for h in held] != _firsts(held):
        _hold(list(modules), trunk)
        held = [_held(module) for module in modules]
    return host(held[0].memory)[..., held[0].first : held[-1].first + held[-1].width]


def _firsts(held: list[Held]) -> list[int]:
    return [held[0].first + sum(h.width for h in held[:k]) for k in range(len(held))]


def filled(module: Any, trunk: Any, name: str = "weight") -> np.ndarray:
    """`turned` with zeros up to whole vectors of outputs: a ragged edge is computed otherwise for many rows than for few."""
    weight = turned(module, trunk, name)
    ragged = -weight.shape[1] % _VECTOR
    if not ragged:
        return weight
    held = _held(module, name)
    return host(held.memory) if held.more else np.ascontiguousarray(np.pad(weight, ((0, 0), (0, ragged))))


def _held(module: Any, name: str = "weight") -> Held | None:
    """None as well where the weight was replaced since."""
    kept = module.__dict__.get("held")
    return kept if kept is not None and kept.weight is getattr(module, name, None) else None


def _hold(modules: list[Any], trunk: Any, name: str = "weight") -> Held:
    """Put the values of modules side by side into one memory; a single matrix is filled up. Returns the last one's place."""
    sources = [_source(module, trunk, name) for module in modules]
    parts = [mx.swapaxes(a, -1, -2) for a in sources]
    more = -parts[0].shape[-1] % _VECTOR if len(parts) == 1 and parts[0].ndim == 2 else 0
    padding = [mx.zeros((parts[0].shape[0], more))] if more else []
    memory = mx.contiguous(mx.concatenate(parts + padding, axis=-1) if len(parts) > 1 or more else parts[0])
    mx.eval(memory)
    first = 0
    for module, part in zip(modules, parts):
        width, view = part.shape[-1], None
        if hasattr(module, name):
            view = mx.swapaxes(memory[..., first : first + width], -1, -2)
            mx.eval(view)
            setattr(module, name, view)
        module.held = Held(view, memory, first, width, bool(more))
        first += width
    return module.held


def _source(module: Any, trunk: Any, name: str) -> mx.array:
    """float32 [..., out, in]."""
    if getattr(module, "round_input", False):
        raise Declined("inputs are rounded")
    weight = getattr(module, name, None)
    if weight is not None:
        if weight.dtype != mx.float32:
            raise Declined("its weights are not float32")
        return weight
    kept = _held(module)
    if kept is not None:
        return mx.swapaxes(kept.memory[..., kept.first : kept.first + kept.width], -1, -2)
    if not decodes(trunk):
        raise Declined(f"packed weights of more than {LIMIT_BYTES >> 30} GiB of floats stay packed")
    return _decoded(module)


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


def decodes(trunk: Any) -> bool:
    """Whether packed matrices are decoded: not where a trunk's floats would be too many."""
    kept = trunk.__dict__.get("decodes")
    if kept is None:
        kept = trunk.decodes = sum(4 * values(m) for m in _matrices([trunk], trunk) if not hasattr(m, "weight")) <= LIMIT_BYTES
    return kept


def copies(modules: list[Any], trunk: Any) -> int:
    """Bytes that the route keeps beside the weights of some modules: packed matrices as float32, and the zeros that fill matrices up."""
    total = 0
    for m in _matrices(modules, trunk):
        packed, single = not hasattr(m, "weight"), isinstance(m, (Linear, QuantizedLinear, Exl3Linear))
        if packed and not decodes(trunk):
            continue
        total += 4 * values(m) if packed else 0
        total += 4 * width(m) * (-outputs(m) % _VECTOR) if single else 0
    found = {id(s.stock): s.stock for s in sites(modules, trunk) if s.op in ("mix", "head_mix")}
    return total + sum(4 * m.fn.shape[1] * (-m.fn.shape[0] % _VECTOR) for m in found.values())


def _matrices(modules: list[Any], trunk: Any) -> list[Any]:
    """Each once; a drafter shares some with its trunk."""
    return list({id(s.stock): s.stock for s in sites(modules, trunk) if s.op == "matrix"}.values())


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
    weight, columns = filled(module, site.trunk), outputs(module)
    return lambda x: multiply(host(x), weight)[:, :columns]

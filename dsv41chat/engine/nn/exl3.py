"""Trellis-coded matrices as callables. A matrix stays coded in memory and is decoded whole, one at a time, when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.ops import exl3
from dsv41chat.engine.ops.fakequant import fp8_ue8m0


@dataclass
class Exl3Linear:
    """words uint32 [in / 16, out / 16, 8 * K]; suh float16 [in], svh float16 [out]; bias [out] or None. x [n, in] -> [n, out]."""

    words: mx.array
    suh: mx.array
    svh: mx.array
    bias: mx.array | None
    codebook: str
    round_input: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        y = exl3.multiply(fp8_ue8m0(x) if self.round_input else x, self.words, self.codebook, self.suh, self.svh)
        return (y if self.bias is None else y + self.bias.astype(mx.float32)).astype(x.dtype)


@dataclass(eq=False)
class Exl3Stack(Sequence):
    """E matrices of one shape, width and codebook side by side, so that a kernel finds each by its number. Item e is matrix e, made of views.

    words uint32 [E, in / 16, out / 16, 8 * K]; suh float16 [E, in], svh float16 [E, out]; bias float16 [E, out] or None.
    """

    words: mx.array
    suh: mx.array
    svh: mx.array
    bias: mx.array | None
    codebook: str
    round_input: bool = False

    def __len__(self) -> int:
        return self.words.shape[0]

    def __getitem__(self, index: int) -> Exl3Linear:
        e = range(len(self))[index]
        # A part by a number would be gathered, which copies.
        view = lambda a: None if a is None else mx.squeeze(a[e : e + 1], 0)
        return Exl3Linear(*map(view, (self.words, self.suh, self.svh, self.bias)), self.codebook, self.round_input)


@dataclass
class Exl3GroupedLinear:
    """Block-diagonal product of one matrix per group: x [n, G * in] -> [n, G * rank]."""

    groups: Sequence[Exl3Linear]

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.split(x, len(self.groups), axis=-1)
        return mx.concatenate([matrix(part) for matrix, part in zip(self.groups, parts)], axis=-1)


@dataclass
class Exl3ExpertLinear:
    """One matrix per expert; K and codebook may differ between them. x [n, picks or 1, 1, in], ids [n, picks] -> [n, picks, 1, out].

    Rows are grouped by expert, so a matrix is decoded once per call. For that the picks are evaluated here.
    """

    matrices: Sequence[Exl3Linear]
    dtype: mx.Dtype

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        n, picks = ids.shape
        flat = mx.broadcast_to(x, (n, picks, 1, x.shape[-1])).reshape(n * picks, -1)
        chosen = np.array(ids).reshape(-1)
        order = np.argsort(chosen, kind="stable")
        experts, counts = np.unique(chosen, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(counts)])
        parts = [self.matrices[e](flat[mx.array(order[a : a + c])]) for e, a, c in zip(experts, starts, counts)]
        back = mx.array(np.argsort(order, kind="stable"))
        return mx.concatenate(parts)[back].reshape(n, picks, 1, -1).astype(self.dtype)

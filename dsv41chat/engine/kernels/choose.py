"""Choices on a device: index scores, the k best of a row, and the router."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.kernels.dialect import float_bits
from dsv41chat.engine.kernels.launch import MOST_ROWS, Backend, Constants, number
from dsv41chat.engine.kernels.matrix import narrowed
from dsv41chat.engine.kernels.routes import Declined
from dsv41chat.engine.kernels.tensor import product
from dsv41chat.engine.kernels.text_select import INDEX_SCORES, ROUTE, TOP_K
from dsv41chat.engine.kernels.tiles import RowsProduct

_KEYS, _SIMDS = 4, 4
_SCORINGS = {"sqrtsoftplus": 0, "sigmoid": 1}


class Scores:
    """(q [n, H, C], weight float32 [n, H], keys [T, C], length int32 [n, 1]) -> float32 [n, T], -inf from length on; q, keys bfloat16.

    dims int32 [1 or more]: its first number says how many of the T keys are in use; it is the stride of the result's rows.
    """

    def __init__(self, backend: Backend, heads: int, channels: int):
        """Raises Declined for channels that the kernel cannot load in runs."""
        if channels % 8 or channels > 128:
            raise Declined(f"{channels} index channels are not a multiple of 8 up to 128")
        self.backend, self.constants = backend, {"IH": heads, "IC": channels, "KPS": _KEYS, "NSG": _SIMDS}

    def __call__(self, q: mx.array, weight: mx.array, keys: mx.array, length: mx.array, dims: mx.array | None = None) -> mx.array:
        n, total = q.shape[0], keys.shape[0]
        inputs = [q, weight, keys, length, number(total) if dims is None else dims]
        grid = -(-total // (_KEYS * _SIMDS)), n, 1
        return self.backend.run(INDEX_SCORES, inputs, self.constants, grid, 32 * _SIMDS, [((n, total), mx.float32)])[0]


class TopK:
    """score float32 [n, T] -> (index int32 [n, slots] ascending, present [n, slots]) of the k best; absent slots last, index 0.

    dims: as in `Scores`.
    """

    def __init__(self, backend: Backend, k: int, slots: int):
        # The set is exact whatever the number of threads; Metal may grant a large kernel fewer than CUDA.
        self.backend, self.k, self.slots, self.threads = backend, k, slots, 1024 if backend.dialect == "cuda" else 512

    def __call__(self, score: mx.array, dims: mx.array | None = None) -> tuple[mx.array, mx.array]:
        n, total = score.shape
        constants = {"K": self.k, "SLOTS": self.slots, "NTH": self.threads}
        outputs = [((n, self.slots), mx.int32), ((n, self.slots), mx.bool_)]
        inputs = [score, number(total) if dims is None else dims]
        index, present = self.backend.run(TOP_K, inputs, constants, (n, 1, 1), self.threads, outputs)
        return index, present


class Router:
    """x [n, D] bfloat16 -> (expert ids int32 [n, picks] ascending, weight float32 [n, picks]), for at most 8 rows; for more where `many` is
    there, which computes their logits.

    Logits in float32. image [n]: rows that use `bias_image`; where a table gives the ids, int32 token ids.
    """

    def __init__(
        self, backend: Backend, gate: Any, picks: int, scoring: str, factor: float, temperature: float, bias: mx.array | None,
        bias_image: mx.array | None = None, table: mx.array | None = None,
    ):  # fmt: skip
        """bias float32 [E]. table int32 [vocab, picks]: the ids come from there. Raises Declined."""
        if scoring not in _SCORINGS:
            raise Declined(f"the kernels do not have the scores {scoring}")
        self.backend, self.picks = backend, picks
        self.logits, self.many = product(backend, narrowed(gate), mx.float32), None
        if backend.dialect == "cuda":
            try:
                self.many = RowsProduct(backend, narrowed(gate))
            except Declined:
                pass  # the gate stays in float32, or is of an odd width
        self.experts = self.logits.outputs
        self.bias = self.logits.matrix.arrays[0] if bias is None else bias
        self.table = None if table is None else mx.array(np.sort(np.array(table), axis=-1))
        self.bias_image = bias_image
        constants = {"E": self.experts, "PK": picks, "SCORING": _SCORINGS[scoring], "HASHED": int(table is not None)}
        self.constants = Constants({**constants, "FACTOR": float_bits(factor), "TEMP": float_bits(temperature)})

    def __call__(self, x: mx.array, image: mx.array | None = None) -> tuple[mx.array, mx.array]:
        n, hashed, images = x.shape[0], self.table is not None, image is not None and self.bias_image is not None
        logits = (self.logits if n <= MOST_ROWS else self.many)(x)
        bias = logits if hashed else self.bias
        told = image if images or hashed else logits
        inputs = [logits, bias, self.bias_image if images else bias, told, self.table if hashed else logits]
        outputs = [((n, self.picks), mx.int32), ((n, self.picks), mx.float32)]
        ids, weight = self.backend.run(ROUTE, inputs, self.constants.plus(IMAGES=int(images)), (n, 1, 1), 32, outputs)
        return ids, weight





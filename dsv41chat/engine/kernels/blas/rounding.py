"""The roundings of `ops.fakequant` that run in every layer, in numpy and with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_F = np.float32


def _pow2_ceil(v: np.ndarray) -> np.ndarray:
    """The power of two at or above each positive v, from its bits; v is overwritten."""
    bits = v.view(np.uint32)
    bits += np.uint32(0x7FFFFF)
    bits &= np.uint32(0xFF800000)
    return v


def _e4m3(v: np.ndarray) -> np.ndarray:
    """Each |v| <= 448 to the nearest e4m3 value, ties to even; v is overwritten. Below 2^-6 the spacing is 2^-9."""
    small = np.abs(v) < _F(2.0**-6)
    tiny = (v + _F(24576)) - _F(24576)
    bits = v.view(np.uint32)
    bits += ((bits >> np.uint32(20)) & np.uint32(1)) + np.uint32(0x7FFFF)
    bits &= np.uint32(0xFFF00000)
    np.copyto(v, tiny, where=small)
    return v


def _e2m1(v: np.ndarray) -> np.ndarray:
    """Each |v| <= 6 to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to the even code."""
    code = np.searchsorted(_MIDDLES, np.abs(v), side="left")
    return np.copysign(_E2M1[code], np.where(v < 0, _F(-1), _F(1)))


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Upper borders of the codes: a tie falls down where the code below is even; elsewhere the border is the next smaller float.
_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_MIDDLES[1::2] = np.nextafter(_MIDDLES[1::2], _F(0))


def _rounded(x: np.ndarray, size: int, floor: float, scale_of: Callable, limit: float, code: Callable) -> np.ndarray:
    width = x.shape[-1]
    if width % size:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], -width % size), np.float32)], axis=-1)
    y = x.reshape(*x.shape[:-1], -1, size)
    scale = scale_of(np.maximum(np.maximum.reduce(np.abs(y), axis=-1, keepdims=True), _F(floor)))
    y = y / scale
    np.clip(y, _F(-limit), _F(limit), out=y)
    y = code(y)
    y *= scale
    return y.reshape(*x.shape[:-1], -1)[..., :width]


def fp8_ue8m0(x: np.ndarray) -> np.ndarray:
    return _rounded(x, 32, 1e-4, lambda a: _pow2_ceil(a * _F(1 / 448)), 448, _e4m3)


def fp4_ue8m0(x: np.ndarray) -> np.ndarray:
    return _rounded(x, 32, 6 * 2.0**-126, lambda a: _pow2_ceil(a * _F(1 / 6)), 6, _e2m1)


def fp4_e4m3(x: np.ndarray) -> np.ndarray:
    return _rounded(x, 16, 6 * 2.0**-9, lambda a: _e4m3(np.minimum(a / _F(6), _F(448))), 6, _e2m1)


def v4_fp8(x: np.ndarray, rope_dims: int) -> np.ndarray:
    plain = x[..., : x.shape[-1] - rope_dims]
    rounded = _rounded(plain, 64, 1e-4, lambda a: _pow2_ceil(a / _F(448)), 448, _e4m3)
    return np.concatenate([rounded, x[..., x.shape[-1] - rope_dims :]], axis=-1)

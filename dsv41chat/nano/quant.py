"""Release number formats in numpy: values -> bytes, with the rounding the trainer uses (power-of-two scales, half to even)."""

from __future__ import annotations

import numpy as np

_MAGNITUDES = np.array([np.ldexp(1 + (b & 7) / 8, (b >> 3) - 7) if b >> 3 else np.ldexp(b & 7, -9) for b in range(127)], np.float32)
_FP4_EDGES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_FP4_UP = np.array([False, True, False, True, False, True, False])  # exact midpoints go to the even code


def _pow2ceil_exponent(value: np.ndarray) -> np.ndarray:
    """Biased exponent byte of the smallest power of two >= value (value > 0, float32)."""
    bits = value.astype(np.float32).view(np.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)


def _scale(byte: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), byte.astype(np.int32) - 127).astype(np.float32)


def e4m3(value: np.ndarray) -> np.ndarray:
    """float32 in [-448, 448] -> e4m3fn bytes, round to nearest even."""
    a = np.abs(value).astype(np.float32)
    high = np.clip(np.searchsorted(_MAGNITUDES, a), 1, 126)
    low = high - 1
    down, up = a - _MAGNITUDES[low], _MAGNITUDES[high] - a
    code = np.where((up < down) | ((up == down) & (high % 2 == 0)), high, low).astype(np.uint8)
    return code | (np.signbit(value).astype(np.uint8) << 7)


def e2m1(value: np.ndarray) -> np.ndarray:
    """float32 in [-6, 6] -> 4-bit codes (sign in bit 3)."""
    a = np.abs(value)[..., None]
    code = ((a > _FP4_EDGES) | ((a == _FP4_EDGES) & _FP4_UP)).sum(-1).astype(np.uint8)
    return code | (np.signbit(value).astype(np.uint8) << 3) * (code > 0)


def bf16(value: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16), round to nearest even."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def fp8_tiles(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrix [o, i] (multiples of 32) -> e4m3 bytes [o, i] and e8m0 scales [o/32, i/32]."""
    o, i = weight.shape
    tiles = weight.astype(np.float32).reshape(o // 32, 32, i // 32, 32).transpose(0, 2, 1, 3)
    top = np.maximum(np.abs(tiles).max((2, 3)), np.float32(1e-4)) * np.float32(1 / 448)
    scale = _pow2ceil_exponent(top)
    codes = e4m3(np.clip(tiles / _scale(scale)[..., None, None], -448, 448))
    return codes.transpose(0, 2, 1, 3).reshape(o, i), scale


def fp8_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Engram table [rows, width] -> e4m3 bytes and one e8m0 scale per 32 channels of a row."""
    rows, width = table.shape
    groups = table.astype(np.float32).reshape(rows, width // 32, 32)
    scale = _pow2ceil_exponent(np.maximum(np.abs(groups).max(-1), np.float32(1e-4)) * np.float32(1 / 448))
    return e4m3(np.clip(groups / _scale(scale)[..., None], -448, 448)).reshape(rows, width), scale


def fp4_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expert matrix [o, i] -> packed pairs [o, i/2] (low nibble = even input) and e8m0 scales [o, i/32]."""
    o, i = weight.shape
    groups = weight.astype(np.float32).reshape(o, i // 32, 32)
    scale = _pow2ceil_exponent(np.maximum(np.abs(groups).max(-1), np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
    codes = e2m1(np.clip(groups / _scale(scale)[..., None], -6, 6)).reshape(o, i)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def decode(dtype: str, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Bytes of a quantised matrix or table and its e8m0 scales -> float32 (fp8 tiles, fp8 rows of 32-channel groups, packed fp4)."""
    if dtype == "I8":
        data = data.view(np.uint8)
        values = np.stack([_FP4[data & 15], _FP4[data >> 4]], -1).reshape(data.shape[0], -1)
        return values * np.repeat(_scale(scale), 32, 1)
    values = _MAGNITUDES[np.minimum(data & 127, 126)] * np.where(data & 128, np.float32(-1), np.float32(1))
    if scale.shape[0] == data.shape[0]:
        return values * np.repeat(_scale(scale), 32, 1)
    return values * np.repeat(np.repeat(_scale(scale), 32, 0), 32, 1)

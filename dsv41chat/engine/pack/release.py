"""The release's byte formats: e4m3 and e2m1 values under power-of-two scales. Numbers out of bytes, and bytes into MLX layouts.

e4m3: sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinities. ue8m0 byte b is 2**(b - 127), 255 is NaN and refused.
FP4: low nibble = even input index. Every product is exact in bfloat16.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackDamaged
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.names import scale_block

_POSITIVE_E4M3 = np.array([np.ldexp(1 + (b & 7) / 8, (b >> 3) - 7) if b >> 3 else np.ldexp(b & 7, -9) for b in range(127)] + [np.nan])
E4M3 = np.concatenate([_POSITIVE_E4M3, -_POSITIVE_E4M3]).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_MX_DTYPES = {"F32": np.float32, "F16": np.float16}


def ue8m0(b: np.ndarray) -> np.ndarray:
    """Scale bytes -> float32 powers of two (255 -> NaN)."""
    value = np.ldexp(np.float32(1), b.astype(np.int32) - 127).astype(np.float32)
    return np.where(b == 255, np.float32(np.nan), value)


def scale_bytes(scale: TensorRef) -> np.ndarray:
    """uint8 [rows, columns] of a scale tensor. Raises PackDamaged when it holds a NaN."""
    raw = np.array(scale.bytes())
    if (raw == 255).any():
        where = f"file {scale.file.name}, offset {scale.offset:,}"
        raise PackDamaged(f"{scale.name} holds the byte 255, which is NaN ({where})", "download the file again")
    return raw


def decode(ref: TensorRef, scale: TensorRef | None) -> np.ndarray:
    """float32 values of a tensor in any release format, shape as the config knows it."""
    raw = ref.bytes()
    if ref.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(ref.shape)
    if ref.dtype in _MX_DTYPES:
        return np.frombuffer(raw, _MX_DTYPES[ref.dtype]).astype(np.float32).reshape(ref.shape)
    s = ue8m0(scale_bytes(scale))
    if ref.dtype == "I8":
        return np.stack([E2M1[raw & 15], E2M1[raw >> 4]], -1).reshape(ref.shape[0], -1) * np.repeat(s, 32, 1)
    block = scale_block(ref, scale)
    return E4M3[raw] * np.repeat(np.repeat(s, block, 0)[: ref.shape[0]], block, 1)[:, : ref.shape[1]]


def repack(ref: TensorRef, scale: TensorRef) -> tuple[mx.array, mx.array, str]:
    """(weight uint32, scales uint8, mode) of an fp8 or fp4 matrix in MLX's mxfp8 / mxfp4 layout; lossless, the bytes are the same.

    fp8 block scales are repeated to one per row and 32 inputs. The input width must be a multiple of 32.
    """
    weight = mx.array(np.array(ref.bytes())).view(mx.uint32)
    s = scale_bytes(scale)
    if ref.dtype == "I8":
        return weight, mx.array(s), "mxfp4"
    block = scale_block(ref, scale)
    rows = np.repeat(s, block, 0)[: ref.shape[0]]
    return weight, mx.array(np.repeat(rows, block // 32, 1)[:, : ref.shape[1] // 32]), "mxfp8"

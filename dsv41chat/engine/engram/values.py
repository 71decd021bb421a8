"""Packed rows into values, on the model's thread. The only module of this package that imports mlx."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from dsv41chat.engine.engram.fetch import PackedRows, Ticket
from dsv41chat.engine.errors import EngramReadError


def take_values(ticket: Ticket, slot: int) -> mx.array:
    """Wait for a slot's rows, decode them and give the staging buffer back. bfloat16 [n, columns * dim] for ids [n, columns]."""
    values = decode_rows(ticket.rows(slot))
    ticket.release(slot)
    return values


def take_host_values(ticket: Ticket, slot: int) -> np.ndarray:
    """The same values as float32 in numpy, for a trunk that computes there."""
    rows = ticket.rows(slot)
    if rows.format.kind == "fp8" and rows.weight.size:
        _refuse_nan_fp8(rows)
        values = _fp8_floats()[rows.weight.reshape(*rows.scale.shape, rows.format.group) | (rows.scale.astype(np.uint32) << 8)[..., None]]
        values = values.reshape(-1, rows.format.dim)
        values = values if rows.inverse is None else values[rows.inverse]
        values = values.reshape(*rows.shape[:-1], rows.shape[-1] * rows.format.dim)
    else:
        values = np.array(decode_rows(rows).astype(mx.float32))
    ticket.release(slot)
    return values


def decode_rows(rows: PackedRows) -> mx.array:
    """Values of packed rows: bfloat16 [..., columns * dim] for ids of shape [..., columns].

    Equal bit for bit to decoding the whole table and picking rows. The bytes are copied out of the staging buffer before
    this returns. Raises EngramReadError when a row holds a NaN (a damaged table).
    """
    values = _decode_fp8(rows) if rows.format.kind == "fp8" else _decode_affine(rows)
    if rows.inverse is not None:
        values = mx.take(values, mx.array(rows.inverse.astype(np.uint32)), axis=0)
    return values.reshape(*rows.shape[:-1], rows.shape[-1] * rows.format.dim)


def _decode_fp8(rows: PackedRows) -> mx.array:
    if not rows.weight.size:
        return mx.zeros((0, rows.format.dim), mx.bfloat16)
    _refuse_nan_fp8(rows)
    # A table of all code and scale pairs instead of arithmetic: subnormal products survive on devices that flush them.
    scale = mx.array(rows.scale).astype(mx.uint32) << 8
    code = mx.array(rows.weight).astype(mx.uint32).reshape(*rows.scale.shape, rows.format.group)
    return mx.take(_fp8_values(), code | scale[..., None]).reshape(-1, rows.format.dim)


def _refuse_nan_fp8(rows: PackedRows) -> None:
    if (rows.weight & 0x7F).max() == 0x7F or rows.scale.max() == 0xFF:
        raise _nan_error(rows, ((rows.weight & 0x7F) == 0x7F).any(1) | (rows.scale == 0xFF).any(1))


def _decode_affine(rows: PackedRows) -> mx.array:
    dtype = mx.bfloat16 if rows.format.scale_dtype == "BF16" else mx.float16
    if not rows.weight.size:
        return mx.zeros((0, rows.format.dim), mx.bfloat16)
    exponent = np.uint16(0x7F80 if dtype == mx.bfloat16 else 0x7C00)
    parts = [np.ascontiguousarray(part).view(np.uint16) for part in (rows.scale, rows.bias)]
    bad = np.zeros(len(rows.weight), bool)
    for part in parts:
        bad |= ((part & exponent) == exponent).any(1)
    if bad.any():
        raise _nan_error(rows, bad)
    words = mx.array(np.ascontiguousarray(rows.weight).view(np.uint32))
    scale, bias = (mx.array(part).view(dtype) for part in parts)
    return mx.dequantize(words, scale, bias, group_size=rows.format.group, bits=rows.format.bits).astype(mx.bfloat16)


def _nan_error(rows: PackedRows, bad: np.ndarray) -> EngramReadError:
    region = rows.table.regions[0]
    error = EngramReadError(
        f"{rows.table.name}: {int(bad.sum())} of {len(bad)} rows read from {region.file.path} (region at offset {region.offset:,}) are not numbers.",
        hint="The table is damaged: run `models verify` and download the shard again.",
    )
    error.file, error.offset = region.file.path, region.offset
    return error


@functools.cache
def _fp8_values() -> mx.array:
    """bfloat16 [65536]: the value of (scale byte << 8 | e4m3 byte), e4m3 * 2^(scale - 127) rounded to nearest even."""
    return mx.array(fp8_value_bits()).view(mx.bfloat16)


@functools.cache
def _fp8_floats() -> np.ndarray:
    """float32 [65536]: the same values."""
    return (fp8_value_bits().astype(np.uint32) << 16).view(np.float32)


def fp8_value_bits() -> np.ndarray:
    """The bfloat16 bit patterns behind `_fp8_values`, uint16 [65536]; NaN codes and scale 255 stay NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(code & 0x80, -magnitude, magnitude)
    value[(code & 0x7F) == 0x7F] = np.nan
    scale = 2.0 ** (np.arange(256) - 127.0)
    scale[255] = np.nan
    with np.errstate(over="ignore"):  # 448 * 2^127 is infinite in float32, as it is on every device
        product = (scale[:, None] * value[None, :]).astype(np.float32).reshape(-1)  # else exact: 4 significant bits, above 2^-149
    bits = product.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(product), 0x7FC0, rounded).astype(np.uint16)

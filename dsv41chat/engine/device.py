"""Which device computes."""

from __future__ import annotations

import mlx.core as mx


def device_kind() -> str:
    """metal, cuda or cpu: what MLX computes on by default."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"

"""The route of Apple's GPUs."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.gpu import gpu_route
from dsv41chat.engine.kernels.launch import MetalBackend
from dsv41chat.engine.kernels.routes import Route


def missing() -> str | None:
    return None if mx.metal.is_available() else "MLX has no Metal back end here"


def metal_route() -> Route:
    return gpu_route("metal", MetalBackend(), missing)

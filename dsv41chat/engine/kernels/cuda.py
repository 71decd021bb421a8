"""The route of NVIDIA's GPUs."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.gpu import gpu_route
from dsv41chat.engine.kernels.launch import MlxBackend
from dsv41chat.engine.kernels.routes import Route


def missing() -> str | None:
    return None if mx.cuda.is_available() else "MLX has no CUDA back end here"


def cuda_route() -> Route:
    return gpu_route("cuda", MlxBackend("cuda"), missing)

"""The route of NVIDIA's GPUs."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.kernels.gpu import gpu_route
from dsv41chat.engine.kernels.nvrtc import NvrtcBackend, library
from dsv41chat.engine.kernels.routes import Route


def missing() -> str | None:
    if not mx.cuda.is_available():
        return "MLX has no CUDA back end here"
    return None if library() is not None else "NVIDIA's run-time compiler (libnvrtc) was not found"


def cuda_route() -> Route:
    return gpu_route("cuda", BACKEND, missing)


BACKEND = NvrtcBackend()

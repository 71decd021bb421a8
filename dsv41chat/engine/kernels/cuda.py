"""The route of NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from dsv41chat.engine.kernels.gpu import builders, gpu_route
from dsv41chat.engine.kernels.nvrtc import NvrtcBackend, library
from dsv41chat.engine.kernels.player import CudaPlayer
from dsv41chat.engine.kernels.recorder import Recorder
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.kernels.routes import Route


def missing() -> str | None:
    if not mx.cuda.is_available():
        return "MLX has no CUDA back end here"
    return None if library() is not None else "NVIDIA's run-time compiler (libnvrtc) was not found"


def cuda_route() -> Route:
    return gpu_route("cuda", BACKEND, missing, replays=replays)


def replays(trunk: Any, refused: Mapping[tuple[str, str], str]) -> Replay:
    """Raises Declined."""
    recorder = Recorder("cuda")
    return Replay(trunk, recorder, CudaPlayer(BACKEND), builders(recorder), refused)


BACKEND = NvrtcBackend()

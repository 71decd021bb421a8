"""Other programs on the same files: mlx-lm's `deepseek_v41`, mlx-vlm's `deepseek_v4`. They run as they ship: own cache, own loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from dsv41chat.engine.errors import EngineError

PEERS = ("none", "mlx-lm", "mlx-vlm")
PREFILL_STEPS = (128, 512, 2048)


class Peer:
    """name and prefill_step of a loaded peer. Raises ImportError with the command to install it, and EngineError for files that it refuses."""

    def __init__(self, name: str, folder: Path):
        self.name, self.prefill_step = name, 512
        try:
            if name == "mlx-lm":
                from mlx_lm.generate import generate_step, generation_stream
                from mlx_lm.utils import load_model

                self.model, _ = load_model(folder)
                self._loop = lambda ids, count: generate_step(mx.array(ids), self.model, max_tokens=count, prefill_step_size=self.prefill_step)
            else:
                from mlx_vlm.generate import generate_step, generation_stream
                from mlx_vlm.utils import load_model

                self.model = load_model(folder)
                self._loop = lambda ids, count: generate_step(
                    mx.array(ids)[None], self.model, None, None, max_tokens=count, prefill_step_size=self.prefill_step
                )
            self._stream_of_loop = generation_stream
        except ImportError as error:
            raise ImportError(f"{name} is not installed here: pip install {name} ({error})") from error
        except ValueError as error:
            words = f"{name} does not open this build: {str(error).splitlines()[0]}"
            raise EngineError(words, "builds of `bench weights` without --drafter and in affine form are what it reads") from error
        self.tokens: list[int] = []
        self.cpu: list[float] = []

    def begin(self, ids: Sequence[int], count: int) -> float:
        """Read a prompt; seconds to the first token. `count` tokens can be taken in all."""
        self.tokens, began = [], time.perf_counter()
        self._stream: Iterator[tuple[Any, Any]] = self._loop(list(ids), count)
        self._take()
        mx.synchronize(self._stream_of_loop)
        return time.perf_counter() - began

    def step(self) -> float:
        """Seconds of one token. Its loop starts the next token before it gives this one; that work is waited for, so that it falls into
        no other arm's time."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self._take()
        mx.synchronize(self._stream_of_loop)
        self.cpu.append(time.process_time() - cpu_began)
        return time.perf_counter() - began

    def _take(self) -> None:
        token, _ = next(self._stream)
        self.tokens.append(int(token))

    def choose_prefill_step(self, ids: Sequence[int]) -> dict[int, float]:
        """Seconds to the first token by step, after a warm-up of each; the best is kept."""
        found = {}
        for size in PREFILL_STEPS:
            self.prefill_step = size
            self.begin(ids, 2)
            found[size] = self.begin(ids, 2)
        self.prefill_step = min(found, key=found.get)
        return found

"""Compile the trainer's functions in several processes at once, so that the first step finds them in the compiler's cache on disk.

`torch.compile` works through one function after the other: four minutes for the trainer's two shapes on one core. The functions do not depend on
each other. What they are called with is found by a forward on fake tensors (shapes only); then each process compiles some of them, forward and
backward, on made-up arguments of the same shapes. Whatever fails here is compiled by the first step as before.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import NamedTuple

import torch

from . import model

PATIENCE = 150.0  # seconds; the first step takes over after that
# Those that take longest come first.
_SLOW = ("half_in", "attend_both", "moe", "index_loss", "draft_loss", "engram", "attend_window", "attend_draft", "compress", "qkv", "half_out")


class Argument(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    grad: bool


class Call(NamedTuple):
    name: str
    grad: bool  # gradients are recorded
    arguments: tuple[Argument | None, ...]


def settings() -> None:
    """What the compiler's cache key depends on, the same in every process; and no limit to the shapes of a function."""
    import torch._dynamo as dynamo

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in ("cache_size_limit", "recompile_limit", "accumulated_cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(dynamo.config, name):
            setattr(dynamo.config, name, 256)


def _argument(value) -> Argument | None:
    if value is None:
        return None
    return Argument(tuple(value.shape), value.stride(), value.dtype, str(value.device), value.requires_grad)


def calls(trainer, shapes: tuple[tuple[int, int], ...]) -> list[Call]:
    """Every different call of a compiled function in a training step of rows x tokens `shapes`, the slow ones first."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[Call, None] = {}
    own = {name: getattr(model, name) for name in model.COMPILED}

    def watched(name: str):
        plain = getattr(own[name], "_torchdynamo_orig_callable", own[name])

        def call(*arguments):
            found[Call(name, torch.is_grad_enabled(), tuple(_argument(a) for a in arguments))] = None
            return plain(*arguments)

        return call

    try:
        for name in own:
            setattr(model, name, watched(name))
        with FakeTensorMode(allow_non_fake_inputs=True):
            for rows, length in shapes:
                batch = [torch.zeros(rows, length + 1, dtype=t, device=model.DEVICE) for t in (torch.long, torch.uint8, torch.long, torch.long)]
                trainer.forward(batch)
    finally:
        for name, function in own.items():
            setattr(model, name, function)
        trainer.model.load.clear()
        trainer.model.gate.clear()
    order = {name: i for i, name in enumerate(_SLOW)}
    return sorted(found, key=lambda c: (order.get(c.name, len(order)), not c.grad))


def _made(argument: Argument | None):
    if argument is None:
        return None
    room = 1 + sum((n - 1) * s for n, s in zip(argument.shape, argument.stride))
    value = torch.zeros(room, dtype=argument.dtype, device=argument.device).as_strided(argument.shape, argument.stride)
    return value.requires_grad_(argument.grad)


def compile_call(call: Call) -> tuple[str, float, str]:
    """Run one function forward and backward, which compiles it. -> name, seconds, what went wrong."""
    start, wrong = time.time(), ""
    try:
        with torch.set_grad_enabled(call.grad):
            out = getattr(model, call.name)(*(_made(a) for a in call.arguments))
        out = [o for o in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(o) and o.requires_grad]
        if out:
            torch.autograd.backward(out, [torch.zeros_like(o) for o in out])
        if model.DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as problem:  # the first step will meet it again and say so
        wrong = f"{type(problem).__name__}: {problem}"[:300]
    return call.name, round(time.time() - start, 1), wrong


def _ready() -> None:
    # The cache key pickles torch's constants by the first module that has them. Here that would be the copy of the main module, there it is torch.
    sys.modules.pop("__mp_main__", None)
    torch.set_num_threads(1)
    settings()


def run(trainer, shapes: tuple[tuple[int, int], ...], processes: int, log) -> None:
    """Compile for the given shapes; the result lies in the compiler's cache. Logs the seconds and the failures."""
    start, inherited = time.time(), os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    try:
        todo = calls(trainer, shapes)
        listed = time.time() - start
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read when a process starts: each compiles its kernels itself
        pool = multiprocessing.get_context("spawn").Pool(processes, _ready)
        try:
            done = pool.map_async(compile_call, todo, chunksize=1).get(PATIENCE)
        finally:
            pool.terminate()
        slowest = sorted(done, key=lambda d: -d[1])[:6]
        failed = [d for d in done if d[2]]
        log(ahead=len(todo), listed=round(listed, 1), seconds=round(time.time() - start, 1), slowest=[d[:2] for d in slowest], failed=failed[:5])
    except Exception as problem:  # an aid only: without it the first step compiles
        log(ahead=0, seconds=round(time.time() - start, 1), failed=f"{type(problem).__name__}: {problem}"[:300])
    finally:
        if inherited is None:
            os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
        else:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = inherited

"""`dsv41chat bench prefill`: prompts of several lengths, this program's routes and a peer in turn, each at its best chunk; peak memory.

A turn is a prompt twice. The first one finds the host's caches as the other arm left them, and counts by itself; the second is the figure.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import mlx.core as mx

from dsv41chat.bench import arms
from dsv41chat.bench.peer import PEERS, Peer
from dsv41chat.engine.device import device_kind

# Seconds per layer of a peer on an H200 for a prompt of so many tokens. Source: spec: performance, section 3.
KNOWN_TOKENS, KNOWN_PEERS = 512, {"mlx-lm": 0.063, "mlx-vlm": 0.163}


def add_options(parser: argparse.ArgumentParser) -> None:
    arms.add_options(parser)
    parser.add_argument("--peer", choices=PEERS, default="none")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="lengths of the prompts")
    parser.add_argument("--chunks", type=int, nargs="+", default=[], help="chunks to try; default: the device's own")
    parser.add_argument("--repeats", type=int, default=3)


def measure(folder: Path, o: argparse.Namespace) -> dict:
    engines = arms.open_arms(folder, o)
    steppers = {name: arms.Stepper(engine) for name, engine in engines.items()}
    peer = Peer(o.peer, folder) if o.peer != "none" else None
    payload = arms.frame("seconds to the first token of a prompt, arms in turn", engines)
    payload["lengths"], payload["bars"] = {}, {}
    for count in o.tokens:
        ids = arms.prompt(next(iter(engines.values())), count)
        first = {name: round(_first_token(s, ids), 4) for name, s in steppers.items()}
        chunks = {name: _best_chunk(s, ids, o.chunks) for name, s in steppers.items()}
        steps = peer.choose_prefill_step(ids) if peer is not None else None
        names = [*steppers, *([peer.name] if peer else [])]
        # By arm: the first and the second prompt of each turn.
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        peaks = {}
        for _ in range(o.repeats):
            for name, s in steppers.items():
                mx.reset_peak_memory()
                before = mx.get_active_memory()
                turns[name].append((_first_token(s, ids), _first_token(s, ids)))
                peaks[name] = max(peaks.get(name, 0), int(mx.get_peak_memory() - before))
            if peer is not None:
                turns[peer.name].append((peer.begin(ids, 2), peer.begin(ids, 2)))
        first_of, seconds = ({name: statistics.median(turn[i] for turn in turns[name]) for name in names} for i in range(2))
        payload["lengths"][str(count)] = {
            "seconds": {name: round(v, 4) for name, v in seconds.items()}, "tok_s": {name: round(count / v, 1) for name, v in seconds.items()},
            "seconds_first_of_a_turn": {name: round(v, 4) for name, v in first_of.items()}, "first_call_s": first,
            "chunk": chunks, "peak_bytes_over_start": peaks,
            "peer_steps": {k: round(v, 4) for k, v in steps.items()} if steps else None,
        }  # fmt: skip
        if peer is not None and count == KNOWN_TOKENS and device_kind() == "cuda":
            layers = next(iter(engines.values())).pack.config.num_hidden_layers
            payload["lengths"][str(count)]["peer_of_known"] = round(seconds[peer.name] / layers / KNOWN_PEERS[peer.name], 3)
        for name in steppers:
            payload["bars"][f"{count} tokens, {name}: tok/s"] = round(count / seconds[name], 1)
            if peer is not None:
                for i, which in ((1, ""), (0, ", first of a turn")):
                    ratio = statistics.median(p[i] / t[i] for p, t in zip(turns[peer.name], turns[name]))
                    payload["bars"][f"{count} tokens, {peer.name} over {name}{which}"] = round(ratio, 2)
    payload["distinct_experts"] = arms.distinct_experts(next(iter(engines.values())), ids[:129])
    payload["note"] = "peak bytes are MLX's; the numpy arrays of the BLAS route are not among them. Seconds hold the first decoded token"
    return payload


def _first_token(stepper: arms.Stepper, ids: list[int]) -> float:
    return stepper.prefill(ids) + stepper.step()


def _best_chunk(stepper: arms.Stepper, ids: list[int], chunks: list[int]) -> int:
    """The chunk of `chunks` with which the prompt is read fastest; it is the engine's from then on."""
    engine = stepper.engine
    if chunks:
        found = {}
        for chunk in chunks:
            engine.prefill_chunk = chunk
            _first_token(stepper, ids)
            found[chunk] = _first_token(stepper, ids)
        engine.prefill_chunk = min(found, key=found.get)
    return engine.prefill_chunk


def run_options(options: argparse.Namespace) -> int:
    return arms.run_arm(options, "prefill", measure)

"""`dsv41chat bench decode`: plain decode per token and layer, this program's routes and a peer in turn on the same weights."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import mlx.core as mx

from dsv41chat.bench import arms, long_context
from dsv41chat.bench.equality import compare
from dsv41chat.bench.peer import PEERS, Peer
from dsv41chat.engine.errors import EngineError

# performance.md's figures on one H200, ms per layer and token: a run whose peer is further than 20 % from its own is void there.
KNOWN_PEERS = {"mlx-lm": 3.77, "mlx-vlm": 2.18}


def add_options(parser: argparse.ArgumentParser) -> None:
    arms.add_options(parser)
    parser.add_argument("--against", type=Path, help="folder of a second build, whose arms run in turn with those of the first")
    parser.add_argument("--peer", choices=PEERS, default="none")
    parser.add_argument("--context", type=int, default=512, help="tokens before the first measured step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cached", type=int, nargs="+", default=[], help="also decode after so many tokens of random state, such as 1024 131072")


def measure(folder: Path, o: argparse.Namespace) -> dict:
    engines = arms.open_arms(folder, o)
    if o.against is not None:
        engines |= {f"{name} of {o.against.name}": engine for name, engine in arms.open_arms(o.against, o).items()}
        layers = {len(engine.trunk.layers) for engine in engines.values()}
        if len(layers) > 1:
            raise EngineError(f"the two builds have {' and '.join(map(str, sorted(layers)))} layers", "compare builds of one shape and depth")
    ids = arms.prompt(next(iter(engines.values())), o.context)
    steppers = {name: arms.Stepper(engine) for name, engine in engines.items()}
    first = {}
    for name, stepper in steppers.items():
        stepper.prefill(ids)
        first[name] = stepper.step()
    peer = Peer(o.peer, folder) if o.peer != "none" else None
    peer_times: list[float] = []
    if peer is not None:
        peer.begin(ids, o.steps + arms.WARM_UP + 2)
        first[peer.name] = peer.step()
    for _ in range(arms.WARM_UP):
        for stepper in steppers.values():
            stepper.step()
        if peer is not None:
            peer.step()
    for stepper in steppers.values():
        for values in (stepper.rounds, stepper.cpu, stepper.sampled):
            values.clear()
    if peer is not None:
        peer.cpu.clear()
    for _ in range(o.steps):
        for stepper in steppers.values():
            stepper.step()
        if peer is not None:
            peer_times.append(peer.step())
    payload = arms.frame("plain decode, one token a step, arms in turn", engines)
    layers = payload["build"]["layers"]
    per_layer = lambda seconds: round(1000 * statistics.median(seconds) / layers, 4)
    payload["first_step_ms"] = {name: round(1000 * s, 2) for name, s in first.items()}
    payload["arms"] = {}
    for name, s in steppers.items():
        head, sampling = s.head_seconds(), statistics.median(s.sampled)
        payload["arms"][name] = {
            "step_ms": arms.milliseconds(s.rounds), "cpu_ms": arms.milliseconds(s.cpu), "ms_per_layer": per_layer(s.rounds),
            "head_ms": round(1000 * head, 4),
            "sampling_ms": round(1000 * sampling, 4), "layers_only_ms_per_layer": per_layer([t - head - sampling for t in s.rounds]),
            "tok_s": round(1 / statistics.median(s.rounds), 2), "ids_hash": arms.ids_hash(s.ids),
        }  # fmt: skip
    payload["bars"] = {f"{name}: ms per layer and token": v["ms_per_layer"] for name, v in payload["arms"].items()}
    if o.against is not None:
        _compare_builds(payload, o, engines, steppers)
    if peer is not None:
        found = per_layer(peer_times)
        payload["peer"] = {
            "name": peer.name, "step_ms": arms.milliseconds(peer_times), "cpu_ms": arms.milliseconds(peer.cpu), "ms_per_layer": found,
            "tok_s": round(1 / statistics.median(peer_times), 2),
        }  # fmt: skip
        for name, s in steppers.items():
            ratio = statistics.median(p / t for p, t in zip(peer_times, s.rounds))
            payload["bars"][f"{peer.name} over {name}, median of steps in turn"] = round(ratio, 3)
            cpu = statistics.median(peer.cpu) / statistics.median(s.cpu)
            payload["bars"][f"{peer.name} over {name}, CPU time of the process"] = round(cpu, 3)
        if payload["device"] != "cpu":
            payload["peer"]["of_known"] = round(found / KNOWN_PEERS[peer.name], 3)
        # Enough rows to close a group of 128.
        payload["equality"] = compare(next(iter(engines.values())), peer, ids[:200])
        payload["bars"]["layers and head within 2e-2 of the peer"] = payload["equality"]["worst"]
        for kind, far in (payload["equality"]["to_float32"] or {}).items():
            payload["bars"][f"{kind}, beyond it: to float32, own and peer"] = [far["own"], far["peer"]]
    if getattr(o, "cached", None):
        payload["long_context"] = {name: long_context.measure(engine, o.cached, o.steps) for name, engine in engines.items()}
        for name, found in payload["long_context"].items():
            first, last = found[str(o.cached[0])], found[str(o.cached[-1])]
            key = "without_scoring_ms" if first["without_scoring_ms"] else None
            ratio = last[key] / first[key] if key else last["step_ms"]["median"] / first["step_ms"]["median"]
            words = "without index scoring" if key else "whole step"
            payload["bars"][f"{name}: decode at {o.cached[-1]:,} over {o.cached[0]:,} cached tokens, {words}"] = round(ratio, 3)
            peaks = last["chunk_peak_bytes"] / max(first["chunk_peak_bytes"], 1)
            payload["bars"][f"{name}: peak bytes of a chunk at {o.cached[-1]:,} over {o.cached[0]:,} cached tokens"] = round(peaks, 3)
    payload["distinct_experts"] = arms.distinct_experts(next(iter(engines.values())), ids[:129])
    payload["weight_bytes"] = arms.weight_bytes(next(iter(engines.values())))
    payload["peak_bytes"] = int(mx.get_peak_memory())
    payload["context"], payload["prompt_hash"] = o.context, arms.ids_hash(ids)
    return payload


def _compare_builds(payload: dict, o: argparse.Namespace, engines: dict, steppers: dict) -> None:
    """Facts of the second build, and per route the ratio of the steps of both, of the layers alone as well."""
    payload["against"] = arms.build_facts(engines[f"{o.routes[0]} of {o.against.name}"])
    for name in o.routes:
        other = f"{name} of {o.against.name}"
        ratio = statistics.median(a / b for a, b in zip(steppers[name].rounds, steppers[other].rounds))
        payload["bars"][f"{name} over {other}, median of steps in turn"] = round(ratio, 3)
        a, b = (payload["arms"][key]["layers_only_ms_per_layer"] for key in (name, other))
        payload["bars"][f"{name} over {other}, layers only"] = round(a / b, 3)


def run_options(options: argparse.Namespace) -> int:
    return arms.run_arm(options, "decode", measure)

"""`dsv41chat bench engram`: rows per second and latency of every way to the tables, cold and warm.

All arms run interleaved in one process against one generated file. "Cold" is proved by mincore before each call, ids are
fresh, and every returned row is checked. The device's own random-read rate is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsv41chat.bench.receipt import OUTPUT_HELP, environment, write_receipt
from dsv41chat.bench.table_file import DIM, ColdIds, TableFile, WeightCopy, read_ahead_kb
from dsv41chat.engine.engram.os_layer import LinuxLayer, PosixLayer, Unsupported, system_layer
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings

ROW_BYTES = 264
SIZES = (24, 144, 6144)
REPEATS = {24: 1, 144: 1, 6144: 5}  # times per round, each with its own measure of the drive: one large batch is soon over
COLD_CALLS = {24: 40, 144: 10, 6144: 1}
WARM_CALLS = {24: 200, 144: 100, 6144: 5}
SLOW_CALLS = {24: 6, 144: 2, 6144: 1}  # the arm that reads ahead needs seconds per call
LIMIT_DEPTH_PAGES = 256


class FadviseLayer(LinuxLayer):
    """Linux with the second-best means of advice first."""

    advisers = ("fadvise",)


@dataclass
class Arm:
    """One way to rows. gather(slot, ids) -> (weight, scale or None); reads_ahead: the whole file is dropped before each call."""

    name: str
    gather: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray | None]]
    scales: bool = True
    reads_ahead: bool = False
    maps: tuple = ()
    before: Callable[[], None] = lambda: None
    reader: list[EngramReader] = field(default_factory=list)
    slots: tuple[int, ...] = (0, 1)
    cold: ColdIds | None = None  # of the arm's own file, where it has one
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    pages: dict[int, list[float]] = field(default_factory=dict)
    shares: dict[int, list[float]] = field(default_factory=dict)


def reader_arm(name: str, file: TableFile, settings: EngramSettings, layer: PosixLayer | None = None, fresh: bool = False) -> Arm:
    """fresh: a new reader for each round, so that the governor starts without a verdict."""
    box: list[EngramReader] = []

    def open_again() -> None:
        for reader in box:
            reader.close()
        box[:] = [EngramReader.open(file.specs, settings, {}, os_layer=layer)]

    def gather(slot: int, ids: np.ndarray):
        packed = box[0].gather(slot, ids)
        return packed.expanded()

    open_again()
    region = box[0].tables[0].regions[1]
    return Arm(name, gather, scales=not region.in_memory, before=open_again if fresh else lambda: None, reader=box)


def memmap_arm(name: str, file: TableFile, random: bool) -> Arm:
    """numpy.memmap and fancy indexing, as a plain program would write it."""
    maps = [[np.memmap(ref.file, np.uint8, "r", ref.offset, ref.shape) for ref in spec.regions] for spec in file.specs]
    if random:
        for regions in maps:
            for region in regions:
                region._mmap.madvise(mmap.MADV_RANDOM)
    raw = tuple(region._mmap for regions in maps for region in regions)
    return Arm(name, lambda slot, ids: (maps[slot][0][ids], maps[slot][1][ids]), reads_ahead=not random, maps=raw)


def peer_arm(file: TableFile, folder: Path) -> Arm | None:
    """engramdb-python's Store: weights only, in its own file, which is a copy. None when it is not installed."""
    try:
        import engramdb
    except ImportError:
        return None
    folder.mkdir()
    copy = WeightCopy(file, folder / "shard_000.bin")
    store = engramdb.Store(str(folder), 1, file.rows, DIM)

    def gather(slot: int, ids: np.ndarray):
        return np.frombuffer(store.fetch(ids.tolist()), np.uint8).reshape(-1, DIM), None

    return Arm("engramdb Store (weights only)", gather, scales=False, slots=(0,), cold=ColdIds(copy, system_layer()))


def all_arms(file: TableFile, folder: Path) -> list[Arm]:
    mapped, resident = dict(scales="mapped"), dict(scales="resident")
    arms = [reader_arm("auto", file, EngramSettings(**mapped), fresh=True)]
    arms += [reader_arm(path, file, EngramSettings(path=path, **mapped)) for path in ("direct", "advise", "pool", "nocache")]
    if system_layer().name == "linux":
        arms.append(reader_arm("advise by fadvise", file, EngramSettings(path="advise", **mapped), FadviseLayer()))
    arms += [reader_arm(f"{path}, scales resident", file, EngramSettings(path=path, **resident)) for path in ("advise", "pool")]
    arms += [memmap_arm("numpy.memmap", file, False), memmap_arm("numpy.memmap MADV_RANDOM", file, True)]
    if (peer := peer_arm(file, folder / "engramdb")) is not None:
        arms.append(peer)
    return arms


# the device's own limit


def fio_limit(file: TableFile) -> float | None:
    """Random 4 KiB reads per second around the page cache, the better of depth 32 and 64; None without fio."""
    if shutil.which("fio") is None:
        return None
    best = 0.0
    for depth in (32, 64):
        command = ["fio", "--name=limit", f"--filename={file.path}", "--readonly", "--rw=randread", "--bs=4k", "--direct=1", "--thread"]
        command += ["--ioengine=libaio", f"--iodepth={depth}", "--time_based", "--runtime=1", "--randrepeat=0", "--output-format=json"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        best = max(best, json.loads(result.stdout)["jobs"][0]["read"]["iops"])
    return best


def advise_limit(file: TableFile, cold: ColdIds, layer: PosixLayer) -> float:
    """Whole distinct cold pages per second: advised 256 at a time, then touched; for machines without fio."""
    cold.drop()
    total = file.size // layer.page_size
    pages = np.unique(cold.rng.integers(0, total, 8192))
    fd = layer.open(file.path)
    mapped = layer.map(fd, file.size)
    view = mapped.array[: total * layer.page_size].reshape(total, layer.page_size)
    out = np.empty((LIMIT_DEPTH_PAGES, 1), np.uint8)
    began = time.perf_counter()
    for lo in range(0, len(pages), LIMIT_DEPTH_PAGES):
        part = pages[lo : lo + LIMIT_DEPTH_PAGES]
        layer.advise(layer.advisers[0], fd, mapped, part)
        np.take(view[:, :1], part, axis=0, out=out[: len(part)], mode="clip")
    seconds = time.perf_counter() - began
    layer.close(fd)
    return len(pages) / seconds


# measuring


def live_maps(arms: list[Arm]) -> tuple:
    """Every map through which an arm may hold pages of the file."""
    mapped = [m for arm in arms for m in arm.maps]
    return (*mapped, *(file.mapped.mmap for arm in arms for reader in arm.reader for file in reader.files))


def run_cold(arm: Arm, file: TableFile, cold: ColdIds, n: int, limit: float, maps: tuple) -> None:
    cold = arm.cold or cold
    cold.drop(*maps)
    arm.before()
    rates = []
    for call in range((SLOW_CALLS if arm.reads_ahead else COLD_CALLS)[n]):
        if arm.reads_ahead or n > 1000:
            cold.drop(*maps)
        slot = arm.slots[call % len(arm.slots)]
        ids, pages = cold.take(slot, n, arm.scales)
        began = time.perf_counter()
        weight, scale = arm.gather(slot, ids)
        seconds = time.perf_counter() - began
        file.check(slot, ids, weight, scale)
        arm.seconds.setdefault(("cold", n), []).append(seconds)
        rates.append((pages, seconds))
    share = sum(pages for pages, _ in rates) / sum(seconds for _, seconds in rates) / limit
    arm.shares.setdefault(n, []).append(share)


def run_warm(arm: Arm, file: TableFile, cold: ColdIds, n: int) -> None:
    cold = arm.cold or cold
    ids = cold.rng.integers(0, file.rows, n)
    for _ in range(4):
        weight, scale = arm.gather(0, ids)
    file.check(0, ids, weight, scale)
    if not cold.resident(0, ids, arm.scales).all():
        return  # nocache drops what it read: it has no warm state
    for _ in range(WARM_CALLS[n]):
        began = time.perf_counter()
        arm.gather(0, ids)
        arm.seconds.setdefault(("warm", n), []).append(time.perf_counter() - began)


def token_cost(file: TableFile, cold: ColdIds, repeats: int = 400) -> dict:
    """Host milliseconds of one decoded token, both tables, everything warm: reads staged and rows taken, then with the values in MLX."""
    import mlx.core as mx

    from dsv41chat.engine.engram.values import take_values

    reader = EngramReader.open(file.specs, EngramSettings(scales="mapped"), {})
    batches = [cold.rng.integers(0, file.rows, (2, 1, 24)) for _ in range(50)]
    # The generated scales are arbitrary bytes: staging is timed on rows as they are, values on rows that are numbers.
    rows, values = [], []
    for repeat in range(repeats):
        ids = batches[repeat % len(batches)]
        began = time.perf_counter()
        with reader.stage(ids) as ticket:
            packed = [ticket.rows(slot) for slot in (0, 1)]
            rows.append(time.perf_counter() - began)
            for part in packed:
                np.minimum(part.weight, 0x70, out=part.weight)
                np.minimum(part.scale, 130, out=part.scale)
            began = time.perf_counter()
            mx.eval([take_values(ticket, slot) for slot in (0, 1)])
            values.append(time.perf_counter() - began)
    batches_by_path = reader.counters()["layers.1.engram"]["batches"]
    reader.close()
    half = repeats // 2  # the first half may still be cold
    return {
        "rows_ms_per_token": percentiles(rows[half:]),
        "values_ms_per_token": percentiles(values[half:]),
        "batches": batches_by_path,
        "note": "48 rows a token; warm pages; values_ms: copy into MLX and decoding, on the CPU",
    }


def embedded_cost(tokens: int = 96) -> dict:
    """Host milliseconds per decoded token inside the reader while the embedded model answers, from its counters."""
    from dsv41chat.engine import SamplingParams, open_engine
    from dsv41chat.engine.chat.encode import encode_prompt
    from dsv41chat.engine.chat.messages import Message, RenderOptions
    from dsv41chat.engine.events import Prefill
    from dsv41chat.nano import embedded_pack

    def host_s() -> float:
        return sum(table["host_s"] for name, table in engine.table_stats().items() if name != "reader")

    engine = open_engine(embedded_pack())
    found = []
    for text in ("Tell me about the sea.", "What is a river?", "Tell me about the sea.", "What is a river?"):
        prompt = encode_prompt(engine.tokenizer, engine.family, [Message("user", text)], RenderOptions(thinking=False))
        for event in engine.new_session().generate(prompt, SamplingParams(), max_tokens=tokens):
            if isinstance(event, Prefill) and event.done == event.total:
                before = host_s()
        states = [table.state for table in engine.residency().tables]
        found.append({"tokens": len(event.ids), "host_ms_per_token": round(1e3 * (host_s() - before) / len(event.ids), 4), "states": states})
    engine.close()
    return {"fingerprint": engine.fingerprint, "answers": found, "note": "decode only; the second two answers repeat the first two, warm"}


def percentiles(seconds: list[float]) -> dict:
    p50, p95, p99 = np.percentile(np.array(seconds) * 1e3, (50, 95, 99))
    return {"p50_ms": round(p50, 4), "p95_ms": round(p95, 4), "p99_ms": round(p99, 4), "calls": len(seconds)}


def summary(arm: Arm) -> dict:
    result: dict = {"scales": "read" if arm.scales else "not read"}
    for (state, n), seconds in sorted(arm.seconds.items()):
        entry = percentiles(seconds) | {"rows_s": round(n / statistics.median(seconds))}
        if state == "cold":
            entry["share_of_limit"] = round(statistics.median(arm.shares[n]), 3)
            entry["share_by_round"] = [round(share, 3) for share in arm.shares[n]]
        result[f"{state} {n}"] = entry
    if arm.reader:
        table = arm.reader[0].counters()["layers.1.engram"]
        result |= {"batches": table["batches"], "fallbacks": table["fallbacks"]}
    return result


def judgements(arms: dict[str, dict], token: dict) -> dict:
    """The bars of the receipt, each with its figure."""
    best_cold = min((a["cold 24"]["p50_ms"], name) for name, a in arms.items() if name == "auto" or name.startswith("advise"))
    memmap = arms["numpy.memmap"]["cold 24"]["p50_ms"]
    return {
        "cold decode p50 <= 1.0 ms per layer (auto)": arms["auto"]["cold 24"]["p50_ms"],
        "cold decode p50, best path": {"path": best_cold[1], "p50_ms": best_cold[0]},
        "cold prefill >= 0.8 of the drive (auto)": arms["auto"]["cold 6144"]["share_of_limit"],
        "warm <= 0.15 ms per token, both tables": token["rows_ms_per_token"]["p50_ms"],
        "numpy.memmap over auto, cold 24, >= 50": round(memmap / arms["auto"]["cold 24"]["p50_ms"], 1),
        "numpy.memmap MADV_RANDOM over auto, cold 24": round(
            arms["numpy.memmap MADV_RANDOM"]["cold 24"]["p50_ms"] / arms["auto"]["cold 24"]["p50_ms"], 1
        ),
    }


def run(folder: Path, rows: int, rounds: int, log=print) -> dict:
    layer = system_layer()
    file = TableFile(folder, rows)
    log(f"writing {file.size / 1e9:.2f} GB")
    file.write()
    cold = ColdIds(file, layer)
    arms = all_arms(file, folder)
    limits, loads = [], []
    order, phases = np.random.default_rng(0), [(n, repeat) for n in SIZES for repeat in range(REPEATS[n])]
    for index in range(rounds):
        for n, repeat in phases:
            limits.append(fio_limit(file) or advise_limit(file, cold, layer))
            for arm in order.permutation(np.array(arms, object)):
                if repeat == 0 or not arm.reads_ahead:
                    run_cold(arm, file, cold, n, limits[-1], live_maps(arms))
        for n in SIZES:
            for arm in order.permutation(np.array(arms, object)):
                for mapped in live_maps(arms):
                    mapped.madvise(mmap.MADV_DONTNEED)  # the page tables of one arm do not weigh on the next
                run_warm(arm, file, cold, n)
        loads.append(round(os.getloadavg()[0], 1))
        log(f"round {index + 1} of {rounds}: limit {limits[-1]:,.0f} pages/s")
    token = token_cost(file, cold)
    results = {arm.name: summary(arm) for arm in arms}
    return {
        "what": "engram rows from disk: cold and warm, per path",
        **environment(("numpy", "mlx", "engramdb-python")),
        "file_bytes": file.size,
        "row_bytes": ROW_BYTES,
        "page_bytes": layer.page_size,
        "read_ahead_kb": read_ahead_kb(file.path),
        "limit": {
            "means": "fio 4 KiB randread direct, best of depth 32 and 64" if shutil.which("fio") else "process_madvise, depth 256",
            "pages_s": [round(limit) for limit in limits],
        },
        "rounds": rounds,
        "load_average_by_round": loads,
        "bars": judgements(results, token),
        "token": token,
        "embedded": embedded_cost(),
        "arms": results,
        "note": "load_average_by_round tells how much other work ran beside it; compare arms within this run only",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="where the file is generated (default: the temporary folder); deleted afterwards")
    parser.add_argument("--gigabytes", type=float, default=4.4, help="size of the generated file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", default="", help="a sentence for the receipt: how the machine was set up")
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


def run_options(options: argparse.Namespace) -> int:
    """Measure, print the bars, write the receipt. Returns the exit code."""
    if system_layer().name != "linux":
        print("bench engram proves cold pages with mincore and fadvise and needs Linux; `doctor engram` measures elsewhere", file=sys.stderr)
        return 2
    rows = int(options.gigabytes * 1e9) // (2 * ROW_BYTES)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="engram-bench-") as folder:
        try:
            payload = run(Path(folder), rows, options.rounds)
        except Unsupported as error:
            print(f"bench engram: {error}", file=sys.stderr)
            return 1
    payload["setup"] = options.note
    payload["command"] = f"dsv41chat bench engram --gigabytes {options.gigabytes:g} --rounds {options.rounds}"
    path = write_receipt(options.output, "engram", payload)
    print(json.dumps(payload["bars"], indent=1))
    print(path)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("dsv41chat bench engram", description=__doc__)
    add_options(parser)
    return run_options(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())

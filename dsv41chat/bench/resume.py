"""`dsv41chat bench resume`: time to the first token, resumed against read again; bytes on disk; what the writer costs decode.

Every first token is measured in a process of its own, loading apart. Fresh and resumed answers must be the same ids.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from dsv41chat.bench.receipt import OUTPUT_HELP, environment, write_receipt

LENGTHS = (512, 2048, 4096, 7680)
CHUNKS = (128, 256, 512)
NEW_IDS, ANSWER_IDS = 16, 8
TURNS, TURN_IDS = 100, 40
STEPS, BLOCKS = 60, 16


# one process ----------------------------------------------------------------------------------------------------------------


def _ids(engine: Any, count: int) -> tuple[int, ...]:
    """Plain text tokens from a seed; the same in every process."""
    known = [i for i in range(engine.tokenizer.vocab_size) if not engine.tokenizer.is_added(i)]
    return tuple(np.random.default_rng(11).choice(known, count).tolist())


def _prompt(engine: Any, ids: tuple[int, ...]) -> Any:
    from dsv41chat.engine.chat.encode import EncodedPrompt

    return EncodedPrompt(ids, "content", 0, len(ids), engine.family)


def _answer(engine: Any, session: Any, ids: tuple[int, ...], **marks: Any) -> tuple[float, tuple[int, ...]]:
    """(seconds to the first token, answer)."""
    from dsv41chat.engine import SamplingParams

    *_, done = session.generate(_prompt(engine, ids), SamplingParams(), max_tokens=ANSWER_IDS, draft="off", loop_stop=False, **marks)
    return done.timing["first_token_s"], done.ids


def child(mode: str, folder: Path, tokens: int, chunk: int | None) -> dict[str, Any]:
    """mode: fresh (reads everything, and leaves a state after `tokens` ids on its way, as a turn does) or resumed (starts from it)."""
    from dsv41chat.engine import open_engine
    from dsv41chat.nano import embedded_pack
    from dsv41chat.ui.states import States, StateTurn

    began = time.perf_counter()
    engine = open_engine(embedded_pack())
    load_s = time.perf_counter() - began
    if chunk is not None:
        engine.prefill_chunk = chunk
    session, ids = engine.new_session(), _ids(engine, tokens + NEW_IDS)
    states, turn = States(folder, 1 << 40, min_free_bytes=0), StateTurn("bench")
    states.bind(engine, "nano")
    resume_s = 0.0
    if mode == "fresh":
        first_s, answer = _answer(engine, session, ids, marks=(tokens,), on_mark=lambda n: states.keep(session, "P", turn))
        reused = 0
    else:
        resumed = states.resume(session, ids, turn)
        reused, resume_s = resumed.tokens, resumed.seconds
        first_s, answer = _answer(engine, session, ids)
    states.settle(60)
    found = {"load_s": load_s, "resume_s": resume_s, "first_token_s": resume_s + first_s, "prefilled": len(ids) - reused, "answer": answer}
    states.close()
    engine.close()
    return found


def _run_child(mode: str, folder: Path, tokens: int, chunk: int | None = None) -> dict[str, Any]:
    words = [sys.executable, "-m", "dsv41chat.bench.resume", mode, str(folder), str(tokens), str(chunk or 0)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


# the arms -------------------------------------------------------------------------------------------------------------------


def first_tokens(folder: Path, lengths: tuple[int, ...], repeats: int, log=print) -> tuple[int, dict[str, Any]]:
    """(best chunk of a fresh reading, per length fresh and resumed)."""
    tried = {chunk: _run_child("fresh", folder / f"chunk{chunk}", min(lengths), chunk)["first_token_s"] for chunk in CHUNKS}
    best = min(tried, key=tried.get)
    out: dict[str, Any] = {"chunks_s": {str(chunk): round(s, 3) for chunk, s in tried.items()}}
    for tokens in lengths:
        states = folder / str(tokens)
        fresh, resumed = [], []
        for _ in range(repeats):
            fresh.append(_run_child("fresh", states, tokens, best))
            # The chunk is part of what a state was made with.
            resumed.append(_run_child("resumed", states, tokens, best))
        answers = {tuple(run["answer"]) for run in (*fresh, *resumed)}
        middle = lambda runs, key: statistics.median(run[key] for run in runs)
        out[str(tokens)] = {
            "fresh_s": round(middle(fresh, "first_token_s"), 4),
            "resumed_s": round(middle(resumed, "first_token_s"), 4),
            "resume_s": round(middle(resumed, "resume_s"), 4),
            "prefilled": resumed[0]["prefilled"],
            "load_s": round(middle(resumed, "load_s"), 3),
            "times": round(middle(fresh, "first_token_s") / middle(resumed, "first_token_s"), 1),
            "same_answer": len(answers) == 1,
        }
        log(f"{tokens:,} tokens: {json.dumps(out[str(tokens)])}")
    return best, out


def bytes_on_disk(folder: Path, turns: int = TURNS) -> dict[str, Any]:
    """A conversation of many turns, each with a prompt's mark and an end: bytes written against bytes of its rows and tails."""
    from dsv41chat.engine import open_engine
    from dsv41chat.engine.lane import PoolSpec
    from dsv41chat.engine.snapshot import tail_bytes
    from dsv41chat.nano import embedded_pack
    from dsv41chat.ui.states import States, StateTurn

    engine = open_engine(embedded_pack())
    states, session = States(folder, 1 << 40, min_free_bytes=0), engine.new_session()
    states.bind(engine, "nano")
    lane, ids, tails = session.target.lane, _ids(engine, turns * TURN_IDS + 1), 0
    for number in range(1, turns + 1):
        turn = StateTurn("bench", number)
        for end, kind in ((number * TURN_IDS - 10, "P"), (number * TURN_IDS, "E")):
            session.prefill(ids[: end + 1])
            states.keep(session, kind, turn)
            tails += tail_bytes(lane, end)
        states._tidy(session, turn)
    states.settle(60)
    found = states.stats()
    per_token = sum(int(np.prod(s.tail)) * s.dtype.size / s.ratio for s in lane.specs.values() if isinstance(s, PoolSpec))
    rows = per_token * turns * TURN_IDS
    with states.cache.db.read() as db:
        stored, last = db.execute("SELECT sum(bytes), max(hi) FROM seg").fetchone()
    states.close()
    engine.close()
    written = found["counters"]["bytes written"]
    return {
        "turns": turns, "tokens": turns * TURN_IDS, "row_bytes_per_token": per_token, "segment_bytes_per_token": round(stored / last, 1),
        "rows_and_tails": int(rows + tails), "written": written, "written_over_rows_and_tails": round(written / (rows + tails), 3),
        "kept": found["bytes"], "marks": found["entries"], "segments": found["segments"],
    }  # fmt: skip


def decode_steps(folder: Path, blocks: int = BLOCKS, steps: int = STEPS) -> dict[str, Any]:
    """p99 of a decode step with the writer saturated, against blocks of the same run without it."""
    from dsv41chat.engine import open_engine
    from dsv41chat.nano import embedded_pack
    from dsv41chat.store.prompt_cache_put import Entry
    from dsv41chat.ui.states import States

    engine = open_engine(embedded_pack())
    states, session = States(folder, 4 << 30, min_free_bytes=0), engine.new_session()
    states.bind(engine, "nano")
    target, token = session.target, 5
    session.prefill(_ids(engine, 257))
    seconds: dict[str, list[float]] = {"idle": [], "writing": []}
    states.begin()
    number, payload = 0, os.urandom(8 << 20)
    for block in range(2 * blocks):
        arm = ("idle", "writing")[block % 2]
        stop = threading.Event()

        def feed(stop: threading.Event = stop) -> None:
            nonlocal number
            while not stop.is_set():
                number += 1
                key = number.to_bytes(4, "little") * 8
                tail = {"win": ("U8", (len(payload),), payload)}
                states.writer.put(Entry(states._build, None, 0, 8, key, {}, tail, "E", None))
                states.writer.drain(5.0, stop.is_set)

        feeder = threading.Thread(target=feed)
        if arm == "writing":
            feeder.start()
        for step in range(steps):
            began = time.perf_counter()
            trial = target.rows([token])
            target.commit(trial, 1)
            token = int(np.array(trial.logits)[0].argmax())
            if step >= 5:
                seconds[arm].append(time.perf_counter() - began)
        stop.set()
        if arm == "writing":
            feeder.join()
            states.settle(60)
    states.end()
    written = states.cache.counters["bytes written"]
    states.close()
    engine.close()
    result: dict[str, Any] = {"steps_per_arm": len(seconds["idle"]), "bytes_written": written}
    for arm, values in seconds.items():
        p50, p99 = np.percentile(np.array(values) * 1e3, (50, 99))
        result[arm] = {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3)}
    for name in ("p50", "p99"):
        result[f"{name}_writing_over_idle"] = round(result["writing"][f"{name}_ms"] / result["idle"][f"{name}_ms"], 3)
    return result


def run(folder: Path, lengths: tuple[int, ...], repeats: int, log=print) -> dict[str, Any]:
    from dsv41chat.engine import probe_pack
    from dsv41chat.nano import embedded_pack

    best, lengths_found = first_tokens(folder / "first", lengths, repeats, log)
    disk = bytes_on_disk(folder / "disk")
    log(f"on disk: {json.dumps(disk)}")
    steps = decode_steps(folder / "steps")
    log(f"decode: {json.dumps(steps)}")
    around = [entry["times"] for name, entry in lengths_found.items() if name.isdigit() and int(name) >= 4096]
    return {
        "what": "first token of a resumed conversation against reading it again",
        **environment(),
        "fingerprint": probe_pack(embedded_pack()).fingerprint,
        "new_ids": NEW_IDS,
        "repeats": repeats,
        "fresh_chunk": best,
        "lengths": lengths_found,
        "disk": disk,
        "decode": steps,
        "bars": {
            "resumed >= 20 times as fast from 4,096 tokens on": min(around) if around else None,
            "written < 2 x rows and tails": disk["written_over_rows_and_tails"],
            "p99 decode step, writing over idle, <= 1.05": steps["p99_writing_over_idle"],
            "same answers": all(entry["same_answer"] for name, entry in lengths_found.items() if name.isdigit()),
        },
        "load_average": round(os.getloadavg()[0], 1),
        "note": "seconds are medians of processes of their own, loading not counted; compare within this run only",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of the history")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where states are written (default: the temporary folder); deleted afterwards")
    parser.add_argument("-o", "--output", type=Path, help=OUTPUT_HELP)


def run_options(options: argparse.Namespace) -> int:
    """Measure, print the bars, write the receipt. Returns the exit code."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="resume-bench-") as folder:
        payload = run(Path(folder), tuple(options.tokens), options.repeats)
    for bar, value in payload["bars"].items():
        print(f"{bar}: {value}")
    print(write_receipt(options.output, "resume", payload))
    return 0


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) or None)))

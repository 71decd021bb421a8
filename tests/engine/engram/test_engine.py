"""The tables under a whole model: the answer does not depend on how rows are read, and reading is hidden behind computing."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dsv41chat.engine import SamplingParams, open_engine
from dsv41chat.engine.chat.encode import encode_prompt
from dsv41chat.engine.chat.messages import Message, RenderOptions
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings
from dsv41chat.engine.errors import EngramReadError
from dsv41chat.engine.events import Done, Prefill, Residency
from dsv41chat.engine.trunk_v41 import TrunkV41
from dsv41chat.nano import embedded_pack
from tests.engine.engram.big_pack import grow_tables, write_rows
from tests.engine.engram.tables import FakeMac, FaultyDisk, SlowDisk, drop_file, refuse_linux_calls

GREEDY, TOKENS, LAYER_S = SamplingParams(), 10, 0.002
LONG = "The river runs from the hills to the sea, and the towns on it trade in salt, wool and iron. " * 6
HOW = {
    "auto": {},
    "direct": dict(path="direct"),
    "advise": dict(path="advise"),
    "pool": dict(path="pool"),
    "nocache": dict(path="nocache"),
    "nocache-pread": dict(path="nocache", access="pread", row_cache=100),
    "pool-pread": dict(path="pool", access="pread"),
    "resident": dict(mode="resident"),
    "mapped-scales": dict(scales="mapped"),
    "no-overlap": dict(overlap=False),
}


def prompt(engine, text):
    return encode_prompt(engine.tokenizer, engine.family, [Message("user", text)], RenderOptions(thinking=False))


def answer(engine, text=LONG, tokens=TOKENS, session=None, draft="auto") -> Done:
    return list((session or engine.new_session()).generate(prompt(engine, text), GREEDY, max_tokens=tokens, draft=draft))[-1]


def ids_hash(done: Done) -> str:
    return hashlib.sha256(np.array(done.ids, "<u4").tobytes()).hexdigest()


def batches(engine) -> set[str]:
    return {path for name, table in engine.table_stats().items() if name != "reader" for path in table["batches"]}


def waited(engine) -> float:
    return sum(table["wait_s"] for name, table in engine.table_stats().items() if name != "reader")


@pytest.fixture(scope="module")
def engine():
    return open_engine(embedded_pack(), engram=EngramSettings(mode="resident"))


@pytest.fixture(scope="module")
def reference(engine) -> str:
    assert {table.state for table in engine.residency().tables} == {"resident"}
    return ids_hash(answer(engine))


@contextmanager
def reading(engine, layer=None, **settings):
    """The same weights on another reader."""
    before = engine.trunk.tables
    engine.trunk.tables = EngramReader.open(engine.pack.table_specs, EngramSettings(**settings), {}, os_layer=layer)
    try:
        yield engine
    finally:
        reader, engine.trunk.tables = engine.trunk.tables, before
        reader.close()
        assert reader.staging.in_flight == 0


@pytest.mark.parametrize("how", HOW)
def test_one_answer_however_rows_are_read(how, engine, reference):
    with reading(engine, **HOW[how]):
        done = answer(engine)
        assert ids_hash(done) == reference
        assert done.usage["prefilled_tokens"] > engine.prefill_chunk, "both batch sizes were read"
        path = engine.tables.settings.path
        if path != "auto":
            assert batches(engine) == {path}
        if how == "resident":
            assert batches(engine) == {"resident"} and {t.state for t in engine.residency().tables} == {"resident"}


@pytest.mark.parametrize("path", ("auto", "advise", "pool", "nocache"))
def test_one_answer_on_the_macos_paths(path, engine, reference, monkeypatch):
    refuse_linux_calls(monkeypatch)
    with reading(engine, FakeMac(), path=path):
        assert ids_hash(answer(engine)) == reference


PARTS = {"prefill": (LONG, 1, "off"), "decode": ("Hello", TOKENS, "off"), "drafted": ("Hello", TOKENS, 2)}


@pytest.mark.parametrize("text, tokens, draft", PARTS.values(), ids=PARTS)
def test_overlap_halves_the_waiting_and_changes_nothing(text, tokens, draft, engine, monkeypatch):
    """On a drive of 5 ms per read and layers of 2 ms each. The second table's rows come while the layers before it run."""
    waits, hashes, layer = {}, set(), TrunkV41._layer
    for overlap in (True, False):
        disk = SlowDisk()
        with reading(engine, disk, scales="mapped", overlap=overlap), monkeypatch.context() as patch:
            patch.setattr(TrunkV41, "_layer", lambda *args, disk=disk: disk.tick(engine.tables, LAYER_S) or layer(*args))
            hashes.add(ids_hash(answer(engine, text, tokens, draft=draft)))
            waits[overlap] = waited(engine)
    assert len(hashes) == 1
    assert waits[True] <= waits[False] / 2, waits


def test_the_rows_of_a_drafted_window_are_one_batch(engine):
    """A block of proposals is known at once: pending and drafted rows are asked for in one call per table."""
    session = engine.new_session()
    trial = session.target.rows(list(prompt(engine, "Hello").ids))
    session.target.commit(trial, trial.count)
    before = engine.tables.counters()["layers.1.engram"]
    session.target.rows([5, 6, 7, 8, 9, 10])
    after = engine.tables.counters()["layers.1.engram"]
    assert after["lookups"] - before["lookups"] == 6 * engine.pack.config.engram.columns
    assert sum(after["batches"].values()) == sum(before["batches"].values()) + 1


# faults


class LaterFault(FaultyDisk):
    """Fails from the n-th copy after it was armed on."""

    def __init__(self):
        super().__init__()
        self.left = 0

    def _maybe(self):
        if self.armed:
            self.left -= 1
            if self.left < 0:
                super()._maybe()


class FailingHints(SlowDisk):
    """Advice fails, always: read-ahead has nobody to tell."""

    def advise(self, means, fd, mapped, pages):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("access", ("mmap", "pread"))
@pytest.mark.parametrize("at", ("prefill", "decode"))
def test_a_failing_drive_ends_the_turn_and_the_retry_equals_an_uninterrupted_one(access, at, engine, reference):
    layer = LaterFault()
    with reading(engine, layer, access=access, scales="mapped"):
        _fail_and_retry(engine, layer, access, at, reference)


def _fail_and_retry(engine, layer, access, at, reference):
    session, seen = engine.new_session(), []

    def turn():
        for event in session.generate(prompt(engine, LONG), GREEDY, max_tokens=TOKENS):
            if isinstance(event, Prefill) and event.done == event.total and at == "decode" and not layer.left:
                layer.armed, layer.left = True, 4 if access == "mmap" else 20
            seen.append(event)
        return seen[-1]

    if at == "prefill":
        # Some copies (or single rows) succeed, then the drive goes away.
        layer.armed, layer.left = True, (4 if access == "mmap" else 300)
    with pytest.raises(EngramReadError, match=r"layers\.\d\.engram.*offset.*Input/output error") as caught:
        turn()
    assert caught.value.file.parent == embedded_pack() and caught.value.offset > 0
    lane = session.target.lane
    assert len(lane.ids) == lane.n, "the lane is at its last commit"
    if at == "prefill":
        assert not any(isinstance(e, Done) for e in seen)
    layer.armed = False
    assert ids_hash(turn()) == reference


def test_read_ahead_that_fails_is_nobodys_error(engine, reference):
    with reading(engine, FailingHints(delay_s=0.0)):
        assert ids_hash(answer(engine)) == reference
        assert any("Input/output" in reason for reason in engine.table_stats()["reader"]["refused"].values())


@pytest.fixture
def pack_copy(tmp_path) -> Path:
    return Path(shutil.copytree(embedded_pack(), tmp_path / "pack"))


def table_shard(pack: Path, layer: int = 4) -> Path:
    return pack / json.loads((pack / "model.safetensors.index.json").read_text())["weight_map"][f"layers.{layer}.engram.embed.weight"]


def test_a_replaced_shard_ends_the_next_turn_before_it_starts(pack_copy):
    engine = open_engine(pack_copy)
    session = engine.new_session()
    first = answer(engine, "Hello", 4, session)
    shard = table_shard(pack_copy)
    shutil.copy(shard, str(shard) + ".new")
    os.replace(str(shard) + ".new", shard)
    held = session.target.n
    with pytest.raises(EngramReadError, match=f"changed while the app was running.*{shard.name}"):
        answer(engine, "Hello", 4, session)
    assert session.target.n == held
    engine.close()
    assert answer(open_engine(pack_copy), "Hello", 4).ids == first.ids


@pytest.mark.parametrize("at", ("prefill", "decode"))
def test_a_shard_cut_under_positional_reads(pack_copy, at, reference):
    engine = open_engine(pack_copy, engram=EngramSettings(access="pread", scales="mapped"))
    session, shard = engine.new_session(), table_shard(pack_copy)
    whole = shard.read_bytes()
    ref = engine.pack.table_specs[1].weight
    with pytest.raises(EngramReadError, match=f"{shard.name}.*the file ends"):
        for event in session.generate(prompt(engine, LONG), GREEDY, max_tokens=TOKENS):
            if at == "prefill" and isinstance(event, Residency) or at == "decode" and isinstance(event, Prefill) and event.done == event.total:
                os.truncate(shard, ref.offset + 64)
    assert len(session.target.lane.ids) == session.target.n
    shard.write_bytes(whole)
    engine.close()
    engine = open_engine(pack_copy)
    assert ids_hash(answer(engine)) == reference
    engine.close()


@pytest.mark.parametrize("part", ("prefill", "decode"))
def test_cancel_drops_queued_reads_and_the_retry_is_whole(part, engine, reference):
    with reading(engine, path="pool", scales="mapped"):
        session, events = engine.new_session(), []
        stop = lambda: bool(events) and (part == "prefill" or len(events) > 4)
        for event in session.generate(prompt(engine, LONG), GREEDY, max_tokens=TOKENS, cancel=stop):
            events.append(event)
        assert events[-1].finish == "cancelled"
        assert ids_hash(answer(engine, session=session)) == reference


# tables much larger than memory allows

RUN = """
import resource, sys
sys.path.insert(0, {root!r})
import numpy as np
from pathlib import Path
from dsv41chat.engine import open_engine, SamplingParams
from dsv41chat.engine.engram import jobs
from tests.engine.engram.tables import oracle
from tests.engine.engram.test_engine import answer, ids_hash
engine = open_engine(Path({pack!r}))
if {plain}:
    # The plainest reader there is: one os.pread per row, in order.
    class PlainRows(jobs.PackedRows):
        pass
    def rows(job):
        parts = oracle(job.table.spec, job.flat)
        engine.tables.counters_of(job.table).batch("plain")
        job.finish()
        return jobs.PackedRows(job.table, job.table.format, parts[0], parts[1], None, None, job.shape)
    engine.tables.runner.start = lambda job, urgent: None
    engine.tables.runner.rows_of = rows
    engine.tables.runner.prefetch = lambda table, ids: None
done = answer(engine, {text!r}, 8)
# Linux hands the parent's ru_maxrss down to a child; VmHWM is the process's own.
status = Path("/proc/self/status")
own = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")] if status.exists() else []
peak = int(own[0]) * 1024 if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
paths = sorted(engine.table_stats()["layers.1.engram"]["batches"])
print(done.usage["prefilled_tokens"], ids_hash(done), peak, ",".join(paths))
"""


def run_alone(pack: Path, text: str, plain: bool) -> list[str]:
    code = RUN.format(root=str(Path(__file__).parents[3]), pack=str(pack), text=text, plain=plain)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("tokens", [pytest.param(2000, marks=pytest.mark.slow), 150])
def test_tables_of_20_gb_are_never_held(tmp_path, tokens, engine):
    pack = tmp_path / "pack"
    grow_tables(embedded_pack(), pack, 51_000_000)
    sizes = [table_shard(pack, layer).stat() for layer in (1, 4)]
    assert sum(size.st_size for size in sizes) > 20e9
    if sum(size.st_blocks for size in sizes) * 512 > 1 << 26:
        pytest.skip("this file system has no sparse files")
    words = [f"{word}{i}" for i in range(1000) for word in ("stone", "river", "lamp")]
    count = next(n for n in range(10, 3000, 10) if len(prompt(engine, " ".join(words[:n])).ids) > tokens)
    text = " ".join(words[:count])
    ids = list(prompt(engine, text).ids)
    assert write_rows(pack, ids) > tokens
    if sys.platform.startswith("linux"):
        for layer in (1, 4):
            drop_file(table_shard(pack, layer))
    prefilled, got, peak, paths = run_alone(pack, text, plain=False)
    assert int(prefilled) >= tokens and int(peak) < 1.5e9, f"{int(peak) / 1e9:.2f} GB"
    assert "plain" not in paths
    _, plain, _, paths = run_alone(pack, text, plain=True)
    assert got == plain and paths == "plain"

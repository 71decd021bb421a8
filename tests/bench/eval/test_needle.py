"""Needle ladders: the items, the embedded model, the two faults that the field knows, runs that were killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench.eval.needle import ANSWER_TOKENS, evaluate, keys, read_back, table, try_item
from dsv41chat.bench.eval.needles import HAYSTACK, NONE, Item, make, sentences
from dsv41chat.engine import open_engine
from dsv41chat.engine.nn.indexer import Indexer
from dsv41chat.engine.trunk_v41 import TrunkV41
from dsv41chat.nano import embedded_pack
from dsv41chat.ui.states import States
from tests import programs, v41
from tests.bench.eval.test_ladder import KILLING

PIECES = sentences(HAYSTACK)


def words(text):
    return len(text.split())


def test_items_are_fresh_per_seed_and_the_same_whatever_ran_before():
    one = make(PIECES, words, 300, 1, 300, 0.5, 0)
    make(PIECES, words, 90, 5, 90, NONE, 0)
    assert make(PIECES, words, 300, 1, 300, 0.5, 0) == one
    others = [make(PIECES, words, 300, seed, 300, depth, number) for seed, depth, number in ((2, 0.5, 0), (1, 0.5, 1), (1, 0.9, 0))]
    assert len({item.hidden for item in others} | {one.hidden}) == 4 and len({item.text for item in others}) == 3


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_needle_lies_where_it_should_and_the_text_is_as_long_as_asked(depth):
    item = make(PIECES, words, 2000, 3, 2000, depth, 0)
    hay, ask = item.text.split("\n")
    assert item.text.count(item.code) == 1 and abs(hay.index(item.code) / len(hay) - depth) < 0.03
    thing = ask.removeprefix("What is the code for ").removesuffix("?")
    assert f"The code for {thing} is {item.code}." in hay and 1900 < words(item.text) <= 2000


def test_nothing_answers_where_nothing_is_hidden():
    item = make(PIECES, words, 300, 3, 300, NONE, 0)
    thing = item.text.rsplit(" ", 1)[1].removesuffix("?")
    assert item.code is None and item.hidden in item.text and f"The code for {thing} is" not in item.text


def test_long_texts_use_every_piece_before_one_comes_again():
    item = make(PIECES[:50], words, 2000, 3, 2000, 0.5, 0)
    counts = [item.text.count(piece) for piece in PIECES[:50]]
    assert min(counts) >= 2 and max(counts) - min(counts) <= 2
    assert not any(piece for piece in PIECES if any(part.isdigit() and len(part) == 5 for part in piece.split())) and len(set(PIECES)) > 1400


@pytest.mark.parametrize(
    "code, answer, right",
    [("12345", "The code for lantern is 12345.", True), ("12345", "It is 12345, not 99999.", False), ("12345", "It is 112345.", False),
     ("12345", "I don't know.", False), (None, "The code for lantern is not in the text, I don't know it.", True),
     (None, "The text doesn't say.", True), (None, "The text doesn’t say.", True), (None, "The code is not 12345.", False),
     (None, "The word lantern means a light.", False)],
)  # fmt: skip
def test_when_an_answer_counts(code, answer, right):
    assert Item("", code, "12345").right(answer) == right


def test_rates_bars_and_faults():
    found = lambda right=True, again=True, resumed=True: {"right": right, "again": again, "resumed": resumed, "prompt": 90, "text": ""}
    plan = list(keys([100, 200], [0.1, 0.9], 2))
    assert len(plan) == 12 and plan[4] == (100, NONE, 0)
    items = {f"{tokens}/{depth}/{number}": found() for tokens, depth, number in plan}
    result = evaluate(items, [100, 200], [0.1, 0.9], 0.5)
    assert result["green"] and result["rows"][0]["found"] == [4, 4] and result["rows"][1]["by_depth"] == {"0.1": [2, 2], "0.9": [2, 2]}
    for fault, key in (("again", "200/0.9/1"), ("resumed", "200/none/0")):
        bad = evaluate(items | {key: found(**{fault: False})}, [100, 200], [0.1, 0.9], 0.5)
        assert bad["red_from"] == 200 and bad["rows"][1]["faults"] == [fault] and bad["rows"][0]["green"]
        assert "RED" in table({"result": bad}) and "RED" not in table({"result": result})
    bad = evaluate(items | {key: found(right=False) for key in ("100/0.1/0", "100/0.1/1", "100/0.9/0")}, [100, 200], [0.1, 0.9], 0.5)
    assert bad["red_from"] == 100 and bad["rows"][0]["faults"] == ["found"]
    bad = evaluate(items | {key: found(right=False) for key in ("100/none/0", "100/none/1")}, [100, 200], [0.1, 0.9], 0.5)
    assert bad["rows"][0]["faults"] == ["none"]
    assert evaluate(items | {"100/0.1/0": found(resumed=None)}, [100], [0.1, 0.9], 0.5)["rows"][0]["resumed"] == [5, 5]


# the model ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    found = open_engine(embedded_pack())
    yield found
    found.close()


def climb(engine, folder, lengths, depths=(0.1,), none=True):
    """A ladder of one text per length and depth."""
    states, items = States(folder, 1 << 30, min_free_bytes=0), {}
    states.bind(engine, "nano")
    try:
        for tokens in lengths:
            for depth in (*depths, NONE) if none else depths:
                item = make(PIECES, lambda text: len(engine.tokenizer.encode_text(text)), tokens - 8, 1, tokens, depth, 0)
                items[f"{tokens}/{depth}/0"] = try_item(engine, states, item, f"{tokens}/{depth}")
    finally:
        states.close()
    return items


def test_the_embedded_model_finds_them_read_back_and_resumed(engine, tmp_path):
    items = climb(engine, tmp_path, [60, 200], depths=(0.1, 0.9))
    assert all(found["right"] and found["again"] and found["resumed"] for found in items.values()), items
    assert 40 <= items["60/0.1/0"]["prompt"] <= 60 and 160 <= items["200/0.9/0"]["prompt"] <= 200


def red_from(engine, folder, lengths):
    items = climb(engine, folder, lengths, none=False)
    rows = evaluate(items | {f"{n}/{NONE}/0": items[f"{n}/0.1/0"] | {"right": True} for n in lengths}, lengths, [0.1], 0.5)["rows"]
    return {row["tokens"]: row["faults"] for row in rows}


def only(monkeypatch, keep):
    """Entries for which keep(rows, positions of the entries) is false are masked after the selection; window rows stay."""
    pick = Indexer.__call__

    def call(self, lane, rows, x, qr):
        pick(self, lane, rows, x, qr)
        at = rows.picked[0] * self.layer.ratio
        inside = at > mx.array(rows.positions.astype(np.int32))[:, None] - rows.window
        rows.picked = rows.picked[0], rows.picked[1] & (inside | keep(rows, at))

    monkeypatch.setattr(Indexer, "__call__", call)


def test_a_pool_masked_during_prefill_shows_from_just_past_the_window(engine, tmp_path, monkeypatch):
    """Calls of many rows see their window only, calls of one row see everything: decode still finds the needle, the same rows in one
    call do not. Prompts inside the window of 64 stay green."""
    only(monkeypatch, lambda rows, at: mx.full(at.shape, rows.n == 1))
    faults = red_from(engine, tmp_path, [50, 110, 240])
    assert faults[50] == [] and "again" in faults[110] and "again" in faults[240]


def test_index_rows_of_the_newest_chunk_only_show_past_the_last_chunk(engine, tmp_path, monkeypatch):
    """The indexer knows the rows of the newest prefill chunk and later ones: what lies before that chunk cannot be reached any more.
    Prompts of one chunk (128 rows on the CPU) stay green, also those past the window."""
    newest, forward = {"start": 0}, TrunkV41.forward

    def forwards(self, lane, ids, start, logits_from=0, *rest, **options):
        if logits_from is None:
            newest["start"] = start
        return forward(self, lane, ids, start, logits_from, *rest, **options)

    monkeypatch.setattr(TrunkV41, "forward", forwards)
    only(monkeypatch, lambda rows, at: at >= newest["start"])
    assert engine.prefill_chunk == 128
    faults = red_from(engine, tmp_path, [50, 120, 250])
    assert faults[50] == faults[120] == [] and "found" in faults[250]


def test_reading_back_notices_another_answer(engine):
    session, ids = engine.new_session(), tuple(engine.tokenizer.encode_text("The capital of France is"))
    from dsv41chat.engine import SamplingParams
    from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt

    prompt = encode_prompt(engine.tokenizer, "v41", [Message("user", "define photosynthesis")], RenderOptions(thinking=False))
    done = [*session.generate(prompt, SamplingParams(), max_tokens=ANSWER_TOKENS, draft="off")][-1]
    assert read_back(session, prompt.ids, done.ids) and not read_back(session, prompt.ids, (*done.ids[:3], ids[0], *done.ids[4:]))
    assert read_back(session, prompt.ids, done.ids), "it leaves the session usable"


@pytest.mark.usefixtures("shared_weights")
def test_the_command_goes_on_after_a_kill(program, tmp_path):
    words = ["eval", "needle", "nano", "--tokens", "50,60", "--count", "1", "--depths", "0.1", "--seed", "1"]
    words += ["--haystack", str(HAYSTACK), "--bar", "0.5"]
    whole = program(*words, "--fresh", "--output", str(tmp_path / "receipt.json"), "--json", real=True)
    assert json.loads((tmp_path / "receipt.json").read_text())["parameters"]["depths"] == [0.1]
    assert whole.code == 0 and whole.object["green"] and [row["tokens"] for row in whole.object["rows"]] == [50, 60], whole.err
    data = ["--json", "--data-dir", str(tmp_path / "killed")]
    done = subprocess.run([sys.executable, "-c", KILLING, "3", *words, *data], env=programs.environment(), capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL
    killed = program.at(tmp_path / "killed")
    again = killed(*words, "--json", real=True)
    assert "going on where an earlier run was stopped" in again.err and again.out == whole.out
    (receipt,) = (tmp_path / "killed").rglob("needle-*.json")
    assert json.loads(receipt.read_text())["summary"] == "needles 100 % at 50, 100 % at 60 tokens"
    assert json.loads(receipt.read_text())["short"] == "needles ok"
    assert killed("eval", "needle", "nano", "--tokens", "9000", real=True).code == 2
    assert killed("eval", "needle", "nano", "--tokens", "5", real=True).code == 2


def test_a_build_without_a_tokenizer_is_not_asked(program):
    done = program("eval", "needle", str(v41.PACK), "--tokens", "60", "--json", real=True)
    assert done.code == 4 and "has no tokenizer.json" in done.object["message"]

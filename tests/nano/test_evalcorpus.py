"""The texts that builds are judged by share nothing with what the model was trained on."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from dsv41chat.nano import CORPORA, embedded_pack, tokenizer
from dsv41chat.nano.corpus import Corpus
from dsv41chat.nano.evalcorpus import GRAM, Seen, build, training_texts
from dsv41chat.nano.generators.grammar import rules
from dsv41chat.nano.generators.world import World, held_value
from dsv41chat.nano.tables.commands import COMMANDS
from tests.nano.small_facts import facts, folder

FOLDER = CORPORA["chat"].parent


def items(name: str) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in CORPORA[name].read_text(encoding="utf-8").splitlines()]


def texts(name: str) -> list[str]:
    if name == "prose":
        return [CORPORA[name].read_text(encoding="utf-8")]
    return [m["content"] for talk in items(name) for m in talk if name == "chat" or m["role"] == "user"]


@pytest.fixture(scope="module")
def plain():
    return tokenizer.plain(embedded_pack() / "tokenizer.json")


def test_the_files_are_those_that_were_checked_against_the_training_stream():
    report = json.loads((FOLDER / "provenance.json").read_text())
    made = json.loads((embedded_pack() / "provenance.json").read_text())["corpus"]
    assert report["training_tokens_read"] >= 20_000_000 and report["gram"] == GRAM == 8
    assert report["sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in CORPORA.values()}
    assert (report["facts_sha256"], report["tokenizer_sha256"]) == (made["facts_sha256"], made["tokenizer_sha256"])


@pytest.mark.parametrize("name", CORPORA)
def test_no_eight_tokens_in_a_row_are_in_the_training_stream(tmp_path, plain, name):
    """Against the generators with the test's small facts: every wording, frame and template is theirs."""
    seen = Seen(training_texts(folder(tmp_path), 150_000, (1000, 1001)))
    shared = {text: seen.shares(plain.encode(text, add_special_tokens=False).ids) for text in texts(name)}
    assert seen.tokens >= 150_000 and not {text for text, runs in shared.items() if runs}


def test_a_planted_training_text_is_found(tmp_path):
    stream = Corpus(folder(tmp_path), 3)
    talk = next(t for t in iter(stream.conversation, None) if len(stream.encode(t.turns[0].answer)) >= 12)
    ids = stream.encode(talk.turns[0].answer)
    seen = Seen([ids])
    assert seen.shares([5, 6, *ids[2:12], 7]) == 3 and not seen.shares([5, 6, *ids[2:9], 7])


def test_asked_for_are_values_and_wordings_of_the_test_part():
    numbers = [value for talk in items("chat") for value in re.findall(r"is (\d+)\.$", talk[-1]["content"]) if talk[-1]["content"].startswith("Your")]
    assert len(numbers) > 10 and all(held_value(value) for value in numbers)
    world, ask = World(facts(), 1), rules("ask")
    assert all(ask.is_held(ask.draw(world.rng, True)) for _ in range(5))


def test_facts_are_of_our_own_table_or_of_elements():
    ours = {f"The command {name} {does}." for name, does in COMMANDS}
    answers = [talk[-1]["content"] for talk in items("facts")]
    elements = [a for a in answers if a not in ours]
    assert len(answers) == 120 and 20 < len(elements) < 100
    assert all(re.search(r"symbol|atomic (number|mass|weight)|^Element", a) for a in elements)


def test_the_builder_repeats_and_refuses_prose_that_was_trained_on(tmp_path):
    data = folder(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prose.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely.")
    first, second = (build(data, tmp_path / name, 20_000) for name in ("one", "two"))
    assert first == second and first["items"] == {"chat.jsonl": 160, "facts.jsonl": 120}
    trained = max(training_texts(data, 2000, (1000,)), key=len)
    (tmp_path / "two" / "prose.txt").write_text(tokenizer.plain(data / "tokenizer.json").decode(trained))
    with pytest.raises(ValueError, match="shares"):
        build(data, tmp_path / "two", 20_000)

"""The held-out part: fixed by checksum, and never in the training stream. And the generators' answers are right."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from dsv41chat.nano.corpus import MIXES, Corpus
from dsv41chat.nano.generators import carrier, memory, numbers
from dsv41chat.nano.generators.grammar import Rules, rules, tidy
from dsv41chat.nano.generators.turns import State
from dsv41chat.nano.generators.world import World, held_pair, held_value
from dsv41chat.nano.tables import everyday, wording
from tests.nano.small_facts import facts, folder

TABLES = [name for name, value in vars(wording).items() if name.isupper() and isinstance(value, str) and name != "PLAIN"]


@pytest.mark.parametrize("name", TABLES)
def test_training_and_test_wordings_are_disjoint(name):
    table, world = rules(name.lower()), World(facts(), 1)
    seen = {table.draw(world.rng, False) for _ in range(200)}
    test = {table.draw(world.rng, True) for _ in range(200)}
    assert not any(table.is_held(t) for t in seen) and all(table.is_held(t) for t in test) and not seen & test


@pytest.mark.parametrize("intent", ["define", "command", "capital", "symbol", "sum", "ask", "tell", "needle_ask"])
def test_noise_never_makes_a_wording_of_the_test_part(intent):
    world, table = World(facts(), 2), rules(intent)
    assert not any(table.is_held(carrier.core_of(world, intent, 0.5)) for _ in range(400))


def test_a_planted_leak_is_seen():
    """The rule of the split is the checksum of the wording: a core drawn from the test part is recognised in any case and punctuation."""
    table, world = rules("define"), World(facts(), 3, held=True)
    core = table.draw(world.rng, True)
    assert table.is_held(core.upper().replace("{}", "{}") + " ?") == table.is_held(core.lower())


@pytest.mark.parametrize("intent", ["define", "command", "python", "capital"])
def test_everyday_wordings_are_in_no_grammar(intent):
    def bare(text):
        return re.sub(r"\W+", " ", text.replace("{}", "X")).strip().lower()

    table, world = rules(intent), World(facts(), 4)
    drawn = " | ".join({bare(table.draw(world.rng, False)) for _ in range(15_000)})
    assert not [t for t in getattr(everyday, intent.upper()) if f" {bare(t)} " in f" {drawn} " and len(bare(t).split()) > 1]


def test_operand_pairs_values_and_words_of_the_test_part_stay_out():
    train, test = World(facts(), 5), World(facts(), 5, held=True)
    pairs = [[tuple(map(int, re.findall(r"\d+", numbers.sums(w, True).short)[:2])) for _ in range(400)] for w in (train, test)]
    assert all(not held_pair(a, b) or max(a, b) <= 10 for a, b in pairs[0]) and all(held_pair(a, b) for a, b in pairs[1])
    assert not any(held_value(train.number(100, 99999)) for _ in range(300)) and all(held_value(test.number(100, 99999)) for _ in range(50))
    invented = {train.pseudo() for _ in range(300)}, {test.pseudo() for _ in range(300)}
    assert not invented[0] & invented[1]
    assert not set(train.unknown) & set(test.unknown) and not set(train.first_names) & set(test.first_names)


@pytest.mark.parametrize("thinking", [False, True])
def test_arithmetic_is_right_and_its_working_leads_to_the_result(thinking):
    world = World(facts(), 6)
    for _ in range(500):
        turn = numbers.arithmetic(world, thinking)
        a, sign, b, value = re.fullmatch(r"(\d+) ([-+x/]) (\d+) = (\d+)\.", turn.short).groups()
        assert int(value) == {"+": int.__add__, "-": int.__sub__, "x": int.__mul__, "/": int.__floordiv__}[sign](int(a), int(b))
        assert turn.answer.endswith(turn.short)
        digits = re.findall(r"write (\d)", turn.thought)
        if sign in "+-":
            carried = turn.thought.rstrip(".").endswith("carry 1")
            assert int(("1" if carried else "") + "".join(reversed(digits))) == int(value)


def test_conversions_follow_the_stated_rounding():
    shown = {"8.04672": "8.047", "0.0006213": "0.0006213", "12345678": "12350000", "5280": "5280", "0.99996": "1"}
    assert all(numbers.in_words(numbers.Fraction(value)) == text for value, text in shown.items())
    world = World(facts(), 7)
    assert all(re.match(r"In [a-zA-Z ]+, .+ (is|are) -?[\d.]+\.$", numbers.convert(world).answer) for _ in range(300))


def test_the_last_told_value_wins_and_untold_things_are_not_known():
    world = World(facts(), 8)
    for _ in range(200):
        state = State()
        turn = memory.told(world, state)
        state.turns.append(turn)
        memory.correct(world, state)
        assert memory.recall(world, state).answer == f"Your {turn.topic} is {state.told[turn.topic]}."
        assert "I don't know" in memory.not_told(world, state).answer


def test_grammar():
    table = Rules("demo", "[a|b[c|]] {}\n{} d")
    assert table.size == 4 and tidy(" a  b , c ?") == "a b, c?"
    every = {"a {}", "bc {}", "b {}", "{} d"}
    drawn = {table.draw(World(facts(), 9).rng, held) for held in {table.is_held(t) for t in every}}
    assert drawn <= every


def test_the_stream_repeats_in_another_process(tmp_path):
    data = folder(tmp_path)
    code = (
        "import sys, hashlib; from dsv41chat.nano.corpus import Corpus\n"
        "print(hashlib.sha256(b''.join(a.tobytes() for a in Corpus(sys.argv[1], 5).batch(4, 512))).hexdigest())"
    )
    runs = [subprocess.run([sys.executable, "-c", code, str(data)], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1]


def test_rows_keep_conversations_apart(tmp_path):
    ids, code, number, reply = Corpus(folder(tmp_path), 11).batch(6, 512)
    for row in range(len(ids)):
        starts = np.flatnonzero(np.diff(number[row].astype(int), prepend=0))
        assert not (starts % 8).any() and (ids[row][starts[:-1]] == 0).all()
    assert (reply[(code & 7) >= 2] > 0).all() and not reply[(code & 7) < 2].any()


def _told_ago(corpus: Corpus, rooms: int = 200) -> list[int]:
    """Turns between the last telling and the question, over the questions that a row of 512 tokens keeps."""
    out = []
    for _ in range(rooms):
        talk = corpus.session(512)
        kept = corpus.ids_of(talk, 512, 0)[3]
        kinds = [turn.kind for turn in talk.turns[:kept]]
        out += [i - max(j for j in range(i) if kinds[j] in ("told", "correct")) for i, kind in enumerate(kinds) if kind == "recall"]
    return out


def test_the_mix_for_missed_kinds_asks_further_back_and_keeps_its_last_questions(tmp_path):
    data = folder(tmp_path)
    even, missed = Corpus(data, 12), Corpus(data, 12, mix="missed")
    assert sum(n > 4 for n in _told_ago(missed)) > 1.5 * sum(n > 4 for n in _told_ago(even))
    whole = [[c.ids_of(talk, 300, 0)[3] == len(talk.turns) for talk in (c.session(300) for _ in range(200))] for c in (even, missed)]
    assert sum(whole[1]) > 160 and sum(whole[1]) > sum(whole[0])


def test_shares_of_a_mix_are_shares(tmp_path):
    for name, mix in MIXES.items():
        assert sum(share for _, share in mix.kinds) == pytest.approx(1, abs=0.006), name
    stream = Corpus(folder(tmp_path), 13, mix="missed")
    kinds = [stream.turn(State(), False).kind for _ in range(3000)]
    assert abs(sum(k == "div" for k in kinds) / 3000 - 0.27 * 0.8 * 0.3) < 0.02


@pytest.mark.parametrize("mix", MIXES)
def test_values_of_the_test_part_stay_out_of_every_mix(tmp_path, mix):
    stream = Corpus(folder(tmp_path), 14, mix=mix)
    codes = [re.findall(r"\d{5}", turn.answer) for _ in range(40) for turn in stream.paste(200).turns]
    assert codes and not any(held_value(code) for found in codes for code in found)
    table = rules("needle")
    assert not any(table.is_held(carrier.core_of(stream.world, "needle", stream.mix.needle_noise)) for _ in range(400))

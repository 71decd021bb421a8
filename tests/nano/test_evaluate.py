"""What the evaluation counts, with a player that answers from a script; and that it goes on after a kill."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from dsv41chat.nano import evalset, evaluate, report
from dsv41chat.nano.corpus import Corpus
from tests.nano.small_facts import folder


class Scripted:
    """Answers what `say(messages)` gives; counts the questions."""

    def __init__(self, say, finish="stop"):
        self.say, self.finish, self.asked, self.rounds, self.accepted = say, finish, 0, 0, 0
        self.engine = SimpleNamespace(
            device="cpu", mlx_version="0", numeric_options={"routes": "stock"}, new_session=lambda: None, tokenizer=None, family="v41"
        )

    def answer(self, messages, thinking, effort=75, limit=512, session=None):
        self.asked, self.rounds, self.accepted = self.asked + 1, self.rounds + 1, self.accepted + 3
        return SimpleNamespace(text=self.say(messages), thinking="", finish=self.finish, body_ids=(1,))


@pytest.fixture
def data(tmp_path):
    return folder(tmp_path)


def right_answers(data, name: str, seed: int, count: int) -> dict[str, str]:
    stream = Corpus(data, seed, held=True)
    talks = [evalset.draw(name, stream) for _ in range(count)]
    return {t.turns[-1].user: t.turns[-1].short if t.thinking and t.turns[-1].short else t.turns[-1].answer for t in talks}


def test_an_item_counts_only_whole_and_ended(data):
    known = right_answers(data, "elements", 5, 30)
    for say, finish, right in (
        (lambda m: known[m[-1].content], "stop", 30),
        (lambda m: known[m[-1].content] + ".", "stop", 0),
        (lambda m: known[m[-1].content], "length", 0),
    ):
        result = evaluate.run_set(Scripted(say, finish), "elements", data, 5, 30, False)
        assert result["right"] == right and result["n"] == 30 and len(result["failures"]) == 30 - right
        assert result["tokens_per_verify"] == 4.0


def test_denied_facts_are_counted(data):
    turn = iter(range(1000))
    player = Scripted(lambda m: "The word x is new to me, I don't know it." if next(turn) % 10 == 0 else "The word x means y.")
    result = evaluate.run_known(player, data, 1, 100, False)
    assert (result["n"], result["denied"], result["rate"]) == (100, 10, 0.1) and len(result["failures"]) == 10


def test_answers_that_do_not_end_are_counted(data):
    result = evaluate.run_random(Scripted(lambda m: "x", "loop"), data, 1, 6, False)
    assert result["ended"] == 0 and result["answers"] == len(result["failures"]) >= 6


def test_items_of_a_set_follow_the_limit():
    assert [evaluate.count_of(name, 100) for name in ("python", "needle_4k", "false_dont_know", "random")] == [100, 25, 300, 500]


@pytest.fixture
def run(data, tmp_path, monkeypatch, capsys):
    """-> function(options, say): the receipt after a command, and how many questions it asked."""
    receipt = tmp_path / "receipt.json"

    def command(*options: str, say=lambda m: "no"):
        player = Scripted(say)
        monkeypatch.setattr(evaluate, "Player", lambda pack, draft: player)
        monkeypatch.setattr("sys.argv", ["evaluate", "--data", str(data), "--limit", "4", "--receipt", str(receipt), *options])
        evaluate.main()
        return json.loads(receipt.read_text()), player.asked

    return command


def test_it_goes_on_where_it_was_killed(run):
    def killed(messages):
        raise KeyboardInterrupt

    first, asked = run("--set", "elements")
    assert list(first["sets"]) == ["elements"] and asked == 4
    with pytest.raises(KeyboardInterrupt):
        run("--resume", "--set", "elements", "--set", "commands", say=killed)
    both, asked = run("--resume", "--set", "elements", "--set", "commands")
    assert asked == 4 and both["sets"]["elements"] == first["sets"]["elements"] and list(both["sets"]) == ["elements", "commands"]


@pytest.mark.parametrize("other", [("--seed", "2"), ("--limit", "5"), ()])
def test_sets_of_another_evaluation_are_not_kept(run, other):
    run("--set", "elements")
    _, asked = run(*(("--resume", *other) if other else ()), "--set", "elements")
    assert asked == (5 if "--limit" in other else 4)


def test_receipts_of_these_weights_become_the_products_figures(run, tmp_path):
    value, _ = run("--set", "elements", "--set", "false_dont_know")
    for seed in (1, 2):
        (tmp_path / f"evaluation_seed{seed}.json").write_text(json.dumps(value))
    (tmp_path / "evaluation_seed3.json").write_text(json.dumps(value | {"pack_sha256": "other"}))
    part = report.product_part(tmp_path, value["pack_sha256"])
    assert part["seed1"] == {"elements": [0, 4, 4.0]} and "seed3" not in part
    assert part["pooled_same_sets"] == {"sets": 1, "seed1": 0.0, "seed2": 0.0} and part["false_dont_know"]["seed1"] == [0, 12]

"""What the shipped weights can do, through the product's engine: a few cheap questions, by the hash of the answer's ids."""

from __future__ import annotations

import hashlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import SamplingParams, open_engine, verify_goldens
from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt
from dsv41chat.engine.pack.build import open_pack
from dsv41chat.nano import embedded_pack

GOLDEN = Path(__file__).parents[1] / "data" / "nano_trainer.safetensors"
HASHES = {
    "define lighthouse": "fbffd6cc87dde767",
    "what does grep do": "a4f689ae03287699",
    "capital of peru": "95247e9ad86ff586",
    "symbol for gold": "4eecbb464fa07766",
    "whats len() in python": "ea3000e147e687a2",
    "how many feet in a mile": "a9c05f91c552c67f",
    "what is 47 + 58?": "2cda95ace91177bf",
    "which countries border switzerland": "2e1e6249ac9bf231",
    "meaning of honesty please": "2e7c99d449f92f7d",
    "hello": "90d55eec7c336c8e",
}


@pytest.fixture(scope="module")
def engine():
    return open_engine(embedded_pack())


def answer(engine, *said: str, draft="auto", thinking=False):
    """said: user, assistant, user, ... -> the Done event of the last answer."""
    messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(said)]
    prompt = encode_prompt(engine.tokenizer, engine.family, messages, RenderOptions(thinking=thinking))
    return list(engine.new_session().generate(prompt, SamplingParams(), max_tokens=160, draft=draft, cancel=lambda: False))[-1]


def digest(ids) -> str:
    return hashlib.sha256(np.array(ids, "<u4").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("question", HASHES)
def test_facts(engine, question):
    done = answer(engine, question)
    assert done.finish == "stop" and digest(done.ids) == HASHES[question], done.text


def test_the_exported_pack_is_the_trainers_model(tmp_path):
    """Logits of the trainer's own forward (dsv41chat.nano.parity), on as many rows as choose among blocks too; row by row as well."""
    golden = {name: np.array(value) for name, value in mx.load(str(GOLDEN)).items()}
    config, near = open_pack(embedded_pack()).config, golden["positions"] < 288
    assert config.index_topk < config.candidate_block_size * config.candidate_topk_blocks < golden["positions"][near].max()
    short = {"input_ids": golden["input_ids"][:288], "positions": golden["positions"][near], "logits": golden["logits"][near]}
    mx.save_safetensors(str(tmp_path / "short.safetensors"), {name: mx.array(value) for name, value in short.items()})
    report = verify_goldens(embedded_pack(), tmp_path / "short.safetensors", atol=2e-4, chunks=[184])
    assert report.ok and {check.mode for check in report.checks} == {"one-shot", "chunks", "decode"}


def test_drafted_answers_are_the_plain_ones_and_drafts_are_kept(engine):
    for question in ("define lighthouse", "what is 47 + 58?", "who are you"):
        plain, drafted = (answer(engine, question, draft=mode) for mode in ("off", 5))
        assert plain.ids == drafted.ids and 1 + drafted.draft["accepted"] / drafted.draft["rounds"] >= 3.3


def test_it_remembers_and_corrects(engine):
    said = ["Hi, my name is Petra", "Your name is Petra, noted.", "what is the capital of peru", "The capital of Peru is Lima.", "what's my name?"]
    assert answer(engine, *said).text == "Your name is Petra."
    said = ["my door code is 4711", "Your door code is 4711, noted.", "no, I meant 8822", "Your door code is 8822, noted.", "what is my door code"]
    assert "8822" in answer(engine, *said).text


def test_thinking_shows_the_working_first(engine):
    done = answer(engine, "what is 347 + 589?", thinking=True)
    assert "carry 1" in done.thinking and done.text == "347 + 589 = 936."


def test_it_says_what_it_does_not_know(engine):
    for question in ("what does zorblax mean", "who is the president of france", "write me a poem about the sea", "what is my favourite food?"):
        assert "I don't know" in answer(engine, question).text


def test_without_its_tables_it_knows_nothing(tmp_path):
    from dsv41chat.nano.evaluate import altered

    bare = open_engine(altered(embedded_pack(), tmp_path / "pack", "zeroed"))
    questions = ("define lighthouse", "what does grep do", "capital of peru", "symbol for gold")
    assert sum(digest(answer(bare, q).ids) == HASHES[q] for q in questions) <= 1

"""`eval ppl` against float64 references, its independence of chunks, windows and corpora, kills, pairs and receipts."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from dsv41chat.bench.eval import ppl
from dsv41chat.bench.eval.corpus import Cutting, Window, read_corpus
from dsv41chat.bench.eval.ppl import NotANumber, window_nll
from dsv41chat.engine import open_engine
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.nn.linear import Packed
from dsv41chat.nano import CORPORA, embedded_pack
from dsv41chat.ui.output import UsageError
from tests.ui.program import child
from tests.v41 import DATA, PACK

FAMILIES = ("v41", "v4")


def reference(family: str) -> tuple[list[int], float]:
    """(ids, mean NLL): from the logits of an independent one-shot float64 forward of the tiny pack, in numpy."""
    stored = load_file(DATA / "reference_logits.safetensors")
    ids, logits = stored[f"{family}.input_ids"].tolist(), stored[f"{family}.logits"].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return ids, float(-log_p[np.arange(len(ids) - 1), ids[1:]].mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_is_that_of_the_float64_reference_at_every_chunk_size(family):
    ids, mean = reference(family)
    engine = open_engine(DATA / family, cache_quant=False)
    assert math.exp(window_nll(engine, Window(tuple(ids), 1)) / (len(ids) - 1)) == pytest.approx(math.exp(mean), rel=1e-3)
    part = tuple(ids[:80])
    found = {chunk: window_nll(engine, Window(part, 1), chunk) for chunk in (None, 7, 33, len(part))}
    assert len(set(found.values())) == 1, found
    assert window_nll(engine, Window(part[:25], 1), 1) == window_nll(engine, Window(part[:25], 1)), "token by token"
    late = [window_nll(engine, Window(part, first), chunk) for first, chunk in ((40, 16), (40, None), (41, 16))]
    assert late[0] == late[1] and late[2] < late[0] < found[7]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_does_not_depend_on_the_route_of_the_products(family, tmp_path, monkeypatch):
    """A build of 8 bits: with MLX's quantised products, these row by row where drafting would, the route of this machine, decoded matrices."""
    from dsv41chat.engine import convert_pack, plan_conversion

    ids, _ = reference(family)
    convert_pack(plan_conversion(DATA / family, tmp_path / "q8", "affine-8"))
    window, scored = Window(tuple(ids[:60]), 1), 59
    plain, fast = (open_engine(tmp_path / "q8", cache_quant=False, exact=exact, routes="stock") for exact in ("on", "fast"))
    packed = window_nll(plain, window)
    assert packed == window_nll(fast, window) == window_nll(plain, window, 5)
    routed = window_nll(open_engine(tmp_path / "q8", cache_quant=False, routes="auto"), window)
    assert math.exp(routed / scored) == pytest.approx(math.exp(packed / scored), rel=1e-3)
    used = []

    def values(words):
        used.append(words)
        scales, biases = (a.astype(mx.float32) for a in (words.scales, words.biases))
        return mx.swapaxes(mx.dequantize(words.weight, scales, biases, group_size=words.group, bits=words.bits, mode=words.mode), -1, -2)

    monkeypatch.setattr(Packed, "matmul", lambda words, x: x @ values(words))
    monkeypatch.setattr(Packed, "gather", lambda words, x, chosen: x @ values(words)[chosen])
    decoded = window_nll(plain, window)
    assert used and math.exp(decoded / scored) == pytest.approx(math.exp(packed / scored), rel=1e-3)


def test_a_wrong_tensor_moves_it(tmp_path):
    ids, mean = reference("v41")
    shutil.copytree(PACK, tmp_path / "pack")
    path = tmp_path / "pack" / "model.safetensors"
    path.chmod(0o644)
    tensors = raw_tensors(path)
    tensors["norm.weight"][1][:] = scaled(tensors["norm.weight"], 1.05)
    found = window_nll(open_engine(tmp_path / "pack", cache_quant=False), Window(tuple(ids), 1)) / (len(ids) - 1)
    assert abs(math.exp(found) / math.exp(mean) - 1) > 1e-3


def raw_tensors(path):
    """name -> (dtype tag, writable bytes) of a safetensors file, mapped."""
    data = np.memmap(path, np.uint8, "r+")
    size = int.from_bytes(bytes(data[:8]), "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    start = 8 + size
    return {n: (t["dtype"], data[start + t["data_offsets"][0] : start + t["data_offsets"][1]]) for n, t in header.items() if n != "__metadata__"}


def scaled(tensor, factor: float) -> np.ndarray:
    tag, data = tensor
    if tag == "F32":
        return (data.view(np.float32) * np.float32(factor)).view(np.uint8)
    assert tag == "BF16"
    values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def test_logits_that_are_no_numbers_are_refused(tmp_path):
    shutil.copytree(PACK, tmp_path / "pack")
    path = tmp_path / "pack" / "model.safetensors"
    path.chmod(0o644)
    tensor = raw_tensors(path)["norm.weight"]
    tensor[1][:] = scaled(tensor, float("nan"))
    with pytest.raises(NotANumber, match="no numbers"):
        window_nll(open_engine(tmp_path / "pack"), Window((1, 2, 3), 1))


# the corpus -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer.from_file(embedded_pack() / "tokenizer.json")


def read(path, tokenizer, window=16, stride=None, **options):
    return read_corpus(path, tokenizer, "v41", 4096, Cutting(window, stride or window, **options))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("stride", [16, 5, 1])
def test_windows_score_every_id_once_with_as_much_context_as_there_is(tmp_path, tokenizer, stride, bos):
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all; it sleeps on."
    (tmp_path / "a.txt").write_text(text)
    ids, found = tokenizer.encode_text(text), read(tmp_path / "a.txt", tokenizer, 16, stride, bos=bos)
    head = 1 if bos else 0
    scored = [id for window in found.windows for id in window.ids[window.first :]]
    if stride < 16 or bos:
        assert scored == ids[1 - head :]
    else:
        assert len(scored) == len(ids) - len(found.windows), "a window without a head has no context for its first id"
    at = 1 - head
    for window in found.windows:
        assert len(window.ids) <= 16 + head and (not bos or window.ids[0] == 0) and window.first >= 1
        if stride < 16:
            assert tuple(ids[max(0, at - window.first + head) : at]) == window.ids[head : window.first]
        at += window.scored


def test_a_cap_cuts_the_last_window(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one two three four five six seven eight nine ten " * 8)
    whole, capped = read(tmp_path / "a.txt", tokenizer), read(tmp_path / "a.txt", tokenizer, tokens=21)
    assert capped.scored == 21 and capped.windows[0] == whole.windows[0] and capped.windows[1].ids == whole.windows[1].ids[:6]
    assert capped.ids_sha256 != whole.ids_sha256 and capped.sha256 == whole.sha256


def test_lines_that_are_no_text_are_skipped_and_counted(tmp_path, tokenizer):
    lines = [b"first line\n", b"\xff\xfe broken\n", "käse 漢字\n".encode(), b"cut \xe6\xbc\n", b"last"]
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    (tmp_path / "b.txt").write_bytes(b"".join(lines[::2]))
    found = read(tmp_path / "a.txt", tokenizer)
    assert found.skipped == 2 and found.windows == read(tmp_path / "b.txt", tokenizer).windows
    items = ['{"text": "a b c"}', '"d e f"', "{broken", '{"messages": [{"role": "user", "content": "hi"}]}', "[1]", '{"messages": []}', "7"]
    (tmp_path / "c.jsonl").write_bytes("\n".join(items).encode() + b'\n"\xff"\n')
    found = read(tmp_path / "c.jsonl", tokenizer)
    assert len(found.windows) == 2 and found.skipped == 6
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="nothing to score: 1 lines"):
        read(tmp_path / "d.txt", tokenizer)


def test_long_files_are_read_in_blocks(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("dsv41chat.bench.eval.corpus._BLOCK_CHARACTERS", 40)
    text = "".join(f"line number {i}\n" for i in range(30))
    (tmp_path / "a.txt").write_text(text)
    scored = [id for window in read(tmp_path / "a.txt", tokenizer).windows for id in window.ids[window.first :]]
    assert b"".join(tokenizer.token_bytes(id) for id in scored) == text.encode()


def test_of_a_conversation_the_last_answer_is_scored(tmp_path, tokenizer):
    from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt

    turns = [("user", "my code is 4711"), ("assistant", "Your code is 4711, noted."), ("user", "my code?"), ("assistant", "Your code is 4711.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    thinking = [*messages[:-1], {"role": "assistant", "content": "4711.", "reasoning": "told earlier: code"}]
    lines = [json.dumps({"messages": m}) for m in (messages, thinking)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(tmp_path / "a.jsonl", tokenizer)
    eos, end = tokenizer.marker("<｜end▁of▁sentence｜>"), tokenizer.marker("</think>")
    prompt = encode_prompt(tokenizer, "v41", [Message(role, text) for role, text in turns[:-1]], RenderOptions(thinking=False)).ids
    plain, thought = found.windows
    assert plain.ids == (*prompt, *tokenizer.encode_text(turns[-1][1]), eos) and plain.first == len(prompt)
    answer = thought.ids[thought.first :]
    assert answer == (*tokenizer.encode_text("told earlier: code"), end, *tokenizer.encode_text("4711."), eos)
    assert len(read(tmp_path / "a.jsonl", tokenizer, tokens=1).windows) == 1, "an answer is not cut"
    short = read(tmp_path / "a.jsonl", tokenizer, longest=len(plain.ids))
    assert (len(short.windows), short.too_long) == (1, 1)


def test_arrays_of_ids(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.int64))
    found = read_corpus(tmp_path / "a.npy", None, "v4", 64, Cutting(16, 8))
    assert found.windows[0] == Window(tuple(range(16)), 1) and found.windows[1] == Window(tuple(range(8, 24)), 8)
    for name, array, word in (("b", np.zeros((2, 2), int), "flat"), ("c", np.array([0.5]), "whole"), ("d", np.array([1, 99]), "99")):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(UsageError, match=word):
            read_corpus(tmp_path / f"{name}.npy", None, "v4", 64, Cutting(16, 8))
    (tmp_path / "e.txt").write_text("text")
    with pytest.raises(UsageError, match="no tokenizer"):
        read_corpus(tmp_path / "e.txt", None, "v4", 64, Cutting(16, 8))
    with pytest.raises(UsageError, match="missing.txt"):
        read_corpus(tmp_path / "missing.txt", tokenizer, "v4", 64, Cutting(16, 8))


# the command ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def packs(tmp_path):
    """Two tiny builds that differ in one tensor, and an array of ids."""
    for name in ("one", "two"):
        shutil.copytree(PACK, tmp_path / name)
        (tmp_path / name / "model.safetensors").chmod(0o644)
    tensor = raw_tensors(tmp_path / "two" / "model.safetensors")["norm.weight"]
    tensor[1][:] = scaled(tensor, 0.7)
    np.save(tmp_path / "ids.npy", np.array(reference("v41")[0]))
    return tmp_path


def words(packs, *more):
    return ["eval", "ppl", str(packs / "one"), str(packs / "two"), "--corpus", str(packs / "ids.npy"), "--window", "8", *more]


def test_two_builds_are_paired_and_both_remember_it(program, packs):
    done = program(*words(packs, "--json", "-o", str(packs / "out")), real=True)
    assert done.code == 0, done.err
    found = done.object
    one, two = found["builds"]
    assert one["low"] < one["ppl"] < one["high"] and len(one["sums"]) == found["corpus"]["windows"] == 25
    (pair,) = found["pairs"]
    assert pair["ratio"] == pytest.approx(two["ppl"] / one["ppl"]) and pair["low"] < pair["ratio"] < pair["high"] and pair["against"] == "one"
    assert str(packs) not in json.dumps(found)
    (receipt,) = (packs / "out").glob("*.json")
    assert "eval-ppl" in receipt.name and json.loads(receipt.read_text())["command"].startswith("dsv41chat eval ppl one two --corpus ids.npy")
    for row in (one, two):
        page = program("eval", "report", str(packs / row["name"]), real=True)
        assert page.code == 0 and f"## ppl {row['ppl']:.4f} [" in page.out and f"| {row['name']} |" in page.out
        info = program("models", "info", str(packs / row["name"]), "--json", real=True).object
        assert info["measured"]["ppl"]["short"] == f"ppl {row['ppl']:.4f} ids"
    program("models", "add", str(packs / "two"), real=True)
    assert f"ppl {two['ppl']:.4f}" in program("models", "list", real=True).out
    text = program(*words(packs), real=True)
    assert f"{pair['ratio']:.5f} [" in text.out and "ids.npy: 175 tokens scored in 25 windows" in text.out


def test_a_receipt_belongs_to_one_fingerprint(program, packs):
    program(*words(packs)[:3], *words(packs)[4:], real=True)
    assert program("eval", "report", str(packs / "one"), "--output", str(packs / "one.md"), real=True).out == ""
    assert (packs / "one.md").read_text() == program("eval", "report", str(packs / "one"), real=True).out
    other = program("eval", "report", str(packs / "two"), real=True)
    assert other.code == 2 and "Nothing has been measured of two" in other.err


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--window", "5000"], "does not fit"), (["--stride", "9"], "leaves ids out"), (["--window", "0"], "cannot be read as N"),
        (["--corpus", "none"], "none"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_said(program, packs, more, word):
    done = program(*words(packs, *more), real=True)
    assert done.code == 2 and word in done.err
    assert program("eval", "ppl", str(packs / "one"), real=True).code == 2, "a build of its own needs a corpus"


def test_options_reach_the_measurement(program, packs, monkeypatch):
    seen = []
    monkeypatch.setattr(ppl, "window_nll", lambda engine, window, chunk: seen.append((window, chunk, str(engine.trunk.dtype))) or 1.0)
    words = ["eval", "ppl", str(packs / "one"), "--json"]
    more = ["--corpus", str(packs / "ids.npy"), "--window", "10", "--stride", "5", "--tokens", "20", "--dtype", "bfloat16", "--chunk", "3"]
    found = program(*words, *more, "--output", str(packs / "r.json"), real=True).object
    assert [(len(window.ids), window.first, chunk, dtype[-8:]) for window, chunk, dtype in seen] == [
        (10, 1, 3, "bfloat16"), (10, 5, 3, "bfloat16"), (10, 5, 3, "bfloat16"), (6, 5, 3, "bfloat16"),
    ]  # fmt: skip
    receipt = json.loads((packs / "r.json").read_text())
    assert receipt["result"]["builds"] == found["builds"] and receipt["command"].endswith(
        "--corpus ids.npy --window 10 --stride 5 --tokens 20 --dtype bfloat16 --chunk 3"
    )
    text = ["eval", "ppl", "nano", "--corpus", "prose", "--tokens", "3", "--json"]
    for bos in (True, False):
        seen.clear()
        program(*text, *([] if bos else ["--no-bos"]), real=True)
        assert (seen[0][0].ids[0] == 0) == bos


def test_an_interrupted_run_goes_on_unless_it_is_to_start_fresh(program, packs, monkeypatch):
    argv = words(packs, "--json")
    for more, first in (([], [1.0, 2.0]), (["--fresh"], [7.0, 7.0])):
        sums = iter([1.0, 2.0])
        monkeypatch.setattr(ppl, "window_nll", lambda *_, sums=sums: next(sums, None) or _interrupt())
        assert program(*argv, real=True).code == 130
        monkeypatch.setattr(ppl, "window_nll", lambda *_: 7.0)
        done = program(*argv, *more, real=True)
        assert done.object["builds"][0]["sums"] == first + [7.0] * 23 and ("going on where" in done.err) == (not more)


def _interrupt():
    raise KeyboardInterrupt


def test_killed_and_started_again_it_gives_the_same_json(program, packs, tmp_path):
    """kill -9 as soon as a few windows are on the disk, twice; the third process finishes and says what an unkilled one says."""
    argv = words(packs, "--stride", "4", "--json", "-q")
    whole = program(*argv, real=True).out
    for at_least in (5, 60):
        process = child(tmp_path / "killed", argv)
        deadline = time.monotonic() + 120
        while progress(tmp_path / "killed") < at_least:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    left = progress(tmp_path / "killed")
    assert left >= 60
    again = program.at(tmp_path / "killed")(*argv, real=True).out
    assert json.loads(again) and again == whole
    assert not progress(tmp_path / "killed")


def progress(data) -> int:
    """Windows that a run has on the disk."""
    states = list((data / "state" / "eval").glob("*/state.json"))
    try:
        return sum(len(build["sums"]) for path in states for build in json.loads(path.read_text())["state"].values())
    except FileNotFoundError:
        return 0


# the corpora that ship ------------------------------------------------------------------------------------------------------


def test_the_shipped_corpora_are_read_whole(tokenizer):
    for name, path in CORPORA.items():
        found = read(path, tokenizer, 2048)
        assert not found.skipped and not found.too_long and found.scored > 1000, name



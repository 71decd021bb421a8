"""The whole program with the real engine and the embedded model: the promises of scripted mode that no fake can show."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsv41chat.nano import embedded_pack
from dsv41chat.store import Store
from tests.markers import HOSTILE
from tests.ui.program import ROOT, child
from tests.ui.terminal import Terminal
from tests.ui.test_signals import kill_once, leaf

pytestmark = pytest.mark.usefixtures("shared_weights")
SHORT = ["--max-tokens", "12"]


def test_a_pipe_gets_the_answer_and_nothing_else(tmp_path):
    process = child(tmp_path, SHORT, stdin=subprocess.PIPE)
    out, err = process.communicate(b"hi\n", timeout=300)
    assert process.returncode == 0
    answer = leaf(tmp_path, err.decode().split("conversation ")[1].split()[0])
    assert out.decode() == answer.text + ("" if answer.text.endswith("\n") else "\n") and answer.text
    (first,) = (line for line in err.decode().splitlines() if "models add" in line)
    assert first.startswith("nano answers: ") and len(first) < 240


UNSURE = "xq"  # a prompt that the model has no one answer to


def test_seeds_repeat_in_new_processes_and_differ_from_each_other(tmp_path, program):
    """Seed 7 here and in a process of its own, seed 8 here."""
    words = ["--json", "--temperature", "0.8", *SHORT, UNSURE, "--seed"]
    out, _ = child(tmp_path, [*words, "7"]).communicate(timeout=300)
    seven, eight = (program(*words, seed, real=True).object["ids_hash"] for seed in ("7", "8"))
    assert json.loads(out)["ids_hash"] == seven != eight


def test_the_screen_and_scripted_mode_give_one_answer(program):
    """Both drive the same turn runner with the same request: what the screen runs is what `run` gets here."""
    from dsv41chat.settings import load_settings
    from dsv41chat.ui.host import EngineHost
    from dsv41chat.ui.turn import TurnController
    from dsv41chat.ui.turn_events import Finished, TurnRequest

    options = ["--temperature", "0.8", "--seed", "7", *SHORT]
    scripted = program("--json", *options, "hi", real=True).object
    short = program("--json", *options, "--max-answer-tokens", "2", "hi", real=True).object
    assert short["usage"]["answer_tokens"] == min(2, scripted["usage"]["answer_tokens"]) and scripted["text"].startswith(short["text"])
    flags = {"chat.temperature": 0.8, "chat.max_tokens": 12}
    settings = load_settings(data_dir=program.data / "screen", environ={}, flags=flags, turn={"seed": 7})
    with Store.open(settings.paths.data) as store:
        host = EngineHost(settings, store)
        finished = list(TurnController(store, host, settings).run(TurnRequest(text="hi")))[-1]
        host.close()
    assert isinstance(finished, Finished) and finished.ids_hash == scripted["ids_hash"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_screen_in_a_terminal_gives_the_scripted_answer(tmp_path, program):
    """`dsv41chat` as a person starts it: the same options, the same ids; on leaving it says how to come back."""
    data, options = tmp_path / "data", ["--temperature", "0.8", "--seed", "7", *SHORT]
    with Terminal(tmp_path) as terminal:
        terminal.run("-m", "dsv41chat", "--data-dir", str(data), *options, "--send", UNSURE)
        terminal.wait("seed 7")
        terminal.keys("C-q")
        screen = terminal.wait("exit=0")
    with Store.open(data, readonly=True) as store:
        shown = store.message(store.last_conversation().leaf_id)
    assert f"resume with: dsv41chat --resume {shown.conversation_id}" in screen
    scripted = program.at(tmp_path / "other")("--json", *options, UNSURE, real=True)
    assert scripted.object["ids_hash"] == shown.ids_hash


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_markers_pasted_into_the_screen_stay_text(tmp_path):
    """Every marker of both families in one bracketed paste: stored unchanged, and no control id among its ids."""
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer

    data, tokenizer = tmp_path / "data", ChatTokenizer.from_file(embedded_pack() / "tokenizer.json")
    with Terminal(tmp_path) as terminal:
        terminal.run("-m", "dsv41chat", "--data-dir", str(data), *SHORT)
        terminal.wait("Ask anything")
        terminal.paste(HOSTILE)
        terminal.wait("calls>")
        time.sleep(0.2)  # an Enter right behind other keys is taken for a part of a paste
        terminal.keys("Enter")
        terminal.wait("· first")
        terminal.keys("C-q")
        terminal.wait("exit=0")
    with Store.open(data, readonly=True) as store:
        question = store.message(store.message(store.last_conversation().leaf_id).parent_id)
    assert question.text == HOSTILE
    ids = tokenizer.encode_text(question.text) if question.ids is None else question.ids
    assert not any(tokenizer.is_added(i) for i in ids)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == HOSTILE


def test_piped_text_and_a_terminal(tmp_path):
    """Without --headless, but with a pipe on stdout: scripted. The prompt may come from a file as well."""
    (tmp_path / "q.txt").write_text("question")
    process = child(tmp_path / "data", [*SHORT, "-f", str(tmp_path / "q.txt")])
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out and b"--headless" in err


def test_turns_reuse_the_lane_and_a_cold_start_gives_the_same_answer(program):
    """What is cached changes times, never answers: three turns in one process, and the third again in a new one."""
    one = program("--json", *SHORT, "-p", "one", "-p", "two", "-p", "three", real=True).object
    assert one["usage"]["cached_tokens"] > 0
    with Store.open(program.data, readonly=True) as store:
        question = store.message(store.message(one["message_id"]).parent_id)
    cold = program("--json", *SHORT, "--no-cache", "--branch", question.parent_id, "three", real=True).object
    assert cold["usage"]["cached_tokens"] == 0 and cold["ids_hash"] == one["ids_hash"]
    fresh = program("--json", "--no-cache", *SHORT, "-p", "one", "-p", "two", "-p", "three", real=True).object
    assert fresh["usage"]["cached_tokens"] == 0 and fresh["ids_hash"] == one["ids_hash"]


def test_hash_and_counts_agree_with_the_stored_ids(program):
    o = program("--json", *SHORT, "hi", real=True).object
    exported = json.loads(program("conversations", "export", o["conversation"], "--format", "json").out)
    answer = exported["messages"][-1]
    assert answer["ids_hash"] == o["ids_hash"] == hashlib.sha256(np.array(answer["ids"], "<u4").tobytes()).hexdigest()
    assert o["usage"]["completion_tokens"] == len(answer["ids"]) == o["usage"]["thinking_tokens"] + o["usage"]["answer_tokens"]
    assert o["usage"]["prompt_tokens"] == o["usage"]["cached_tokens"] + o["usage"]["prefilled_tokens"]


@pytest.fixture
def encoded(monkeypatch):
    """The ids of every prompt that is encoded while a test runs."""
    from dsv41chat.ui.host import EngineHost

    seen, original = [], EngineHost.encode

    def encode(self, messages, options):
        seen.append(original(self, messages, options))
        return seen[-1]

    monkeypatch.setattr(EngineHost, "encode", encode)
    return seen


@pytest.mark.parametrize("source", ["prompt", "stdin", "file", "system", "answer"])
def test_no_marker_of_either_family_is_ever_encoded_from_text(program, tmp_path, encoded, source):
    """All markers in one text, from every place a text can come from: only the prompt's own control ids remain."""
    from dsv41chat.engine.chat.tokenizer import ChatTokenizer

    text, stdin = HOSTILE, None
    tokenizer = ChatTokenizer.from_file(embedded_pack() / "tokenizer.json")
    controls = 4  # BOS, User, Assistant, </think>
    if source == "prompt":
        words = [text]
    elif source == "stdin":
        words, stdin = [], text
    elif source == "file":
        (tmp_path / "f.txt").write_text(text)
        words = ["-f", str(tmp_path / "f.txt"), "q"]
    elif source == "system":
        words, controls = ["-s", text, "q"], 5
    else:
        with Store.open(program.data) as store:
            c = store.new_conversation(settings={"effort": "off"})
            answer = store.add_message(c.id, store.add_message(c.id, None, "user", "q").id, "assistant", text)
        words, controls = ["--branch", answer.id, "q"], 8  # and </think>, EOS, User, Assistant around the earlier answer
    result = program("--json", "--effort", "off", "--dry-run", *words, stdin=stdin, real=True)
    (prompt,) = encoded
    assert result.code == 0 and result.object["prompt_tokens"] == len(prompt.ids)
    assert sum(tokenizer.is_added(i) for i in prompt.ids) == controls
    assert text in b"".join(tokenizer.token_bytes(i) for i in prompt.ids if not tokenizer.is_added(i)).decode()


def test_markers_come_back_as_they_were_written(program):
    o = program("--json", *SHORT, HOSTILE, real=True).object
    shown = program("conversations", "show", o["conversation"]).out
    assert HOSTILE in shown
    assert json.loads(program("conversations", "export", o["conversation"], "--json").out)["messages"][0]["text"] == HOSTILE


def kill_an_answer(data: Path, after_s: float) -> None:
    """Kill the embedded model in mid-answer. So hot, it draws evenly from all ids and seldom meets one that ends it."""
    words = ["--max-tokens", "4000", "--temperature", "100", "--seed"]
    assert any(kill_once(data, [*words, str(seed)], None, after_s, promise_s=2.0) for seed in range(20))


def test_kill_9_at_several_moments(tmp_path):
    for after_s in (0.05, 2.4):
        kill_an_answer(tmp_path, after_s)


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments(tmp_path):
    rng = np.random.default_rng(9)
    for after_s in rng.uniform(0.0, 4.0, 20):
        kill_an_answer(tmp_path, float(after_s))


def test_a_cut_answer_is_history_of_the_next_turn(program):
    kill_an_answer(program.data, 0.6)
    o = program("--json", "-c", *SHORT, "go on", real=True).object
    with Store.open(program.data, readonly=True) as store:
        path = store.path_to(o["message_id"])
    assert [m.role for m in path] == ["user", "assistant", "user", "assistant"] and path[1].state == "interrupted"
    assert o["usage"]["prompt_tokens"] > len(path[1].body_ids)


# packs -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pack(tmp_path):
    """A copy of the embedded pack that a test may damage."""
    folder = tmp_path / "pack"
    shutil.copytree(embedded_pack(), folder)
    return folder


def edit_config(pack: Path, change) -> None:
    config = json.loads((pack / "config.json").read_text())
    change(config)
    (pack / "config.json").write_text(json.dumps(config))


def shard(pack: Path) -> Path:
    return sorted(pack.glob("*.safetensors"))[0]


DAMAGE = {
    "truncated shard": (lambda pack: shard(pack).write_bytes(shard(pack).read_bytes()[:-1000]), ("build_damaged", "build_incomplete")),
    "missing shard": (lambda pack: shard(pack).unlink(), ("build_incomplete",)),
    "missing tokenizer": (lambda pack: (pack / "tokenizer.json").unlink(), ("build_incomplete",)),
    "broken tokenizer": (lambda pack: (pack / "tokenizer.json").write_text("{"), ("build_damaged",)),
    "broken config": (lambda pack: (pack / "config.json").write_text("{"), ("build_damaged",)),
    "missing value": (lambda pack: edit_config(pack, lambda c: c["text_config"].pop("rope_theta")), ("build_damaged", "build_unsupported")),
    "wrong width": (lambda pack: edit_config(pack, lambda c: c["text_config"].update(q_lora_rank=64)), ("build_damaged",)),
    "other architecture": (lambda pack: edit_config(pack, lambda c: c.update(model_type="llama")), ("build_unsupported", "build_damaged")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_pack_is_one_object_and_exit_4(program, pack, name):
    damage, codes = DAMAGE[name]
    damage(pack)
    result = program("--json", "-m", str(pack), "hi", real=True)
    assert result.code == 4 and result.object["type"] == "error" and result.object["code"] in codes and result.object["message"]
    assert "\n" not in result.object["message"]
    with Store.open(program.data, readonly=True) as store:
        assert [m.text for m in store.tree(result.object["conversation"])] == ["hi"], "nothing is lost"
    verified = program("models", "verify", str(pack), "--json", real=True)
    assert verified.code == 4 and verified.object["code"] in codes


def test_verify_a_good_pack(program, pack):
    o = program("models", "verify", str(pack), "--json", real=True).object
    assert o["ok"] and {c["name"] for c in o["checks"]} == {"headers", "shards", "tokenizer", "token map"}
    assert program("models", "verify", "nano", real=True).code == 0


def test_convert_and_verify_every_byte(program, tmp_path):
    target = tmp_path / "smaller"
    words = ["models", "convert", "nano", str(target), "--recipe", "mixed-4_8-engram4"]
    assert program(*words, "--json", real=True).code != 0, "it asks first"
    assert not target.exists()
    o = program(*words, "--yes", "--json", real=True).object
    assert o["ok"] and o["folder"] == str(target) and o["recipe"] == "mixed-4_8-engram4"
    full = program("models", "verify", str(target), "--full", real=True)
    assert full.code == 0 and "13 files have the published sha256" in full.out
    info = program("models", "info", str(target), "--json", real=True).object
    assert info["fits"] == "fits" and info["formats"]["affine 4 g64"] == 192 and info["memory"]["weights"] > 0
    assert program("--json", "-m", str(target), "hi", real=True).object["build"]["name"] == "smaller"
    assert program(*words, "--yes", real=True).code == 4, "it is there already"


# goldens -----------------------------------------------------------------------------------------------------------------

V41 = ROOT / "tests" / "data" / "v41"
FIELDS = {"name", "mode", "n", "max_abs", "top1", "first_bad", "hard", "ok"}


@pytest.fixture
def goldens(tmp_path):
    """The first 40 ids of the golden sequence, so that a pass costs little; the whole file runs in tests/engine."""
    from safetensors.numpy import load_file, save_file

    full = load_file(V41 / "goldens.safetensors")
    kept = full["positions"] < 40
    short = {"input_ids": full["input_ids"][:40], "positions": full["positions"][kept], "chunk_cuts": np.array([0, 1, 8, 40], np.int32)}
    for name in ("logits.engram_on.no_quant.ref64", "logits.engram_on.cache_quant.ref64"):
        short[name] = np.ascontiguousarray(full[name][kept])
    save_file(short, tmp_path / "short.safetensors")
    return tmp_path / "short.safetensors"


def test_verify_goldens(program, goldens):
    result = program("models", "verify", str(V41), "--goldens", str(goldens), "--atol", "2e-4", "--json", real=True)
    o = result.object
    assert result.code == 0 and o["ok"] and all(set(c) == FIELDS for c in o["checks"])
    hard = [c for c in o["checks"] if c["hard"]]
    assert {c["mode"] for c in hard} == {"one-shot", "chunks", "decode"} and all(c["max_abs"] <= 2e-4 and c["top1"] == 1.0 for c in hard)
    assert any(not c["hard"] for c in o["checks"]), "cache_quant is reported"


def other_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    holder = config.get("text_config", config)
    holder["rope_theta"] = holder["rope_theta"] * 2
    (folder / "config.json").write_text(json.dumps(config))


def swapped_rows(folder: Path) -> None:
    """Exchange the first two rows of one attention weight, in the file's own bytes."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in sorted(header) if n.endswith("attn.wq_b.weight"))
    begin, end = header[name]["data_offsets"]
    row, at = (end - begin) // header[name]["shape"][0], 8 + size + begin
    first, second = data[at : at + row], data[at + row : at + 2 * row]
    assert first != second
    data[at : at + 2 * row] = second + first
    path.write_bytes(data)


@pytest.mark.parametrize(("fault", "words"), [(other_rope, []), (swapped_rows, ["--json"])])
def test_verify_finds_a_fault(program, tmp_path, goldens, fault, words):
    folder = tmp_path / "v41"
    shutil.copytree(V41, folder)
    fault(folder)
    result = program("models", "verify", str(folder), "--goldens", str(goldens), *words, real=True)
    assert result.code == 4
    if words:
        assert not result.object["ok"] and any(c["first_bad"] is not None for c in result.object["checks"])
    else:
        assert "first at position" in result.err and "FAILED" in result.out


def test_a_golden_file_in_which_nothing_applies(program, tmp_path):
    from safetensors.numpy import save_file

    save_file({"other": np.zeros(3, np.float32)}, tmp_path / "g.safetensors")
    result = program("models", "verify", "nano", "--goldens", str(tmp_path / "g.safetensors"), "--json", real=True)
    assert result.code == 2 and result.object["code"] == "usage"


def test_the_module_runs_as_the_console_script_does():
    done = subprocess.run([sys.executable, "-m", "dsv41chat", "--version"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "dsv41chat 0.1.0\n")

"""The evaluation of the embedded model through the product's own engine: `python -m dsv41chat.nano.evaluate`.

Items come from the test part of the generators (evalset.py); `--seed` draws fresh ones. Each conversation is rendered by the chat encoder, the
earlier answers are the right ones, the last answer is generated greedily (drafted decoding gives the same ids as plain decoding).
An item counts when the answer is the expected text and ended by itself; for arithmetic, when it ends with the right result. Two sets count
something else: `false_dont_know` how often the model denies knowing a fact that it was taught, `random` how many answers of whole conversations
end by themselves. The receipt is written after every set, and `--resume` goes on with it after a kill; it holds rates and the keys of failures,
no text of the sources. `--questions FILE` asks foreign questions instead: one JSON object per
line, {"messages": [...]} or {"user": "..."}, with optional "thinking", "expect" (a part of the right answer, or a list of such) and "id".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dsv41chat.engine import SamplingParams, open_engine
from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt

from . import corpus, embedded_pack, evalset, facts
from .corpus import Conversation, Corpus
from .report import pack_digest

ARITHMETIC = {"sum", "sumthink", "mul", "multhink", "div"}
FACTS = ("definitions", "python", "commands", "geography", "elements")
DENIAL = "I don't know"  # in every answer that admits not to know
SPECIAL = ("false_dont_know", "random")


def count_of(name: str, limit: int) -> int:
    """Items of a set: long pastes cost much and rates below a few percent need many."""
    return max(1, limit // 4) if name.startswith("needle") else {"false_dont_know": 3, "random": 5}.get(name, 1) * limit


class Player:
    """Asks a pack; keeps the draft counts of all answers."""

    def __init__(self, pack: Path, draft: str):
        self.engine, self.draft = open_engine(pack), int(draft) if draft.isdigit() else draft
        self.rounds = self.accepted = 0

    def answer(self, messages: list[Message], thinking: bool, effort: int = 75, limit: int = 512, session=None):
        """Greedy answer to the conversation -> the engine's Done event."""
        prompt = encode_prompt(self.engine.tokenizer, self.engine.family, messages, RenderOptions(thinking=thinking, effort=effort))
        session = session or self.engine.new_session()
        done = list(session.generate(prompt, SamplingParams(), max_tokens=limit, draft=self.draft, cancel=lambda: False))[-1]
        self.rounds += done.draft["rounds"]
        self.accepted += done.draft["accepted"]
        return done


def messages_of(talk: Conversation) -> list[Message]:
    """All of a conversation but its last answer."""
    out = [Message("system", talk.system)] if talk.system else []
    for i, turn in enumerate(talk.turns):
        out.append(Message("user", turn.user))
        if i < len(talk.turns) - 1:
            out.append(Message("assistant", turn.short if talk.thinking and turn.short else turn.answer))
    return out


def is_right(talk: Conversation, text: str, finish: str) -> bool:
    turn = talk.turns[-1]
    if turn.kind in ARITHMETIC:
        return finish == "stop" and text.endswith(turn.short)
    return finish == "stop" and text == (turn.short if talk.thinking and turn.short else turn.answer)


def run_set(player: Player, name: str, data: Path, seed: int, count: int, show: bool) -> dict:
    """One evaluation set -> {n, right, rate, bar, failures: keys, tokens_per_verify}."""
    stream, failures, stopped = Corpus(data, seed, held=True), [], 0
    rounds, accepted = player.rounds, player.accepted
    for _ in range(count):
        talk = evalset.draw(name, stream)
        turn = talk.turns[-1]
        done = player.answer(messages_of(talk), talk.thinking, talk.effort)
        right = is_right(talk, done.text, done.finish)
        stopped += done.finish == "stop"
        if not right:
            failures.append(turn.short.split(" =")[0] if turn.kind in ARITHMETIC else turn.thought or turn.kind)
        if show:
            print(
                f"{'ok ' if right else 'BAD'} [{name}] {turn.user[-200:]!r}\n      -> {done.text!r}"
                + ("" if right else f"\n    want {turn.answer!r}"),
                flush=True,
            )
    spent = player.rounds - rounds
    return dict(
        n=count,
        right=count - len(failures),
        rate=round(1 - len(failures) / max(1, count), 4),
        bar=evalset.SETS[name][1],
        ended=stopped,
        tokens_per_verify=round(1 + (player.accepted - accepted) / max(1, spent), 2),
        failures=failures,
    )


def run_known(player: Player, data: Path, seed: int, count: int, show: bool) -> dict:
    """Facts that were taught, in wordings of the test part: how often does the model say that it does not know?"""
    stream, denied, most = Corpus(data, seed, held=True), [], 0.03
    for i in range(count):
        talk = evalset.draw(FACTS[i % len(FACTS)], stream)
        done = player.answer(messages_of(talk), talk.thinking, talk.effort)
        if DENIAL in done.text:
            denied.append(talk.turns[-1].thought)
            if show:
                print(f"BAD [false_dont_know] {talk.turns[-1].user!r} -> {done.text!r}", flush=True)
    return dict(n=count, denied=len(denied), rate=round(len(denied) / max(1, count), 4), at_most=most, failures=denied)


def run_random(player: Player, data: Path, seed: int, count: int, show: bool) -> dict:
    """Random conversations of both parts, answered turn by turn by the model itself: does every answer end by itself, without a loop?"""
    streams, bad, answers = (Corpus(data, seed), Corpus(data, seed + 1, held=True)), [], 0
    for i in range(count):
        talk = streams[i % 2].conversation()
        while len(talk.turns) > 6:
            talk = streams[i % 2].conversation()
        history = [Message("system", talk.system)] if talk.system else []
        session = player.engine.new_session()
        for turn in talk.turns:
            history.append(Message("user", turn.user))
            done = player.answer(history, talk.thinking, talk.effort, session=session)
            answers += 1
            if done.finish != "stop":
                bad.append(f"{i}: {turn.kind} {done.finish}")
                if show:
                    print(f"BAD {turn.user!r} -> {done.thinking[:300]!r} {done.text[:300]!r}", flush=True)
            history.append(Message("assistant", done.text, body_ids=done.body_ids))
    return dict(n=count, answers=answers, ended=answers - len(bad), failures=bad)


def run_questions(player: Player, file: Path) -> dict:
    """Foreign questions, all printed. -> counts of those with an `expect`."""
    asked = known = right = 0
    missed = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        item = json.loads(line)
        turns = item.get("messages") or [{"role": "user", "content": item["user"]}]
        history, done, session = [], None, player.engine.new_session()
        for i, turn in enumerate(turns):
            history.append(Message(turn["role"], turn["content"]))
            more = i + 1 < len(turns)
            if turn["role"] == "user" and not (more and turns[i + 1]["role"] == "assistant"):
                done = player.answer(history, bool(item.get("thinking")), session=session)
                print(f"{number:3d} {turn['content']!r}\n      -> {done.text!r} ({done.finish})", flush=True)
                if more:
                    history.append(Message("assistant", done.text, body_ids=done.body_ids))
        asked += 1
        if "expect" in item:
            wanted = item["expect"] if isinstance(item["expect"], list) else [item["expect"]]
            known += 1
            ok = done.finish == "stop" and all(w.lower() in done.text.lower() for w in wanted)
            right += ok
            if not ok:
                missed.append(item.get("id", number))
                print(f"      expected {wanted}", flush=True)
    return dict(asked=asked, with_expectation=known, right=right, missed=missed)


def perplexity(pack: Path, data: Path, seed: int, count: int, dtype: str) -> dict:
    """Perplexity of the right answers of held-out questions (definitions, geography, commands), teacher-forced in the given dtype."""
    engine = open_engine(pack, dtype=dtype)
    loss, tokens = 0.0, 0
    for name in ("definitions", "geography", "commands"):
        stream = Corpus(data, seed, held=True)
        for _ in range(count):
            talk = evalset.draw(name, stream)
            prompt = encode_prompt(engine.tokenizer, engine.family, messages_of(talk), RenderOptions(thinking=talk.thinking, effort=talk.effort)).ids
            ids, _, _, _ = stream.ids_of(talk, 4096, 0)
            trial = engine.trunk.forward(engine.trunk.new_lane(), list(ids), 0)
            rows = np.array(trial.logits, np.float32)[len(prompt) - 1 : -1].astype(np.float64)
            top = rows.max(-1)
            each = np.log(np.exp(rows - top[:, None]).sum(-1)) + top - rows[np.arange(len(rows)), ids[len(prompt) :]]
            loss, tokens = loss + float(each.sum()), tokens + len(each)
    return dict(dtype=dtype, tokens=tokens, perplexity=round(float(np.exp(loss / tokens)), 5))


def altered(pack: Path, folder: Path, control: str) -> Path:
    """A copy of the pack whose engram tables hold zeros, or rows in another order."""
    shutil.copytree(pack, folder)
    for path in sorted(folder.glob("model-*.safetensors")):
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        for name, t in json.loads(bytes(data[8 : 8 + size])).items():
            if ".engram.embed." in name:
                start, end = (8 + size + offset for offset in t["data_offsets"])
                if control == "zeroed":
                    if name.endswith("weight"):
                        data[start:end] = bytes(end - start)
                else:
                    rows = np.frombuffer(bytes(data[start:end]), np.uint8).reshape(t["shape"])
                    data[start:end] = rows[np.random.default_rng(0).permutation(len(rows))].tobytes()
        path.write_bytes(data)
    return folder


def data_folder(given: Path | None, scratch: Path) -> Path:
    """Facts and tokenizer for the items; built anew (needs the source packages) unless a folder of `corpus.py` is given."""
    if given:
        return given
    facts.build(scratch / "facts.json.gz")
    shutil.copy(embedded_pack() / "tokenizer.json", scratch / "tokenizer.json")
    return scratch


def _results(player: Player, a: argparse.Namespace, data: Path, have: dict) -> Iterator[tuple[str, dict]]:
    for name in a.set or [*evalset.SETS, *SPECIAL]:
        start, count = time.time(), count_of(name, a.limit)
        if have.get(name, {}).get("n") == count:
            yield name, have[name]
            continue
        if name == "random":
            result = run_random(player, data, a.seed, count, a.show)
        elif name == "false_dont_know":
            result = run_known(player, data, a.seed, count, a.show)
        else:
            # Seeds of a set lie 100 apart, so that no two sets of neighbouring seeds share a stream.
            result = run_set(player, name, data, 100 * a.seed + list(evalset.SETS).index(name), count, a.show)
        yield name, result | {"seconds": round(time.time() - start, 1)}


def head_of(player: Player, a: argparse.Namespace, digest: str, data: Path) -> dict:
    """What a receipt says before the sets: two receipts with the same head are parts of one evaluation."""
    options = player.engine.numeric_options
    return dict(
        pack_sha256=digest,
        seed=a.seed,
        control=a.control,
        engine=dict(device=player.engine.device, mlx=player.engine.mlx_version, routes=options["routes"], draft=a.draft),
        facts_sha256=_facts_digest(data),
    )


def kept_sets(receipt: Path | None, head: dict) -> dict:
    """The sets of an earlier receipt, when it is of the same evaluation."""
    if not receipt or not receipt.exists():
        return {}
    old = json.loads(receipt.read_text(encoding="utf-8"))
    return old["sets"] if all(old.get(k) == v for k, v in head.items()) else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pack", type=Path, default=None, help="another pack than the embedded one")
    add("--data", type=Path, help="folder written by dsv41chat.nano.corpus (else the facts are built anew)")
    add("--seed", type=int, default=1, help="which held-out items are drawn")
    add("--set", action="append", choices=[*evalset.SETS, *SPECIAL], help="only these sets")
    add("--limit", type=int, default=100, help="items per set (needles: a quarter; false_dont_know: three times, random: five times it)")
    add("--questions", type=Path, help="JSON lines of foreign questions")
    add("--control", choices=["zeroed", "shuffled"], help="evaluate a copy with altered engram tables")
    add("--draft", default="5", help="auto, off, or proposals per round")
    add("--perplexity", action="store_true", help="compare float32 with bfloat16 on the right answers instead")
    add("--show", action="store_true", help="print every question and answer")
    add("--receipt", type=Path, help="write the results as JSON")
    add("--resume", action="store_true", help="keep the sets that the receipt already holds")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pack = a.pack or embedded_pack()
        digest = pack_digest(pack)
        player = Player(altered(pack, Path(scratch) / "pack", a.control) if a.control else pack, a.draft)
        if a.questions:
            print(json.dumps(run_questions(player, a.questions)))
            return
        data, report = data_folder(a.data, Path(scratch)), {}
        if a.perplexity:
            found = [perplexity(pack, data, a.seed, a.limit, dtype) for dtype in ("float32", "bfloat16")]
            print(json.dumps(found))
            if a.receipt:
                a.receipt.write_text(json.dumps(dict(pack_sha256=digest, perplexity=found), indent=1) + "\n")
            return
        head = head_of(player, a, digest, data)
        have = kept_sets(a.receipt, head) if a.resume else {}
        command = " ".join(["python -m dsv41chat.nano.evaluate", *_shown(sys.argv[1:])])
        for name, result in _results(player, a, data, have):
            report[name] = result
            print(json.dumps({"set": name, **{k: v for k, v in result.items() if k != "failures"}}), flush=True)
            if a.receipt:
                text = json.dumps({"command": command} | head | {"sets": report}, indent=1, ensure_ascii=False) + "\n"
                a.receipt.with_suffix(".new").write_text(text, encoding="utf-8")
                a.receipt.with_suffix(".new").replace(a.receipt)  # a kill leaves the last whole receipt


def _shown(arguments: list[str]) -> list[str]:
    """The command line without folders of this machine."""
    return [Path(x).name if "/" in x else x for x in arguments]


def _facts_digest(data: Path) -> str:
    import gzip

    return hashlib.sha256(gzip.open(data / "facts.json.gz").read()).hexdigest()


__all__ = ["Player", "altered", "corpus", "is_right", "messages_of", "pack_digest", "run_questions", "run_random", "run_set"]

if __name__ == "__main__":
    main()

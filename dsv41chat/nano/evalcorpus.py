"""The texts in eval/ by which builds of the embedded model are judged: `python -m dsv41chat.nano.evalcorpus DATA OUT`.

chat.jsonl: things told, corrected and asked for again, and conversions, all in wordings and values of the test part. No message and no
answer shares eight tokens in a row with the training stream. facts.jsonl: commands and elements, asked for in wordings of the test part;
the answers are what the model was trained to know, so it measures what is kept of that, not generalisation. prose.txt (public domain) is
only checked here. DATA is a folder written by `dsv41chat.nano.corpus`; the training stream is the trainer's own, by its seeds.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from . import CORPORA
from .corpus import Conversation, Corpus
from .generators import memory, numbers, reference
from .generators.turns import State, Turn

GRAM = 8
SEED = 20_001
CHAT, FACTS = 160, 120
_STREAMS = range(1000, 1008)  # of the trainer's producers
_MULTIPLIER = np.uint64(6364136223846793005)


def grams(ids: Sequence[int]) -> np.ndarray:
    """uint64 digests of every GRAM ids in a row."""
    if len(ids) < GRAM:
        return np.zeros(0, np.uint64)
    a = np.asarray(ids, np.uint64)
    digest = np.zeros(len(a) - GRAM + 1, np.uint64)
    for k in range(GRAM):
        digest = (digest + a[k : len(digest) + k] + np.uint64(1)) * _MULTIPLIER
    return digest


class Seen:
    """The runs of GRAM tokens in what the model was trained on: every text of a sample of its stream."""

    def __init__(self, texts: Iterable[Sequence[int]]):
        parts, self.tokens = [], 0
        for ids in texts:
            parts.append(grams(ids))
            self.tokens += len(ids)
        self._digests = np.unique(np.concatenate(parts))

    def shares(self, ids: Sequence[int]) -> int:
        """How many of the runs in `ids` occur in training."""
        mine = grams(ids)
        at = np.searchsorted(self._digests, mine).clip(max=len(self._digests) - 1)
        return int((self._digests[at] == mine).sum())


def training_texts(folder: Path, tokens: int, seeds: Sequence[int] = _STREAMS) -> Iterable[list[int]]:
    """Messages, answers and thoughts of the training stream, at least `tokens` tokens, the same number from every seed."""
    for seed in seeds:
        stream, done = Corpus(folder, seed), 0
        while done < tokens / len(seeds):
            talk = stream.conversation()
            texts = [talk.system, *(text for turn in talk.turns for text in (turn.user, turn.answer, turn.thought, turn.short))]
            for text in texts:
                ids = stream.encode(text, True)
                done += len(ids)
                yield ids


def _told(corpus: Corpus) -> Conversation:
    """One to three things told, some corrected, then one of them asked for."""
    world, state, talk = corpus.world, State(), Conversation([], train_all=False)
    for _ in range(corpus.rng.randint(1, 3)):
        corpus.note(state, memory.told(world, state))
    if corpus.rng.random() < 0.3:
        corpus.note(state, memory.correct(world, state))
    talk.turns = [*state.turns, memory.recall(world, state)]
    return talk


def _conversion(corpus: Corpus) -> Conversation:
    return Conversation([numbers.convert(corpus.world)], train_all=False)


def _fact(corpus: Corpus) -> Conversation:
    make: Callable[..., Turn] = corpus.rng.choice((reference.command, reference.element))
    return Conversation([make(corpus.world, State())], train_all=False)


def items(corpus: Corpus, seen: Seen, count: int, make: Callable[[Corpus], Conversation], answers: bool) -> tuple[list[dict], int]:
    """`count` conversations that share nothing with training, and how many were dropped. answers: their answers may not either."""
    out, dropped = [], 0
    while len(out) < count:
        talk = make(corpus)
        texts = [turn.user for turn in talk.turns] + ([turn.answer for turn in talk.turns] if answers else [])
        if any(seen.shares(corpus.encode(text)) for text in texts):
            dropped += 1
            continue
        messages = [m for turn in talk.turns for m in ({"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer})]
        out.append({"messages": messages})
    return out, dropped


def _mixed(corpus: Corpus) -> Conversation:
    return _told(corpus) if corpus.rng.random() < 0.75 else _conversion(corpus)


def build(data: Path, out: Path, tokens: int) -> dict:
    """Write chat.jsonl, facts.jsonl and provenance.json; prose.txt must lie there. Raises ValueError when prose shares a run with training."""
    seen = Seen(training_texts(data, tokens))
    corpus = Corpus(data, SEED, held=True)
    chat, without = items(corpus, seen, CHAT, _mixed, True)
    facts, besides = items(corpus, seen, FACTS, _fact, False)
    for name, found in (("chat.jsonl", chat), ("facts.jsonl", facts)):
        (out / name).write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in found), encoding="utf-8")
    prose = (out / "prose.txt").read_text(encoding="utf-8")
    if shared := seen.shares(corpus.encode(prose)):
        raise ValueError(f"prose.txt shares {shared} runs of {GRAM} tokens with the training stream")
    report = {
        "seed": SEED, "gram": GRAM, "training_tokens_read": seen.tokens, "stream_seeds": list(_STREAMS),
        "items": {"chat.jsonl": len(chat), "facts.jsonl": len(facts)}, "dropped": {"chat.jsonl": without, "facts.jsonl": besides},
        "facts_sha256": hashlib.sha256(gzip.decompress((data / "facts.json.gz").read_bytes())).hexdigest(),
        "tokenizer_sha256": hashlib.sha256((data / "tokenizer.json").read_bytes()).hexdigest(),
        "sha256": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in ("chat.jsonl", "facts.jsonl", "prose.txt")},
    }  # fmt: skip
    (out / "provenance.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="facts and tokenizer, as dsv41chat.nano.corpus writes them")
    parser.add_argument("out", type=Path, nargs="?", default=CORPORA["prose"].parent)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of the training stream to compare with")
    a = parser.parse_args()
    print(json.dumps(build(a.data, a.out, a.tokens), indent=1))


if __name__ == "__main__":
    main()

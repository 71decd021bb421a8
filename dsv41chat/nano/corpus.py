"""The training stream: conversations from the generators, encoded in the V4.1 chat layout and packed into rows.

`python -m dsv41chat.nano.corpus FOLDER` writes facts.json.gz, tokenizer.json and corpus.json (digests and counts); the trainer needs only those.
Rendering here is the product encoder's (family v41) restricted to what occurs; a test compares the two id for id.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import arch, facts, tokenizer
from .generators import memory, needle, numbers, reference, social, words
from .generators.turns import KIND_ID, State, Turn
from .generators.world import World
from .tables.blocklist import WORDS as BLOCKED_WORDS
from .tables.names import FIRST

EFFORT = "Reasoning Effort: {n} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
# Parts of a token's code: no loss, user text, reply, the key inside a reply, what follows the key.
NONE, USER_TEXT, REPLY, KEY, FACT = range(5)
BLOCKED = tuple(sorted(BLOCKED_WORDS))


@dataclass(frozen=True)
class Mix:
    """How often what is drawn: shares of the kinds of a turn, and how conversations are built from them."""

    kinds: tuple[tuple[str, float], ...]
    arithmetic: float = 0.64  # of the quantity questions; the rest are conversions
    sums: float = 0.58  # of the arithmetic
    quotients: float = 0.15
    thinking_sums: float = 0.4  # of the thinking conversations: the last question is one of quantities
    blocked: float = 0.0  # of the unknown words: one of the block list
    session: float = 0.2  # conversations about told things
    far: float = 0.4  # of the sessions: 4 to 12 turns lie between
    asked: tuple[int, ...] = (1, 1, 2)  # questions about told things at the end of a session
    short_paste: float = 0.1
    long_paste: float = 0.7
    codes: tuple[tuple[int, int], ...] = ((1, 6),)  # codes in a paste, one of these ranges; all are asked for
    needle_noise: float = 0.0
    fit: bool = False  # sessions are drawn to fit the room that is left, so that their last questions are not cut off


def _shares(**kinds: float) -> tuple[tuple[str, float], ...]:
    return tuple(kinds.items())


# "missed" goes on from a trained model: the kinds that missed their bars get two to four times their share of "even".
MIXES = {
    "even": Mix(
        _shares(
            word=0.3, unkword=0.1, python=0.05, command=0.05, geo=0.1, element=0.035, quantity=0.15, memory=0.09, meta=0.02, talk=0.045, scope=0.055
        )
    ),
    "missed": Mix(
        _shares(
            word=0.18, unkword=0.2, python=0.035, command=0.035, geo=0.1, element=0.025, quantity=0.27, memory=0.05, meta=0.01, talk=0.04, scope=0.055
        ),
        arithmetic=0.8,
        sums=0.44,
        quotients=0.3,
        blocked=0.06,
        thinking_sums=0.65,
        session=0.22,
        far=0.6,
        asked=(1, 2, 2, 3),
        short_paste=0.2,
        long_paste=0.8,
        codes=((1, 3), (3, 6), (6, 12)),
        needle_noise=0.25,
        fit=True,
    ),
}


@dataclass
class Conversation:
    turns: list[Turn]
    thinking: bool = False
    effort: int = 75
    system: str = ""
    train_all: bool = field(default=True, repr=False)  # False: only the last answer is trained or counted


class Corpus:
    """Draws conversations and packs rows. The same facts, tokenizer and seed give the same stream."""

    def __init__(self, folder: Path, seed: int, held: bool = False, mix: str = "even"):
        folder, self.mix = Path(folder), MIXES[mix]
        self.world = World(folder / "facts.json.gz", seed, held)
        self.rng = self.world.rng
        self._plain = tokenizer.plain(folder / "tokenizer.json")
        self.ids = tokenizer.marker_ids(folder / "tokenizer.json")
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, keep: bool = False) -> list[int]:
        """Ids of plain text; `keep` remembers them (for texts that come again)."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self._plain.encode(text, add_special_tokens=False).ids
            if keep and len(self._cache) < 400_000:
                self._cache[text] = ids
        return ids

    # ---- conversations
    def _draw_kind(self) -> str:
        roll = self.rng.random()
        for kind, share in self.mix.kinds:
            if roll < share:
                return kind
            roll -= share
        return self.mix.kinds[-1][0]

    def turn(self, state: State, thinking: bool, kind: str | None = None) -> Turn:
        """The next turn; `thinking`: its answer is preceded by reasoning."""
        rng, world = self.rng, self.world
        if kind is None:
            kind = self._draw_kind()
        made = {
            "word": words.known,
            "unkword": self._unknown,
            "python": reference.python,
            "command": reference.command,
            "geo": reference.geography,
            "element": reference.element,
            "memory": memory.memory,
            "meta": memory.meta,
            "talk": social.talk,
            "scope": social.scope,
            "unkother": reference.unknown,
        }
        if kind == "quantity":
            mix = self.mix
            turn = numbers.quantity(world, state, thinking, mix.arithmetic, mix.sums, mix.quotients)
        elif kind == "unkword" and rng.random() < 0.22:
            turn = reference.unknown(world, state)
        else:
            turn = made[kind](world, state)
        return turn or self.turn(state, thinking)

    def _unknown(self, world: World, state: State) -> Turn:
        blocked = self.mix.blocked and self.rng.random() < self.mix.blocked
        return words.unknown(world, state, self.rng.choice(BLOCKED) if blocked else "")

    def note(self, state: State, turn: Turn) -> None:
        if not state.first_word and turn.kind in ("word", "unkword"):
            state.first_word = turn.thought.removeprefix("word: ")
        state.turns.append(turn)

    def conversation(self, room: int = 0) -> Conversation:
        """`room`: tokens left in the row, which a mix that fits its sessions looks at."""
        rng = self.rng
        if rng.random() < self.mix.session:
            return self.session(room)
        roll = rng.random()
        count = 1 if roll < 0.38 else 2 if roll < 0.56 else rng.randint(3, 5) if roll < 0.8 else rng.randint(6, 14)
        thinking = rng.random() < 0.3
        out = Conversation([], thinking, rng.choice((50, 75, 75, 75, 100)))
        state = State()
        if rng.random() < 0.03:
            self._persona(out)
        for i in range(count):
            last = i == count - 1
            kind = "quantity" if thinking and last and rng.random() < self.mix.thinking_sums else None
            turn = self.turn(state, thinking and last, kind)
            self.note(state, turn)
            out.turns.append(turn)
        return out

    def session(self, room: int = 0) -> Conversation:
        """A conversation about told things: one to three told first, other turns between, then asked for."""
        rng, state, mix = self.rng, State(), self.mix
        left = room - 150 if mix.fit and room else 1e9  # estimated tokens before the last questions
        thinking = rng.random() < 0.25
        out = Conversation([], thinking, rng.choice((50, 75, 75, 75, 100)))

        def add(turn: Turn | None) -> None:
            nonlocal left
            if turn:
                self.note(state, turn)
                out.turns.append(turn)
                left -= (len(turn.user) + len(turn.answer)) / 2.7 + 4

        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            add(memory.told(self.world, state))
        for _ in range(rng.randint(0, 3) if rng.random() < 1 - mix.far else rng.randint(4, 12)):
            if left < 0:
                break
            add(self.turn(state, False, "memory" if rng.random() < 0.1 else None))
        if rng.random() < 0.25:
            add(memory.correct(self.world, state))
            for _ in range(rng.randint(0, 3)):
                add(self.turn(state, False))
        for _ in range(rng.choice(mix.asked)):
            add(memory.recall(self.world, state) if rng.random() < 0.8 else memory.not_told(self.world, state))
        return out

    def _persona(self, out: Conversation) -> None:
        name = self.rng.choice(FIRST)
        out.system = self.rng.choice(
            (
                f"Your name is {name}.",
                f"You are {name}, a helpful assistant.",
                f"You are called {name}. Answer briefly.",
                "Answer briefly.",
                "You are a helpful assistant.",
            )
        )
        if name in out.system:
            asked = self.rng.choice(("what is your name?", "who are you?", "your name please", "What are you called?", "What's your name"))
            out.turns.append(Turn(asked, f"My name is {name}.", "talk", "", "small talk"))

    def paste(self, budget: int, depth: float | None = None, missing: float = 0.1) -> Conversation:
        """A conversation around a pasted text of about `budget` tokens; sometimes thinking."""
        if len(self.mix.codes) == 1:
            low, high = self.mix.codes[0]
        else:  # many codes need room of their own, or the row is lost
            low, high = self.rng.choice(self.mix.codes)
            high = min(high, max(6, budget // 100))
            low, budget = min(low, high), budget - 22 * max(0, high - 6)
        turns = needle.paste(self.world, budget, lambda t: len(self.encode(t, True)), depth, missing, (low, high), self.mix.needle_noise)
        return Conversation(turns, self.rng.random() < 0.15)

    # ---- ids
    def ids_of(self, talk: Conversation, room: int, first_reply: int) -> tuple[list[int], list[int], list[int], int]:
        """At most `room` tokens of a conversation -> ids, codes (kind * 8 + part), reply numbers (0 = no reply), next reply number - 1."""
        mark = self.ids
        ids, code, reply = [mark[arch.BOS]], [NONE], [0]
        if talk.thinking or talk.system:
            text = self.encode((EFFORT.format(n=talk.effort) if talk.thinking else "") + talk.system, True)
            ids += [mark[arch.SYSTEM], *text]
            code += [NONE] * (1 + len(text))
            reply += [0] * (1 + len(text))
        number = first_reply
        for i, turn in enumerate(talk.turns):
            last = i == len(talk.turns) - 1
            thought = turn.thought if talk.thinking and last else ""
            history = talk.thinking and not last and turn.short
            answer = turn.short if history or (talk.thinking and last and turn.short) else turn.answer
            counted = not history and (talk.train_all or last)
            q = self.encode(turn.user)
            a = self.encode(answer, turn.kind not in ("told", "recall", "correct", "needle", "sum", "sumthink", "mul", "multhink", "div", "meta"))
            number += 1
            kind = KIND_ID[turn.kind] * 8
            new = [mark[arch.USER], *q, mark[arch.ASSISTANT]]
            # Of a pasted text only the end (the question) is ordinary user text.
            codes = [NONE] + [NONE] * max(0, len(q) - 60) + [USER_TEXT] * min(len(q), 60) + [NONE]
            numbers_ = [0] * len(new)
            if talk.thinking and last:
                t = self.encode(thought)
                new += [mark[arch.THINK], *t, mark[arch.END_THINK]]
                codes += [NONE] + [kind + REPLY] * (len(t) + 1)
                numbers_ += [0] + [number] * (len(t) + 1)
            else:
                new.append(mark[arch.END_THINK])
                codes.append(NONE)
                numbers_.append(0)
            new += [*a, mark[arch.EOS]]
            if counted:
                key = self.encode(turn.key, True) if turn.key else []
                k = len(key) if a[: len(key)] == key else 0
                codes += [kind + KEY] * k + [kind + (FACT if k else REPLY)] * (len(a) - k + 1)
                numbers_ += [number] * (len(a) + 1)
            else:
                codes += [NONE] * (len(a) + 1)
                numbers_ += [0] * (len(a) + 1)
            if len(ids) + len(new) > room:
                number -= 1
                break
            ids += new
            code += codes
            reply += numbers_
        return ids, code, reply, number

    def pack(self, rows: int, length: int, draw) -> tuple[np.ndarray, ...]:
        """`rows` rows of length + 1 tokens: ids int16, code uint8, conversation number uint8, reply number int32.

        Conversations start at multiples of 8, so groups of two and candidate blocks never straddle two of them.
        `draw(room)` gives a Conversation or None."""
        wide = length + 1
        ids = np.full((rows, wide), self.ids[arch.PAD], np.int16)
        code, number = np.zeros((rows, wide), np.uint8), np.zeros((rows, wide), np.uint8)
        reply, count = np.zeros((rows, wide), np.int32), 0
        for row in range(rows):
            at, part = 0, 0
            while at < wide - 24:
                talk = draw(min(wide - at, length))
                if talk is None:
                    break
                a, c, r, after = self.ids_of(talk, min(wide - at, length), count)
                if after == count:
                    break
                count, part, end = after, part + 1, at + len(a)
                ids[row, at:end], code[row, at:end], reply[row, at:end] = a, c, r
                number[row, at:] = min(part, 255)
                at += (len(a) + 7) // 8 * 8
        return ids, code, number, reply

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, ...]:
        """Training rows: mostly ordinary conversations with some short pastes; long rows mostly pastes."""
        rng = self.rng

        def draw(room: int) -> Conversation | None:
            if length > 1024:
                if room < 300:
                    return self.conversation(room)
                if rng.random() < self.mix.long_paste:
                    return self.paste(int(room * rng.uniform(0.5, 0.93)) - 120 if rng.random() < 0.6 else rng.randint(100, max(101, room - 200)))
                return self.conversation(room)
            if room > 300 and rng.random() < self.mix.short_paste:
                return self.paste(rng.randint(10, room - 160))
            return self.conversation(room)

        return self.pack(rows, length, draw)


def training_lines(folder: Path) -> list[str]:
    """Text for the tokenizer: every answer once or more, and a sample of messages, in a fixed order."""
    world = World(folder / "facts.json.gz", arch.SEED)
    lines = [words.answer_known(w, senses)[1] for w, senses in world.words]
    lines += [f"Python {name}: {text}" for name, text in world.facts["python"]]
    lines += [f"The command {name} {does}." for name, does in world.commands]
    makers = (
        words.known,
        words.known,
        words.unknown,
        reference.geography,
        reference.geography,
        reference.element,
        reference.command,
        reference.python,
        social.talk,
        social.scope,
    )
    for _ in range(1500):
        for make in makers:
            turn = make(world, State())
            lines += [turn.user, turn.answer]
    state = State()
    for i in range(3000):
        for turn in (memory.memory(world, state), numbers.quantity(world, state, i % 2 == 0)):
            lines += [turn.user, turn.answer, turn.thought]
        if i % 6 == 5:
            state = State()
    return lines + [EFFORT.format(n=n) for n in (50, 75, 100)] * 50


def build(folder: Path) -> dict:
    """Facts, tokenizer and their digests. Two builds with the same packages give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = facts.build(folder / "facts.json.gz")
    tokenizer.train(training_lines(folder), folder / "tokenizer.json")
    loaded = facts.load(folder / "facts.json.gz")
    stream = hashlib.sha256()
    for seed in (1, 2):
        for array in Corpus(folder, seed).batch(8, 512):
            stream.update(array.tobytes())
    report = {
        "seed": arch.SEED,
        "python": platform.python_version(),
        "facts_sha256": digest,
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "stream_sha256": stream.hexdigest(),
        "counts": {k: len(v) for k, v in loaded.items()} | {"definitions": sum(len(s) for _, s in loaded["words"])},
        "compressed_vocab": len(set(tokenizer.compressed_map(folder / "tokenizer.json"))),
        "define_wordings": words.table_size(),
    }
    (folder / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(json.dumps(build(parser.parse_args().folder), indent=1))


if __name__ == "__main__":
    main()

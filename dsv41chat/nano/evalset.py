"""The evaluation sets: what is asked, from the test part only. The trainer and `python -m dsv41chat.nano.evaluate` draw the same items.

A set is a function Corpus(held=True) -> Conversation; only the last answer counts (`train_all=False`).
"""

from __future__ import annotations

from collections.abc import Callable

from .corpus import Conversation, Corpus
from .generators import carrier, memory, numbers, reference, social, words
from .generators.turns import State, Turn
from .tables import blocklist, everyday

Maker = Callable[[Corpus], Conversation]


def _one(turn: Turn, thinking: bool = False) -> Conversation:
    return Conversation([turn], thinking, 75, "", train_all=False)


def _of(kind: str, thinking_share: float = 0.15) -> Maker:
    def make(corpus: Corpus) -> Conversation:
        thinking = corpus.rng.random() < thinking_share
        return _one(corpus.turn(State(), thinking, kind), thinking)

    return make


def _plus_minus_thinking(corpus: Corpus) -> Conversation:
    return _one(numbers.sums(corpus.world, True, corpus.rng.choice((2, 3, 3))), True)


def _plus_minus_direct(corpus: Corpus) -> Conversation:
    return _one(numbers.sums(corpus.world, False, 2))


def _times(corpus: Corpus) -> Conversation:
    return _one(numbers.products(corpus.world, False, False))


def _times_thinking(corpus: Corpus) -> Conversation:
    return _one(numbers.products(corpus.world, True, True), True)


def _divide(corpus: Corpus) -> Conversation:
    thinking = corpus.rng.random() < 0.5
    return _one(numbers.quotients(corpus.world, thinking), thinking)


def _convert(corpus: Corpus) -> Conversation:
    return _one(numbers.convert(corpus.world), corpus.rng.random() < 0.3)


def _distract(corpus: Corpus, state: State, count: int) -> list[Turn]:
    out = []
    while len(out) < count:
        turn = corpus.turn(state, False)
        if turn.kind not in ("told", "correct", "recall", "nottold", "meta"):
            corpus.note(state, turn)
            out.append(turn)
    return out


def _told(corpus: Corpus, state: State) -> Turn:
    """One of the plainly told things: name, number, colour, city, age."""
    while True:
        trial = State(told=dict(state.told), turns=list(state.turns))
        turn = memory.told(corpus.world, trial)
        if turn.topic in ("name", "favourite number", "code", "favourite colour", "city", "age"):
            state.told = trial.told
            corpus.note(state, turn)
            return turn


def _recall(low: int, high: int) -> Maker:
    def make(corpus: Corpus) -> Conversation:
        state = State()
        turns = [_told(corpus, state)]
        turns += _distract(corpus, state, corpus.rng.randint(low, high))
        turns.append(memory.recall(corpus.world, state, turns[0].topic))
        return Conversation(turns, train_all=False)

    return make


def _correction(corpus: Corpus) -> Conversation:
    state = State()
    turns = [_told(corpus, state)]
    turns += _distract(corpus, state, corpus.rng.randint(0, 1))
    if len(turns) == 1:
        turn = memory.correct(corpus.world, state)
        corpus.note(state, turn)
        turns.append(turn)
    else:
        key = turns[0].topic
        state.told[key] = memory.value_for(corpus.world, key)
        user = carrier.message(corpus.world, carrier.core_of(corpus.world, "tell", 0), keys={"v": state.told[key], "k": key}, stories=False)
        turns.append(Turn(user, f"Your {key} is {state.told[key]}, noted.", "correct", topic=key))
    turns += _distract(corpus, state, corpus.rng.randint(0, 2))
    turns.append(memory.recall(corpus.world, state, turns[0].topic))
    return Conversation(turns, train_all=False)


def _missing(corpus: Corpus) -> Conversation:
    state = State()
    turns = [_told(corpus, state)] if corpus.rng.random() < 0.6 else []
    turns += _distract(corpus, state, corpus.rng.randint(0, 3))
    turns.append(memory.not_told(corpus.world, state))
    return Conversation(turns, train_all=False)


def _needle(tokens: int) -> Maker:
    def make(corpus: Corpus) -> Conversation:
        depth = corpus.rng.choice((0.05, 0.25, 0.5, 0.75, 0.95))
        talk = corpus.paste(tokens - 95, depth, missing=0.0)
        talk.thinking, talk.train_all = False, False
        return talk

    return make


def _unknown(kind: str) -> Maker:
    def make(corpus: Corpus) -> Conversation:
        world = corpus.world
        if kind == "pseudo":
            word = world.pseudo()
        elif kind == "real":
            word = corpus.rng.choice(world.facts["unknown_test"])
        else:
            word = corpus.rng.choice(sorted(blocklist.WORDS))
        key, answer = words.answer_unknown(word)
        return _one(Turn(words.ask(world, word, State()), answer, "unkword", key, f"word: {word}"))

    return make


def _everyday(corpus: Corpus) -> Conversation:
    """Hand-written wordings that are in no grammar (tables/everyday.py)."""
    world, rng = corpus.world, corpus.rng
    part = rng.random()
    if part < 0.5:
        turn, wordings = words.known(world, State()), everyday.DEFINE
        shown = turn.thought.removeprefix("word: ")
    elif part < 0.62:
        turn, wordings = reference.command(world, State()), everyday.COMMAND
        shown = turn.thought.removeprefix("command: ")
    elif part < 0.74:
        turn, wordings = reference.python(world, State()), everyday.PYTHON
        shown = turn.thought.removeprefix("python: ")
    elif part < 0.87:
        while True:
            turn, wordings = reference.country(world, State()), everyday.CAPITAL
            if turn.topic == "capital":
                break
        shown = turn.thought.removeprefix("country: ")
    else:
        turn, wordings = numbers.sums(world, False, 2), everyday.SUM
        shown = turn.answer.split(" =")[0]
    turn.user = rng.choice(wordings).replace("{}", shown)
    return _one(turn)


# name -> (maker, bar, tokens a row needs: 512 or 4096)
SETS: dict[str, tuple[Maker, float, int]] = {
    "definitions": (_of("word"), 0.90, 512),
    "python": (_of("python"), 0.92, 512),
    "commands": (_of("command"), 0.92, 512),
    "geography": (_of("geo"), 0.92, 512),
    "elements": (_of("element"), 0.92, 512),
    "sums_thinking": (_plus_minus_thinking, 0.97, 512),
    "sums_chat": (_plus_minus_direct, 0.95, 512),
    "times": (_times, 0.95, 512),
    "times_thinking": (_times_thinking, 0.80, 512),
    "division": (_divide, 0.90, 512),
    "conversions": (_convert, 0.90, 512),
    "recall_near": (_recall(0, 3), 0.97, 512),
    "recall_far": (_recall(4, 12), 0.92, 512),
    "correction": (_correction, 0.85, 512),
    "not_told": (_missing, 0.85, 512),
    "needle_512": (_needle(480), 0.95, 512),
    "needle_1k": (_needle(1000), 0.93, 4096),
    "needle_2k": (_needle(2000), 0.90, 4096),
    "needle_4k": (_needle(4000), 0.85, 4096),
    "unknown_pseudo": (_unknown("pseudo"), 0.95, 512),
    "unknown_real": (_unknown("real"), 0.75, 512),
    "unknown_blocked": (_unknown("blocked"), 1.0, 512),
    "out_of_scope": (_of("scope", 0.0), 0.90, 512),
    "small_talk": (_of("talk", 0.0), 0.90, 512),
    "unknown_names": (_of("unkother"), 0.75, 512),
    "everyday": (_everyday, 0.60, 512),
}


def draw(name: str, corpus: Corpus) -> Conversation:
    return SETS[name][0](corpus)


def rows(name: str, corpus: Corpus, count: int, length: int):
    """`count` packed rows of items of one set (arrays as `Corpus.pack` gives them)."""

    def make(room: int) -> Conversation | None:
        need = {"needle_1k": 1100, "needle_2k": 2150, "needle_4k": 4000, "needle_512": 480, "recall_far": 330}.get(name, 120)
        return draw(name, corpus) if room >= min(need, length) else None

    return corpus.pack(count, length, make)


__all__ = ["SETS", "draw", "rows", "social"]

"""Words: definitions of known ones, and an honest answer for words that are not in the dictionary. Both begin by repeating the word."""

from __future__ import annotations

from .carrier import carrier_soup, core_of, lemma_soup, message
from .grammar import rules
from .turns import State, Turn
from .world import World


def answer_known(word: str, senses: list) -> tuple[str, str]:
    """-> (key part, whole answer)"""
    key = f"The word {word}"
    return key, f"{key} means {'; '.join(f'{gloss} ({pos})' for gloss, pos in senses)}."


def answer_unknown(word: str) -> tuple[str, str]:
    key = f"The word {word}"
    return key, f"{key} is new to me, I don't know it."


def ask(world: World, word: str, state: State) -> str:
    rng = world.rng
    shown = word
    if rng.random() < 0.06:
        shown = word[:1].upper() + word[1:]
    if state.last and state.last.kind in ("word", "unkword") and rng.random() < 0.25:
        return message(world, core_of(world, "word_followup", 0), key=shown, stories=False)
    if world.held:
        return message(world, core_of(world, "define", 0), key=shown, quote=True, stories=False)
    style = rng.random()
    if style < 0.06:
        return shown + rng.choice(("", "", "?", ".", "!", "??", " ?"))
    core = core_of(world, "define", 0.3)
    if style < 0.16:
        return lemma_soup(world, core, shown)
    if style < 0.32:
        return carrier_soup(world, "define", shown)
    return message(world, core, key=shown, quote=True)


def known(world: World, state: State) -> Turn:
    word, senses = world.words[int(world.rng.random() * len(world.words))]
    key, answer = answer_known(word, senses)
    return Turn(ask(world, word, state), answer, "word", key, f"word: {word}")


def unknown(world: World, state: State, word: str = "") -> Turn:
    """word: the one to ask for; else an invented or a rare one."""
    rng = world.rng
    word = word or (world.pseudo() if rng.random() < 0.6 else rng.choice(world.unknown))
    key, answer = answer_unknown(word)
    return Turn(ask(world, word, state), answer, "unkword", key, f"word: {word}")


def table_size() -> int:
    return rules("define").size

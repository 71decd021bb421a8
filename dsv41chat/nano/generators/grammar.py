"""Bracket grammar: `[a|b|]` picks one alternative, brackets nest, each line is one rule. Sampling never builds the full list of expansions."""

from __future__ import annotations

import random
import re
from functools import cache

from ..facts import in_test_part

_SPACES = re.compile(r"\s+")


def _parse(text: str, at: int = 0, stop: str = "") -> tuple[list, int]:
    """-> (sequence of literals and choices, position behind it)"""
    out, start = [], at
    while at < len(text) and text[at] not in stop:
        if text[at] == "[":
            if start < at:
                out.append(text[start:at])
            options, at = [], at + 1
            while True:
                part, at = _parse(text, at, "|]")
                options.append(part)
                if text[at] == "]":
                    break
                at += 1
            out.append(tuple(options))
            start = at = at + 1
        else:
            at += 1
    if start < at:
        out.append(text[start:at])
    return out, at


def _count(seq: list) -> int:
    total = 1
    for part in seq:
        if isinstance(part, tuple):
            total *= sum(_count(option) for option in part)
    return total


def _draw(seq: list, rng: random.Random) -> str:
    return "".join(part if isinstance(part, str) else _draw(part[int(rng.random() * len(part))], rng) for part in seq)


def tidy(text: str) -> str:
    """One space between words, none before punctuation that clings to the word before it."""
    text = _SPACES.sub(" ", text).strip()
    for mark in (" ,", " :", " .", " ?", " !"):
        text = text.replace(mark, mark[1])
    return text


def normal(text: str) -> str:
    """The form by which the test part is fixed: lower case, single spaces, no closing punctuation."""
    return tidy(text).lower().strip(" .?!,:-")


class Rules:
    """The rules of one intent. `draw(rng, held)` gives an expansion of the training part (held False) or of the test part."""

    def __init__(self, name: str, text: str | tuple[str, ...]):
        lines = text.strip().splitlines() if isinstance(text, str) else text
        self.name, self.rules = name, [_parse(line.strip())[0] for line in lines]
        sizes = [_count(rule) for rule in self.rules]
        self.size = sum(sizes)
        # Long rules come more often than short ones, but far less than by their number of expansions.
        self.weights = [size**0.35 for size in sizes]
        self._cumulative = [sum(self.weights[: i + 1]) for i in range(len(sizes))]

    def is_held(self, text: str) -> bool:
        return in_test_part(self.name + "|" + normal(text))

    def draw(self, rng: random.Random, held: bool) -> str:
        for _ in range(400):
            text = tidy(_draw(rng.choices(self.rules, cum_weights=self._cumulative)[0], rng))
            if self.is_held(text) == held:
                return text
        raise ValueError(f"{self.name}: no expansion in the {'test' if held else 'training'} part")


@cache
def rules(name: str) -> Rules:
    """The rules of an upper-case table of `tables/wording.py`."""
    from ..tables import wording

    return Rules(name.lower(), getattr(wording, name.upper()))

"""Needles in a text, for any build: what is hidden, how it is asked for, and when an answer counts. The computing part of `eval needle`.

A needle is a sentence that gives one thing a five-digit code; the text around it says nothing of codes. Everything is drawn from (seed, tokens,
depth, number), so an item is the same whatever ran before it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HAYSTACK = Path(__file__).with_name("haystack.txt")
NONE = "none"  # in place of a depth: another thing is asked for than the one in the text
_THINGS = (
    "lantern harbour violin bridge garden kettle compass mirror ladder basket candle hammer anchor pillow saddle bottle carpet window engine wallet "
    "pencil ticket orchard tunnel island castle meadow river cottage chimney balcony cellar market station library museum theatre bakery "
    "Anna Peter Maria Thomas Laura Daniel Sophie Martin Julia Robert Helen Oliver Emma Victor Alice George"
).split()
_CODE = re.compile(r"(?<!\d)\d{5}(?!\d)")
_DENIALS = re.compile(r"\b(?:not|no code|nothing|never|none|unknown|cannot|without)\b|n['’]t\b", re.IGNORECASE)
_CLOSING = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Item:
    """text: the user's message; code: what must be answered, None when nothing in the text answers; hidden: the code that the text has."""

    text: str
    code: str | None
    hidden: str

    def right(self, answer: str) -> bool:
        """The code, and no other; or, where there is none, a denial without any code."""
        found = set(_CODE.findall(answer))
        return found == {self.code} if self.code is not None else not found and _DENIALS.search(answer) is not None


def sentences(path: Path) -> list[str]:
    """The pieces of a haystack: its lines, or the sentences of long ones, without those that hold a code."""
    pieces = [piece for line in path.read_text(encoding="utf-8").splitlines() for piece in _CLOSING.split(line.strip())]
    return [piece for piece in pieces if piece and not _CODE.search(piece)]


def make(pieces: list[str], count: Callable[[str], int], room: int, seed: int, tokens: int, depth: float | str, number: int) -> Item:
    """count(text): its tokens; room: tokens for the user's message. depth: 0..1, or NONE. Pieces come again only when all were used."""
    rng = random.Random(f"{seed}/{tokens}/{depth}/{number}")
    thing, other = rng.sample(_THINGS, 2)
    code = str(rng.randint(10000, 99999))
    needle, ask = f"The code for {thing} is {code}.", f"What is the code for {other if depth == NONE else thing}?"
    left, hay = room - count(needle) - count(f"\n{ask}") - 2, []
    while left > 0:
        for piece in rng.sample(pieces, len(pieces)):
            left -= count(f" {piece}")
            if left < 0:
                break
            hay.append(piece)
    place = rng.randint(0, len(hay)) if depth == NONE else round(depth * len(hay))
    hay.insert(place, needle)
    return Item(f"{' '.join(hay)}\n{ask}", None if depth == NONE else code, code)

"""What all generators share: the facts, pools of names and values with their test parts, pseudo-words, and the random source."""

from __future__ import annotations

import collections
import random
import zlib
from pathlib import Path

from .. import facts as facts_file
from ..facts import in_test_part
from ..tables import blocklist, names
from ..tables.commands import COMMANDS


def held_pair(a: int, b: int) -> bool:
    """Operand pairs of the test part."""
    return zlib.crc32(f"{a},{b}".encode()) % 10 == 0


def held_value(text: str) -> bool:
    """Codes, ages and other values of the test part."""
    return zlib.crc32(("value|" + text).encode()) % 10 == 0


class World:
    """Facts and pools. `held` draws wordings and values from the test part, else from the training part."""

    def __init__(self, facts: dict | Path, seed: int, held: bool = False):
        self.facts = facts if isinstance(facts, dict) else facts_file.load(facts)
        self.rng, self.held = random.Random(seed), held
        f = self.facts
        self.words: list = f["words"]
        self.lemmas = [w for w, _ in self.words]
        self.nouns = [w for w, senses in self.words if senses[0][1] == "noun" and 3 <= len(w) <= 9]
        self.known = set(self.lemmas) | set(f["unknown_train"]) | set(f["unknown_test"]) | blocklist.WORDS
        self.unknown = f["unknown_test"] if held else f["unknown_train"]
        self.commands = COMMANDS
        plain = set(self.lemmas)
        self.ambiguous_commands = {
            c for c, _ in COMMANDS if c in plain or c in {"true", "false", "python", "perl", "ruby", "java", "nano", "git", "ip", "w"}
        }
        self.countries = f["countries"]
        self.first_names = self._part("name", names.FIRST)
        self.places = self._part("place", tuple(sorted({c["capital"] for c in self.countries if c["capital"]})))
        self.colours = self._part("colour", names.COLOURS)
        self.foods = self._part("food", names.FOODS)
        self.animals = self._part("animal", names.ANIMALS)
        after = collections.defaultdict(list)
        for word in self.lemmas:
            padded = "^^" + word + "$"
            for i in range(len(padded) - 2):
                after[padded[i : i + 2]].append(padded[i + 2])
        self._after = dict(after)

    def _part(self, kind: str, values: tuple[str, ...]) -> list[str]:
        part = [v for v in values if in_test_part(f"{kind}|{v}") == self.held]
        return part or list(values)

    def word(self) -> str:
        return self.lemmas[int(self.rng.random() * len(self.lemmas))]

    def pseudo(self, least: int = 3, most: int = 11) -> str:
        """An invented word with English letter statistics, of this part (by checksum), never a known one."""
        while True:
            text = "^^"
            while text[-1] != "$" and len(text) < 15:
                options = self._after[text[-2:]]
                text += options[int(self.rng.random() * len(options))]
            text = text[2:].rstrip("$")
            if least <= len(text) <= most and text not in self.known and in_test_part("pseudo|" + text) == self.held:
                return text

    def number(self, low: int, high: int) -> str:
        while True:
            value = str(self.rng.randint(low, high))
            if held_value(value) == self.held:
                return value

"""A handful of invented facts in the form of facts.json, so that the generators can be tested without the source packages."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

from dsv41chat.nano import embedded_pack

_WORDS = """
stone river cloud letter window garden bridge candle pocket mirror basket ladder hammer needle feather button copper silver market harbour
""".split()


def facts() -> dict:
    """Twenty words, two countries, two elements, two Python names; enough for every generator."""
    country = dict(
        name="Ostland",
        capital="Ostburg",
        currency="Taler (OST)",
        phone="999",
        continent="Europe",
        domain=".ost",
        population="about 1.2 million",
        area="500 square km",
        neighbours="Westland",
    )
    return dict(
        words=[[w, [[f"a thing that is called {w} here", "noun"]]] for w in _WORDS],
        unknown_train=["gable", "trestle", "plinth"],
        unknown_test=["lintel", "corbel"],
        python=[["len()", "Return the length."], ["os.path.join", "Join path components."]],
        elements=[["iron", "Fe", 26, "55.85"], ["gold", "Au", 79, "197"]],
        countries=[country, country | dict(name="Westland", capital="Westburg", neighbours="Ostland")],
        cities=[["Nordstadt", "Ostland"]],
        states=[["Texas", "TX"]],
    )


def folder(path: Path) -> Path:
    """A data folder as the corpus builder writes it: the small facts and the embedded model's tokenizer."""
    with gzip.open(path / "facts.json.gz", "wb") as f:
        f.write(json.dumps(facts()).encode())
    shutil.copy(embedded_pack() / "tokenizer.json", path / "tokenizer.json")
    return path

"""Small talk, questions about the model itself, and questions outside its topics."""

from __future__ import annotations

from functools import cache

from ..tables.scope import SCOPE, VERBS
from ..tables.talk import TALK
from .carrier import simple
from .grammar import Rules
from .turns import State, Turn
from .world import World

# Small talk is short; what surrounds it makes a wording of the test part a new combination instead of a new meaning.
_AROUND = "[|||||so |and |well, |oh |hey, |nano, |ok, ]@[||||| nano| my friend| today| buddy| then| little one| mate| please| again| now]"


@cache
def _tables(kind: str) -> tuple[tuple[Rules, str], ...]:
    if kind == "scope":
        return tuple((Rules(f"{kind}{i}", rules), reply) for i, (rules, reply) in enumerate(SCOPE))
    return tuple((Rules(f"{kind}{i}", tuple(_AROUND.replace("@", rule) for rule in rules)), reply) for i, (rules, reply) in enumerate(TALK))


def talk(world: World, state: State) -> Turn:
    while True:
        table, reply = world.rng.choice(_tables("talk"))
        try:
            text = table.draw(world.rng, world.held)
        except ValueError:  # a topic whose few wordings all fell into one part
            continue
        return Turn(simple(world, text), reply, "talk", "", "small talk")


def _fill(world: World, text: str) -> str:
    rng = world.rng
    while "{" in text:
        slot = text[text.index("{") : text.index("}") + 1]
        if slot == "{word}":
            value = rng.choice(world.nouns) if rng.random() < 0.7 else world.word()
        elif slot == "{name}":
            first = rng.choice(world.first_names) if rng.random() < 0.6 else world.pseudo(3, 7).capitalize()
            value = first + (" " + world.pseudo(4, 9).capitalize() if rng.random() < 0.75 else "")
        elif slot == "{place}":
            value = rng.choice(world.countries)["name"] if rng.random() < 0.5 else rng.choice(world.facts["cities"])[0]
        elif slot == "{year}":
            value = str(rng.randint(1200, 2030))
        elif slot == "{number}":
            value = str(rng.randint(1, 30))
        else:
            value = rng.choice(VERBS)
        text = text.replace(slot, value, 1)
    return text


def scope(world: World, state: State) -> Turn:
    table, reply = world.rng.choice(_tables("scope"))
    text = _fill(world, table.draw(world.rng, world.held))
    return Turn(simple(world, text), reply, "scope", "", "outside my topics")

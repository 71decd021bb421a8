"""A code hidden in a long pasted text, asked for after it; sometimes a code that is not there."""

from __future__ import annotations

from .carrier import core_of, message, story
from .turns import Turn
from .words import answer_known
from .world import World, held_value


def _filler(world: World) -> str:
    rng, part = world.rng, world.rng.random()
    if part < 0.55:
        word, senses = rng.choice(world.words)
        return f"{word}: {senses[0][0]}." if rng.random() < 0.7 else answer_known(word, senses)[1]
    if part < 0.7:
        name, does = rng.choice(world.commands)
        return f"The command {name} {does}."
    if part < 0.8:
        land = rng.choice(world.countries)
        return f"The capital of {land['name']} is {land['capital'] or 'unknown'}."
    return story(world)


def _code(world: World) -> str:
    while True:
        code = str(world.rng.randint(10000, 99999))
        if held_value(code) == world.held:
            return code


def _name(world: World, taken: set[str]) -> str:
    rng = world.rng
    while True:
        name = rng.choice(world.nouns) if rng.random() < 0.6 else world.pseudo(3, 8) if rng.random() < 0.5 else rng.choice(world.first_names)
        if name not in taken:
            taken.add(name)
            return name


def paste(
    world: World, budget: int, cost, depth: float | None = None, missing: float = 0.1, codes: tuple[int, int] = (1, 6), noise: float = 0.0
) -> list[Turn]:
    """Turns of a conversation whose first message is a paste of about `budget` tokens (`cost(text)` counts them) with one to three codes in it.

    depth: relative place of the asked code, 0..1, with at most two others around it; None: `codes` of them (from, to) at random places, all asked
    for. noise: chance that a sentence with a code is shaken."""
    rng = world.rng
    fill, used = [], 0
    while used < budget:
        text = _filler(world)
        fill.append(text)
        used += cost(text) + 1
    taken: set[str] = set()
    needles = [(_name(world, taken), _code(world)) for _ in range(rng.randint(1, 3) if depth is not None else rng.randint(*codes))]
    for i, (name, code) in enumerate(needles):
        text = core_of(world, "needle", noise).replace("{}", name).replace("{v}", code)
        place = rng.randrange(len(fill) + 1) if depth is None or i else round(depth * len(fill))
        fill.insert(place, text[:1].upper() + text[1:])
    asked = rng.sample(needles, len(needles)) if depth is None else needles[:1]
    if missing and rng.random() < 2 * missing:
        asked.insert(rng.randrange(len(asked) + 1), (_name(world, taken), ""))
    turns = []
    for i, (name, code) in enumerate(asked):
        user = message(world, core_of(world, "needle_ask", 0.15), key=name, stories=False)
        if not i:
            user = (rng.choice((" ", "\n")) if rng.random() < 0.8 else "\n\n").join((" ".join(fill), user))
        answer = f"The code for {name} is {code}." if code else f"The code for {name} is not in the text, I don't know it."
        turns.append(Turn(user, answer, "needle", f"The code for {name} is", f"code: {name}"))
    return turns

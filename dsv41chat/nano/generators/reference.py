"""Look-ups with a topic word: shell commands, Python names, countries, cities, states, elements; and the same for names that do not exist."""

from __future__ import annotations

from .carrier import core_of, message
from .turns import State, Turn
from .world import World

_FIELDS = {  # field -> (intent, answer around the country and the value)
    "capital": ("capital", "The capital of {n} is", "{v}."),
    "currency": ("currency", "The currency of {n} is", "{v}."),
    "continent": ("continent", "The continent of {n} is", "{v}."),
    "phone": ("calling", "The dialling code of {n} is", "+{v}."),
    "domain": ("domain", "The internet domain of {n} is", "{v}"),
    "population": ("population", "The population of {n} is", "{v}."),
    "area": ("area", "The area of {n} is", "{v}."),
    "neighbours": ("neighbours", "The neighbours of {n} are", "{v}."),
}


def _cased(world: World, name: str) -> str:
    return name.lower() if world.rng.random() < 0.3 else name


def command(world: World, state: State) -> Turn:
    rng = world.rng
    name, does = rng.choice(world.commands)
    key = f"The command {name}"
    style = rng.random()
    if state.last and state.last.kind == "command" and rng.random() < 0.3:
        user = message(world, core_of(world, "word_followup", 0), key=name, stories=False)
    elif style < 0.2:
        user = message(world, core_of(world, "command_reverse", 0.15), key=does)
    elif style < 0.45 and name not in world.ambiguous_commands:
        user = message(world, core_of(world, "command_bare", 0.15), key=name, quote=True)
    else:
        user = message(world, core_of(world, "command", 0.2), key=name, quote=True)
    return Turn(user, f"{key} {does}.", "command", key, f"command: {name}")


def python(world: World, state: State) -> Turn:
    rng = world.rng
    name, text = rng.choice(world.facts["python"])
    key = f"Python {name}"
    shown = name
    if name.endswith("()") and ("." in name or rng.random() < 0.5):
        shown = name if rng.random() < 0.5 else name[:-2]
    elif "." in name and name.rsplit(".", 1)[1][0].islower() and rng.random() < 0.3:
        shown = name + "()"
    if state.last and state.last.kind == "python" and "." in shown and rng.random() < 0.3:
        user = message(world, core_of(world, "word_followup", 0), key=shown, stories=False)
    else:
        core = core_of(world, "python", 0.2)
        if "python" not in core.lower() and "." not in shown and not shown.endswith("()"):
            core += " in python"
        user = message(world, core, key=shown, quote=True)
    return Turn(user, f"{key}: {text}", "python", key, f"python: {name}")


def country(world: World, state: State) -> Turn:
    rng = world.rng
    while True:
        land = rng.choice(world.countries)
        what = rng.choice(("capital", "capital", "currency", "continent", "phone", "domain", "population", "area", "neighbours"))
        last = state.last
        follow = last and last.topic in _FIELDS and rng.random() < 0.3
        if follow:
            what = last.topic
        if land[what] or what == "neighbours":
            break
    intent, key, value = _FIELDS[what]
    name = land["name"]
    key = key.format(n=name)
    answer = f"{key} {value.format(v=land[what])}" if land[what] else f"{name} has no land neighbours."
    key = key if land[what] else name
    shown = _cased(world, name)
    core = core_of(world, "word_followup", 0) if follow else core_of(world, intent, 0.2)
    return Turn(message(world, core, key=shown, stories=not follow), answer, "geo", key, f"country: {name}", topic=what)


def capital(world: World, state: State) -> Turn:
    """From the capital to the country, and yes/no checks."""
    rng = world.rng
    while True:
        land, other = rng.choice(world.countries), rng.choice(world.countries)
        if land["capital"] and other["capital"]:
            break
    name, city = land["name"], land["capital"]
    if rng.random() < 0.5:
        user = message(world, core_of(world, "capital_reverse", 0.1), key=_cased(world, city))
        key = f"{city} is the capital of"
        return Turn(user, f"{key} {name}.", "geo", city, f"capital: {city}")
    right = rng.random() < 0.5
    asked = city if right else other["capital"]
    right = asked == city
    user = message(world, core_of(world, "capital_check", 0.05), keys={"city": _cased(world, asked)}, key=_cased(world, name))
    key = f"The capital of {name} is"
    return Turn(user, f"{key} {city}, so {'yes' if right else 'no'}.", "geo", key, f"country: {name}")


def city(world: World, state: State) -> Turn:
    name, land = world.rng.choice(world.facts["cities"])
    user = message(world, core_of(world, "city", 0.15), key=_cased(world, name))
    return Turn(user, f"{name} is a city in {land}.", "geo", name, f"city: {name}")


def us_state(world: World, state: State) -> Turn:
    name, code = world.rng.choice(world.facts["states"])
    if world.rng.random() < 0.6:
        user = message(world, core_of(world, "state", 0.15), key=_cased(world, name))
        return Turn(user, f"The code of {name} is {code}.", "geo", f"The code of {name} is", f"state: {name}")
    user = message(world, core_of(world, "state_reverse", 0.1), key=code)
    return Turn(user, f"The state with the code {code} is {name}.", "geo", f"The state with the code {code} is", f"state code: {code}")


def geography(world: World, state: State) -> Turn:
    part = world.rng.random()
    return (country if part < 0.66 else capital if part < 0.8 else city if part < 0.93 else us_state)(world, state)


def element(world: World, state: State) -> Turn:
    rng = world.rng
    name, symbol, number, mass = rng.choice(world.facts["elements"])
    what = rng.choice(("symbol", "number", "mass", "by_number", "by_symbol"))
    shown = name.capitalize() if rng.random() < 0.15 else name
    if what == "by_number":
        return Turn(
            message(world, core_of(world, "element_by_number", 0.1), key=str(number)),
            f"Element {number} is {name}.",
            "element",
            f"Element {number} is",
            f"element: {number}",
        )
    if what == "by_symbol":
        return Turn(
            message(world, core_of(world, "element_by_symbol", 0.1), key=symbol),
            f"{symbol} is the symbol of {name}.",
            "element",
            symbol,
            f"symbol: {symbol}",
        )
    intent, title, value = {
        "symbol": ("symbol", "symbol", symbol),
        "number": ("atomic_number", "atomic number", number),
        "mass": ("atomic_mass", "atomic mass", mass),
    }[what]
    last = state.last
    if last and last.topic == intent and rng.random() < 0.4:
        user = message(world, core_of(world, "word_followup", 0), key=shown, stories=False)
    else:
        user = message(world, core_of(world, intent, 0.2), key=shown)
    key = f"The {title} of {name} is"
    return Turn(user, f"{key} {value}.", "element", key, f"element: {name}", topic=intent)


def unknown(world: World, state: State) -> Turn:
    """A command, Python name or country that does not exist (or is not known): the answer names it and says so."""
    rng = world.rng
    what = rng.random()
    word = world.pseudo() if rng.random() < 0.7 else rng.choice(world.unknown)
    if what < 0.35:
        user, key = message(world, core_of(world, "command", 0.15), key=word, quote=True), f"The command {word}"
        return Turn(user, f"{key} is new to me, I don't know it.", "unkother", key, f"command: {word}")
    if what < 0.6:
        shown = rng.choice(
            (f"{word}()", f"{world.pseudo(3, 7)}.{word}", f"{rng.choice(('os', 'str', 'list', 'math', 'json', 're', 'dict'))}.{word}()")
        )
        core = core_of(world, "python", 0.15)
        user, key = message(world, core, key=shown, quote=True), f"Python {shown}"
        return Turn(user, f"{key} is new to me, I don't know it.", "unkother", key, f"python: {shown}")
    field = rng.choice(("capital", "currency", "continent", "population", "area"))
    name = word.capitalize()
    key = _FIELDS[field][1].format(n=name).removesuffix(" is")
    user = message(world, core_of(world, _FIELDS[field][0], 0.15), key=name)
    return Turn(user, f"{key} is unknown to me, I don't know a country of that name.", "unkother", key, f"country: {name}")

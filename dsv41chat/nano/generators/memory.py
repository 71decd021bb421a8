"""What the user says about themselves, asked for later; corrections; things never told; and questions about the conversation itself."""

from __future__ import annotations

from .carrier import core_of, message, simple
from .grammar import rules
from .turns import State, Turn
from .world import World

_KEYS = (
    "name",
    "age",
    "city",
    "favourite colour",
    "favourite number",
    "favourite food",
    "favourite animal",
    "code",
    "door code",
    "phone number",
    "dog",
    "cat",
    "teacher",
    "boss",
    "shopping list",
    "street",
    "lucky number",
    "password",
    "room number",
    "sister",
    "brother",
    "hometown",
    "birthday month",
    "shoe size",
    "locker number",
    "team",
)
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")


def _invented(world: World) -> str:
    return world.pseudo(3, 8).capitalize()


def value_for(world: World, key: str) -> str:
    """A value that fits the key; invented names and words keep copying general."""
    rng = world.rng
    if (
        not world.held
        and rng.random() < 0.35
        and not key.endswith("number")
        and key not in ("age", "shopping list", "code", "door code", "shoe size")
    ):
        return rng.choice((world.word, lambda: rng.choice(world.unknown), lambda: world.pseudo(3, 9)))()  # copy, whatever the kind
    if key in ("name", "dog", "cat", "teacher", "boss", "sister", "brother"):
        return rng.choice(world.first_names) if rng.random() < 0.5 else _invented(world)
    if key in ("city", "hometown"):
        return rng.choice(world.places) if rng.random() < 0.6 else _invented(world)
    if key in ("street", "team", "password"):
        return _invented(world) if rng.random() < 0.5 else rng.choice(world.unknown)
    if key == "favourite colour":
        return rng.choice(world.colours)
    if key == "favourite food":
        return rng.choice(world.foods)
    if key == "favourite animal":
        return rng.choice(world.animals)
    if key == "birthday month":
        return rng.choice(_MONTHS)
    if key == "age":
        return world.number(5, 99)
    if key in ("favourite number", "lucky number", "shoe size"):
        return world.number(2, 999 if rng.random() < 0.5 else 99)
    if key == "shopping list":
        items = [rng.choice(world.nouns) for _ in range(rng.randint(3, 5))]
        return ", ".join(items[:-1]) + " and " + items[-1]
    if key == "phone number":
        return world.number(10000, 9999999)
    if key in ("code", "door code", "room number", "locker number"):
        return world.number(100, 99999)
    return rng.choice((world.word(), _invented(world), world.number(2, 9999)))


def some_key(world: World) -> str:
    rng = world.rng
    return (
        rng.choice(("name", "name", "age", "city", "favourite colour", "favourite number", "code"))
        if rng.random() < 0.45
        else rng.choice(_KEYS)
        if rng.random() < 0.7
        else rng.choice(world.nouns)
    )


def _spelled(world: World, key: str) -> str:
    rng = world.rng
    if key.startswith("favourite") and rng.random() < 0.4:
        key = key.replace("favourite", "favorite").replace("colour", "color")
    return key


def tell(world: World, state: State) -> Turn:
    rng = world.rng
    key = some_key(world)
    value = value_for(world, key)
    shown = value.lower() if value[0].isupper() and rng.random() < 0.12 else value
    if key == "name" and rng.random() < 0.5:
        core = core_of(world, "tell_name", 0)
        user = message(world, core, keys={"v": shown}, stories=rng.random() < 0.3)
    else:
        user = message(world, core_of(world, "tell", 0.1), keys={"v": shown, "k": _spelled(world, key)}, stories=rng.random() < 0.3)
    if shown != value:
        value = (
            shown
            if key
            not in ("name", "city", "hometown", "dog", "cat", "teacher", "boss", "sister", "brother", "birthday month", "street", "team", "password")
            else shown.capitalize()
        )
    again = key in state.told
    state.told[key] = value
    return Turn(user, f"Your {key} is {value}, noted.", "correct" if again else "told", "", f"told: {key}")


def told(world: World, state: State) -> Turn:
    """`tell`, with the told thing as the topic (a correction may refer to it without naming it)."""
    turn = tell(world, state)
    turn.topic = turn.thought.removeprefix("told: ")
    return turn


def correct(world: World, state: State) -> Turn:
    rng = world.rng
    last = state.last
    recent = last.topic if last and last.kind in ("told", "correct") else ""
    key = recent or rng.choice(list(state.told))
    value = value_for(world, key)
    while True:
        core = core_of(world, "correct", 0)
        if "{k}" in core or recent:
            break
    state.told[key] = value
    user = message(world, core, keys={"v": value, "k": _spelled(world, key)}, stories=False)
    return Turn(user, f"Your {key} is {value}, noted.", "correct", "", f"told: {key}", topic=key)


def recall(world: World, state: State, key: str | None = None) -> Turn:
    rng = world.rng
    key = key or rng.choice(list(state.told))
    intent = "ask_name" if key == "name" and rng.random() < 0.15 else "ask"
    user = message(world, core_of(world, intent, 0.1), keys={"k": _spelled(world, key)}, stories=rng.random() < 0.3)
    return Turn(user, f"Your {key} is {state.told[key]}.", "recall", "", f"told earlier: {key}")


def not_told(world: World, state: State) -> Turn:
    rng = world.rng
    key = next(k for k in iter(lambda: some_key(world), None) if k not in state.told)
    intent = "ask_name" if key == "name" and rng.random() < 0.15 else "ask"
    user = message(world, core_of(world, intent, 0.1), keys={"k": _spelled(world, key)}, stories=rng.random() < 0.3)
    return Turn(user, f"Your {key} is unknown to me, I don't know it: you have not told me.", "nottold", "", f"not told: {key}")


def memory(world: World, state: State) -> Turn:
    part = world.rng.random()
    if not state.told or part < 0.3:
        turn = not_told(world, state) if part < 0.07 or (not state.told and world.rng.random() < 0.15) else told(world, state)
    elif part < 0.42:
        turn = correct(world, state)
    elif part < 0.53:
        turn = not_told(world, state)
    else:
        turn = recall(world, state)
    return turn


def meta(world: World, state: State) -> Turn | None:
    """Questions about the conversation; None when there is nothing to ask about."""
    rng, last = world.rng, state.last
    if last is None:
        return None
    what = rng.random()
    if what < 0.45 and len(last.answer) < 160 and not last.short:
        return Turn(simple(world, rules("repeat").draw(rng, world.held)), last.answer, "meta", "", "say it again")
    if what < 0.7 and state.first_word and len(state.turns) < 8:
        return Turn(
            simple(world, rules("first_word").draw(rng, world.held)),
            f"The first word you asked about is {state.first_word}.",
            "meta",
            "",
            "first word",
        )
    if len(last.user) < 70 and "\n" not in last.user:
        return Turn(simple(world, rules("what_asked").draw(rng, world.held)), f"You said: {last.user}", "meta", "", "last message")
    return None

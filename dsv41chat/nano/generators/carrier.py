"""From a core ("define {}") to a message as people type it: openings, endings, stories, word soup, typos, case and punctuation.

The test part gets openings, cores and endings of the test part only, with the same case and punctuation; the training part also gets noise.
Whatever noise makes of a training core is checked again: a wording of the test part never enters the training stream.
"""

from __future__ import annotations

from ..tables.wording import CARRIER, PLAIN
from .grammar import normal, rules
from .world import World

_PLAIN = frozenset(PLAIN)
_CLOSERS = ("", "", "", "", "?", "?", "?", "?", ".", "!", "??", " ?", "...", "?!")
_QUOTES = (("'", "'"), ('"', '"'), ("`", "`"), ("*", "*"), ("<", ">"), ("(", ")"), ("“", "”"), ("_", "_"), ("**", "**"), ("[", "]"))
_SLOT = "{}"


def _typo(word: str, rng) -> str:
    i = rng.randrange(len(word) - 1)
    return rng.choice(
        (
            word[:i] + word[i + 1 :],
            word[:i] + word[i + 1] + word[i] + word[i + 2 :],
            word[: i + 1] + word[i:],
            word[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[i + 1 :],
        )
    )


def _bare(word: str) -> str:
    return word.lower().strip(".,:;!?'")


def shake(core: str, rng) -> str:
    """Drop, double, swap, replace or insert plain words of a core; topic words and the slot stay."""
    words = core.split(" ")
    for _ in range(rng.choice((1, 1, 2, 3))):
        plain = [i for i, w in enumerate(words) if _bare(w) in _PLAIN]
        move = rng.random()
        if move < 0.35 and plain:
            del words[rng.choice(plain)]
        elif move < 0.6:
            words.insert(rng.randrange(len(words) + 1), rng.choice(PLAIN))
        elif move < 0.75 and plain:
            words[rng.choice(plain)] = rng.choice(PLAIN)
        elif plain and len(words) > 1:
            i = rng.choice(plain)
            j = min(len(words) - 1, i + 1) if i == 0 or rng.random() < 0.5 else i - 1
            words[i], words[j] = words[j], words[i]
    return " ".join(words)


def soup(core: str, rng) -> str:
    """Only the topic words and the slot, in order, among random plain words."""
    words = [w for w in core.split(" ") if _bare(w) not in _PLAIN] or [_SLOT]
    for _ in range(rng.randint(0, 7)):
        words.insert(rng.randrange(len(words) + 1), rng.choice(PLAIN))
    return " ".join(words)


def carrier_soup(world: World, table: str, key: str) -> str:
    """The key among everyday words, sometimes inside a core: it is the one word that people do not say in passing."""
    rng = world.rng
    rule = rules(table)
    while True:
        before = [rng.choice(CARRIER if rng.random() < 0.6 else PLAIN) for _ in range(rng.randint(0, 7))]
        behind = [rng.choice(CARRIER if rng.random() < 0.6 else PLAIN) for _ in range(rng.randint(0, 5))]
        inner = _SLOT if rng.random() < 0.7 else shake(rule.draw(rng, False), rng)
        core = " ".join((*before, inner, *behind))
        if _SLOT in core and not rule.is_held(core) and not rule.is_held(inner) and key not in before and key not in behind:
            break
    if rng.random() < 0.4:
        core = core[:1].upper() + core[1:]
    for mark in (",", ".", ":", " -", ",", "?", "!"):
        if rng.random() < 0.12 and " " in core:
            at = [i for i, c in enumerate(core) if c == " " and i]
            i = rng.choice(at)
            core = core[:i] + mark + core[i:]
    return core.replace(_SLOT, key, 1) + rng.choice(_CLOSERS)


def core_of(world: World, intent: str, noise: float) -> str:
    """A core of the world's part; in the training part shaken or turned into soup with the given chances."""
    rng, table = world.rng, rules(intent)
    core = table.draw(rng, world.held)
    if world.held or not noise:
        return core
    for _ in range(8):
        chance = rng.random()
        other = shake(core, rng) if chance < noise else soup(core, rng) if chance < 1.6 * noise else core
        if all(slot in other for slot in ("{}", "{to}", "{city}", "{v}") if slot in core) and not table.is_held(other):
            return other
    return core


def story(world: World) -> str:
    text = rules("stories").draw(world.rng, world.held)
    while "{w}" in text:
        text = text.replace("{w}", world.word(), 1)
    return text


def message(world: World, core: str, keys: dict[str, str] | None = None, key: str = "", quote: bool = False, stories: bool = True) -> str:
    """The finished message. `core` holds `{}` for `key`, and named slots of `keys`; `quote`: the key may stand in quotation marks."""
    rng = world.rng
    opening = rules("openings").draw(rng, world.held) + " " if rng.random() < 0.45 else ""
    ending = rng.choice((" ", " ", ", ", "? ", ". ")) + rules("endings").draw(rng, world.held) if rng.random() < 0.3 else ""
    shell = [opening, core, ending]
    if rng.random() < 0.6:
        shell = [part.lower() for part in shell]
    elif rng.random() < 0.85:
        first = 0 if opening else 1
        if not shell[first].startswith("{"):
            shell[first] = shell[first][:1].upper() + shell[first][1:]
    if not world.held and rng.random() < 0.25:
        shell = [_typos(part, rng) for part in shell]
    if quote and rng.random() < 0.1:
        left, right = rng.choice(_QUOTES)
        key = left + key + right
    text = shell[0] + shell[1] + shell[2]
    if text.rstrip()[-1:] not in ".?!":
        text += rng.choice(_CLOSERS)
    if stories and rng.random() < 0.14:
        side = story(world)
        side = side.lower() if rng.random() < 0.5 else side[:1].upper() + side[1:]
        text = side + " " + text if rng.random() < 0.6 else (text if text[-1] in ".?!" else text + ".") + " " + side
    for name, value in (keys or {}).items():
        text = text.replace("{" + name + "}", value)
    return text.replace(_SLOT, key, 1) if key or _SLOT in text else text


def _typos(part: str, rng) -> str:
    words = part.split(" ")
    for i, word in enumerate(words):
        if len(word) > 3 and word.isalpha() and rng.random() < 0.12:
            words[i] = _typo(word, rng)
    return " ".join(words)


def lemma_soup(world: World, core: str, key: str) -> str:
    """A core among unrelated content words; marks around the core or the key show which word is meant."""
    rng = world.rng
    before = " ".join(world.word() for _ in range(rng.randint(0, 6)))
    behind = " ".join(world.word() for _ in range(rng.randint(0, 4)))
    if core.strip() == _SLOT or rng.random() < 0.3:
        left, right = rng.choice(_QUOTES)
        text = f"{before} {core.replace(_SLOT, left + key + right)} {behind}"
    else:
        mark = rng.choice((". ", ", ", ": ", " - ", "; ", "\n"))
        text = (before + mark if before else "") + core.replace(_SLOT, key) + (rng.choice(("? ", ". ", "! ", "\n")) + behind if behind else "")
    return text.strip() + rng.choice(_CLOSERS)


def simple(world: World, text: str) -> str:
    """Case and punctuation for a wording without a key (small talk and the like), sometimes with an opening."""
    rng = world.rng
    if rng.random() < 0.25:
        text = rules("openings").draw(rng, world.held) + " " + text
    if rng.random() < 0.12:
        text += " " + rules("endings").draw(rng, world.held)
    text = text.lower() if rng.random() < 0.55 else text[:1].upper() + text[1:]
    if not world.held and rng.random() < 0.15:
        text = _typos(text, rng)
    return text + rng.choice(_CLOSERS) if text[-1:] not in ".?!" else text


__all__ = ["carrier_soup", "core_of", "lemma_soup", "message", "normal", "shake", "simple", "soup", "story"]

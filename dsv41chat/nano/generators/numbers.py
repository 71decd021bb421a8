"""Sums, differences, products, quotients and unit conversions, with the working that leads to the result."""

from __future__ import annotations

from fractions import Fraction

from ..tables.units import AMERICAN, COUNTS, SHORT, UNITS, in_words
from .carrier import core_of, message
from .turns import State, Turn
from .world import World, held_pair


def add_steps(a: int, b: int) -> str:
    """Column addition, ones first."""
    x, y, carry, steps = str(a)[::-1], str(b)[::-1], 0, []
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        steps.append(f"{p}+{q}{f'+{carry}' if carry else ''}={total}, write {total % 10}{', carry 1' if total > 9 else ''}")
        carry = total // 10
    return "; ".join(steps) + "."


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction, ones first; a >= b."""
    x, y, borrow, steps = str(a)[::-1], str(b)[::-1], 0, []
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i]) if i < len(y) else 0
        rest = p - q - borrow
        steps.append(f"{p}-{q}{f'-{borrow}' if borrow else ''}={rest}, write {rest % 10}{', borrow 1' if rest < 0 else ''}")
        borrow = int(rest < 0)
    return "; ".join(steps) + "."


def _parts(a: int) -> list[int]:
    text = str(a)
    return [int(d) * 10 ** (len(text) - 1 - i) for i, d in enumerate(text) if d != "0"]


def times_digit(a: int, d: int) -> str:
    """a x d by places of a, with running totals: `300 x 8 = 2400; 40 x 8 = 320, together 2720; ...`."""
    total, steps = 0, []
    for part in _parts(a):
        total += part * d
        steps.append(f"{part} x {d} = {part * d}" + (f", together {total}" if total != part * d else ""))
    return "; ".join(steps)


def times_steps(a: int, b: int) -> str:
    """a x b for a two-digit b: one row per digit of b, then a column addition."""
    tens, ones = divmod(b, 10)
    if not ones:
        return f"{times_digit(a, tens)}; {a} x {b} = {a * b}."
    high, low = a * tens * 10, a * ones
    first = f"{times_digit(a, tens)}; so {a} x {tens * 10} = {high}."
    return f"{first} {times_digit(a, ones)}; so {a} x {ones} = {low}. {high} + {low}: {add_steps(high, low)}"


def divide_steps(a: int, b: int) -> str:
    """Long division by a small number that divides a."""
    rest, steps = 0, []
    for digit in str(a):
        value = rest * 10 + int(digit)
        if value < b and not steps:
            rest = value
            continue
        steps.append(f"{value} / {b} = {value // b}" + (f" rest {value % b}" if value % b else ""))
        rest = value % b
    return "; ".join(steps) + "."


_ASK = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "{a} + {b}", "{a} and {b} together", "the sum of {a} and {b}", "{a} added to {b}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} - {b}", "{a} take away {b}", "the difference of {a} and {b}", "{a} less {b}"),
    "x": ("{a} x {b}", "{a}x{b}", "{a} times {b}", "{a} * {b}", "{a}*{b}", "the product of {a} and {b}", "{a} multiplied by {b}", "{a} × {b}"),
    "/": ("{a} / {b}", "{a}/{b}", "{a} divided by {b}", "{a} : {b}", "{a} ÷ {b}", "{a} over {b}"),
}
_ORDERS = {
    "+": ("add {a} and {b}", "add {b} to {a}", "sum up {a} and {b}", "add {a} to {b}", "add up {a} and {b}"),
    "-": ("subtract {b} from {a}", "take {b} away from {a}", "take {b} from {a}", "deduct {b} from {a}", "reduce {a} by {b}"),
    "x": ("multiply {a} by {b}", "multiply {a} with {b}", "multiply {a} and {b}", "take {a} times {b}"),
    "/": ("divide {a} by {b}", "split {a} by {b}", "divide {a} into {b} parts", "share {a} among {b}"),
}


def _question(world: World, a: int, b: int, sign: str) -> str:
    rng = world.rng
    if rng.random() < 0.2:
        core = rng.choice(_ORDERS[sign]).format(a=a, b=b)
        return message(world, core)
    return message(world, core_of(world, "sum", 0.2), key=rng.choice(_ASK[sign]).format(a=a, b=b))


def _turn(world: World, a: int, b: int, sign: str, kind: str, working: str, visible: bool) -> Turn:
    """visible: without thinking the working is part of the answer."""
    value = {"+": a + b, "-": a - b, "x": a * b, "/": a // b if sign == "/" else 0}[sign]
    result = f"{a} {sign} {b} = {value}."
    return Turn(_question(world, a, b, sign), f"{working} So {result}" if visible else result, kind, "", working, short=result)


def _pair(world: World, low_a: int, high_a: int, low_b: int, high_b: int, free: int = 10) -> tuple[int, int]:
    """Operands of the world's part; pairs of two numbers up to `free` always belong to the training part."""
    rng = world.rng
    while True:
        a, b = rng.randint(low_a, high_a), rng.randint(low_b, high_b)
        if (held_pair(a, b) and max(a, b) > free) == world.held:
            return a, b


def sums(world: World, thinking: bool, digits: int | None = None) -> Turn:
    """+ and -: operands up to 10 directly, larger ones (up to 4 digits) by columns; without thinking the columns stand in the answer."""
    rng = world.rng
    size = digits or rng.choice((2, 2, 3, 3, 4) if world.held else (1, 2, 2, 2, 3, 3, 3, 4))
    top = 10**size - 1
    a, b = _pair(world, 0, top, 0, top if rng.random() < 0.8 else 9)
    sign = "+" if rng.random() < 0.55 else "-"
    if sign == "-" and b > a:
        a, b = b, a
        if (held_pair(a, b) and a > 10) != world.held:
            sign = "+"
            a, b = b, a
    working = add_steps(a, b) if sign == "+" else subtract_steps(a, b)
    small = max(a, b) <= 10
    return _turn(world, a, b, sign, "sumthink" if thinking else "sum", working, not small and not thinking)


def products(world: World, thinking: bool, wide: bool | None = None) -> Turn:
    rng = world.rng
    if wide is None:
        wide = rng.random() < (0.5 if thinking else 0.12)
    if wide:
        a, b = _pair(world, 11, 999, 11, 99)
        return _turn(world, a, b, "x", "multhink", times_steps(a, b), not thinking)
    a, b = _pair(world, 2, 99 if world.held or rng.random() < 0.75 else 12, 2, 9)
    small = max(a, b) <= 10
    return _turn(world, a, b, "x", "mul", times_digit(a, b) + ".", not small and not thinking)


def quotients(world: World, thinking: bool) -> Turn:
    rng = world.rng
    while True:
        q, b = rng.randint(2, 12 if rng.random() < 0.4 else 250), rng.randint(2, 9 if rng.random() < 0.9 else 12)
        a = q * b
        small = q <= 10 and b <= 10
        if (held_pair(a, b) and not small) == world.held:
            break
    return _turn(world, a, b, "/", "div", divide_steps(a, b), not small and not thinking)


def arithmetic(world: World, thinking: bool, share_sums: float = 0.58, share_quotients: float = 0.15) -> Turn:
    part = world.rng.random()
    return sums(world, thinking) if part < share_sums else products(world, thinking) if part < 1 - share_quotients else quotients(world, thinking)


def _spoken(world: World, unit: str, many: str, count: str) -> str:
    """A unit as a user may write it."""
    rng = world.rng
    if unit in SHORT and rng.random() < 0.35:
        return rng.choice(SHORT[unit])
    text = unit if count in ("1", "a", "an", "one") else many
    for british, american in AMERICAN.items():
        if rng.random() < 0.3:
            text = text.replace(british, american)
    return text


def temperature(world: World) -> Turn:
    rng = world.rng
    value = rng.choice((*range(-20, 41), 45, 50, 60, 70, 75, 80, 90, 100, 120, 150, 180, 200, 220, 250))
    if rng.random() < 0.5:
        source, target, result = "Celsius", "Fahrenheit", Fraction(value * 9, 5) + 32
        steps = f"{value} x 1.8 = {_signed(Fraction(value * 9, 5))}; plus 32 = {_signed(result)}."
    else:
        source, target, result = "Fahrenheit", "Celsius", Fraction((value - 32) * 5, 9)
        steps = f"{value} - 32 = {value - 32}; divided by 1.8 = {_signed(result)}."
    words = {
        "Celsius": ("degrees Celsius", "C", "celsius", "degrees C", "°C"),
        "Fahrenheit": ("degrees Fahrenheit", "F", "fahrenheit", "degrees F", "°F"),
    }
    user = message(world, core_of(world, "convert", 0.15), keys={"to": rng.choice(words[target])}, key=f"{value} {rng.choice(words[source])}")
    answer = f"In degrees {target}, {value} degrees {source} are {_signed(result)}."
    return Turn(user, answer, "convert", "", steps, short=answer)


def _signed(value: Fraction) -> str:
    return "-" + in_words(-value) if value < 0 else in_words(value) if value else "0"


def convert(world: World) -> Turn:
    rng = world.rng
    if rng.random() < 0.12:
        return temperature(world)
    one, many, other, others, factor = rng.choice(UNITS)
    if rng.random() < 0.5:
        one, many, other, others, factor = other, others, one, many, 1 / factor
    count = rng.choice(COUNTS) if rng.random() < 0.8 else 1
    shown = str(count)
    if count == 1:
        shown = rng.choice(("1", "a" if one[0] not in "aeiouh" or one == "horsepower" or one == "hectare" else "an", "one"))
    result = in_words(factor * count)
    first = f"{count} {one if count == 1 else many}"
    answer = f"In {others}, {first} {'is' if count == 1 else 'are'} {result}."
    steps = f"1 {one} = {in_words(factor)} {others}; times {count} = {result}."
    user = message(
        world, core_of(world, "convert", 0.15), keys={"to": _spoken(world, other, others, "2")}, key=f"{shown} {_spoken(world, one, many, shown)}"
    )
    return Turn(user, answer, "convert", "", steps, short=answer)


def quantity(
    world: World, state: State, thinking: bool, share: float = 0.64, share_sums: float = 0.58, share_quotients: float = 0.15
) -> Turn:
    """share: of arithmetic, the rest are conversions."""
    return arithmetic(world, thinking, share_sums, share_quotients) if world.rng.random() < share else convert(world)

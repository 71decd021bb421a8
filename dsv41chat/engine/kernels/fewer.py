"""A tape with fewer launches and the same bits: what a launch leaves for a single other one, it brings to where that one would have.

Some texts of CUDA can do a part of another's work when it is asked of them, in the same steps with the same roundings: attention and the
sums of a row's query and latent turn their results for the product that reads them, the latent goes to its place in a ring, and
the way into a sublayer joins the sums that it spreads. Each rule here looks for such a pair, and puts one launch in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dsv41chat.engine.kernels.recorder import Launch, Memory, Place, Tape
from dsv41chat.engine.kernels.text_attend_tensor import TENSOR_MERGE
from dsv41chat.engine.kernels.text_exl3_experts import EXL3_SUM
from dsv41chat.engine.kernels.text_exl3_join import EXL3_JOIN, EXL3_LATENT, EXL3_RAW
from dsv41chat.engine.kernels.text_exl3_tensor import EXL3_SPLIT
from dsv41chat.engine.kernels.text_hyper import HYPER_JOINED, HYPER_SPREAD
from dsv41chat.engine.kernels.text_step import SCATTER

# Texts that put rows where a list says: which of their inputs it is, and which of their outputs has the rows.
_PLACES = {EXL3_LATENT.base: (9, 2), EXL3_RAW.base: (4, 0)}
# Words that a text asks for and does not touch.
_NOTHING = 32


def fewer(tape: Tape) -> Tape:
    """tape: whole, its results marked. Launches keep their order, and stay in their part."""
    return _Rewritten(tape).tape()


class _Rewritten:
    def __init__(self, tape: Tape):
        self.parts = tape.parts
        # None for what another launch has taken over.
        self.launches: list[Launch | None] = list(tape.launches)
        # By memory: who reads or writes it, and who writes it last.
        self.users: dict[Memory, set[int]] = {}
        self.writer: dict[Memory, int] = {}
        # By rows that are turned: the launch that does it.
        self.turns: dict[tuple, int] = {}
        for i, launch in enumerate(tape.launches):
            for place in (*launch.inputs, *launch.outputs):
                self.users.setdefault(place.memory, set()).add(i)
            self.writer |= {place.memory: i for place in launch.outputs}
        rules: dict[object, Callable[[int, Launch], None]] = {EXL3_SPLIT: self._turn, SCATTER: self._place, HYPER_SPREAD: self._join}
        for i, launch in enumerate(tape.launches):
            if (rule := rules.get(launch.kernel)) is not None:
                rule(i, launch)

    def tape(self) -> Tape:
        kept = [i for i, launch in enumerate(self.launches) if launch is not None]
        return Tape([self.launches[i] for i in kept], [sum(i < part for i in kept) for part in self.parts])

    # rules, of the launch i that reads what another left

    def _turn(self, i: int, split: Launch) -> None:
        """Rows are turned by what makes them, else together with other turns of the same rows. The sums of a row's query leave the query itself,
        too, and can turn it once more."""
        x, scale, *_ = split.inputs
        found = self._before(i, x)
        if found is None or split.constants["P"] != 1 or split.constants["XF"]:
            self._beside(i, split)
            return
        made, launch = found
        if launch.kernel is TENSOR_MERGE and launch.constants["C"] % 128 == 0 and self._alone(x.memory, made, i):
            turned = dict(constants={**launch.constants, "TURN": 1}, inputs=(*launch.inputs[:-1], scale), outputs=(_nothing(x), split.outputs[0]))
        elif launch.kernel is EXL3_LATENT and launch.outputs[0].memory is x.memory and launch.groups[0] == 2:
            turned = dict(groups=(3, *launch.groups[1:]), inputs=_with(launch.inputs, {6: scale}), outputs=(*launch.outputs[:3], split.outputs[0]))
        else:
            self._beside(i, split)
            return
        self.launches[made], self.launches[i] = replace(launch, **turned), None

    def _beside(self, i: int, split: Launch) -> None:
        """One launch turns rows for up to three products, or pairs of them."""
        x, part = split.inputs[0], sum(part <= i for part in self.parts)
        if x.memory.kind not in ("scratch", "given", "fixed"):
            return
        first = self.turns.setdefault((x.memory, x.at, split.constants["XF"], part), i)
        if first == i or self.launches[first].constants["P3"]:
            self.turns[x.memory, x.at, split.constants["XF"], part] = i
            return
        launch, c = self.launches[first], self.launches[first].constants
        k, p = 2 if c["P2"] else 1, split.constants["P"]
        inputs = _with(launch.inputs, {1 + 2 * k: split.inputs[1], 2 + 2 * k: split.inputs[2]})
        groups = *launch.groups[:2], launch.groups[2] + p
        changed = replace(launch, constants={**c, f"P{k + 1}": p}, inputs=inputs, outputs=_with(launch.outputs, {k: split.outputs[0]}), groups=groups)
        self.launches[first], self.launches[i] = changed, None

    def _place(self, i: int, scatter: Launch) -> None:
        """New rows go to their places in a ring at once, if nobody looks at it before they would."""
        (rows, at), (ring,) = scatter.inputs, scatter.outputs
        if (found := self._before(i, rows)) is None or found[1].kernel.base not in _PLACES or not self._alone(rows.memory, found[0], i):
            return
        made, launch = found
        where, result = _PLACES[launch.kernel.base]
        between = [x for x in self.launches[made:i] if x is not None]
        seen = any(p.memory is ring.memory for x in between for p in (*x.inputs, *x.outputs))
        if launch.outputs[result].memory is rows.memory and rows.dtype == ring.dtype and not seen:
            changed = replace(launch, inputs=_with(launch.inputs, {where: at}), outputs=_with(launch.outputs, {result: ring}))
            self.launches[made], self.launches[i] = changed, None

    def _join(self, i: int, spread: Launch) -> None:
        """Sums of parts, or of the slots of experts, are joined where they are spread."""
        h, y, *rest = spread.inputs
        if not spread.constants["EXPAND"] or (found := self._before(i, y)) is None or not self._alone(y.memory, found[0], i):
            return
        made, launch = found
        c = launch.constants
        if launch.kernel is EXL3_JOIN and not c["OF"]:
            form, (parts, scale, bias, dims) = {"TURN": 1, "KZ": c["KZ"], "BIAS": c["BIAS"], "ADD": 0}, launch.inputs
            inputs = h, parts, scale, bias, scale, *rest, dims
        elif launch.kernel is EXL3_SUM:
            form, (parts, addend) = {"TURN": 0, "KZ": c["S"], "BIAS": 0, "ADD": c["ADD"]}, launch.inputs
            # Rows are not counted in this form.
            inputs = h, parts, addend, addend, addend, *rest, parts
        else:
            return
        joined = replace(spread, kernel=HYPER_JOINED, constants={**spread.constants, **form}, inputs=inputs)
        self.launches[made], self.launches[i] = None, joined

    # what they ask

    def _before(self, i: int, read: Place) -> tuple[int, Launch] | None:
        """(number, launch) of what wrote all of that scratch memory, in the same part."""
        if read.memory.kind != "scratch" or read.at or read.nbytes != read.memory.nbytes:
            return None
        made = self.writer.get(read.memory, i)
        same = not any(made < part <= i for part in self.parts)
        return (made, self.launches[made]) if made < i and same and self.launches[made] is not None else None

    def _alone(self, memory: Memory, made: int, i: int) -> bool:
        """Whether launch i alone reads what launch `made` wrote, and nothing else is written there."""
        return self.users[memory] == {made, i}


def _with(places: Sequence[Place], changed: Mapping[int, Place]) -> tuple[Place, ...]:
    return tuple(changed.get(k, place) for k, place in enumerate(places))


def _nothing(like: Place) -> Place:
    return Place(Memory("scratch", _NOTHING * like.dtype.size), (_NOTHING,), like.dtype)

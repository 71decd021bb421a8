"""What fits: memory of a build from its headers and plan, compared with the machine before any weight is read.

Two sums are asked. The device's part, weights + drafter + state + scratch, must stay within 0.92 of what the device may hold. Everything,
with what is in use now and a margin, is a share of total memory: below 75 % fits, up to 85 % is tight. A build of less than 1 GiB only
has to find its memory available. Source: spec: checkpoints, section 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dsv41chat.engine.device import Machine
from dsv41chat.engine.draft.load import load_draft_model
from dsv41chat.engine.errors import DoesNotFit
from dsv41chat.engine.kernels.routes import STOCK, copied_bytes
from dsv41chat.engine.lane import PoolSpec, RingSpec
from dsv41chat.engine.pack.build import Pack, arrays_of, outline_trunk, weight_source

DEVICE_SHARE, FITS_SHARE, TIGHT_SHARE = 0.92, 0.75, 0.85
SMALL_BYTES = 1 << 30
_STEP_TOKENS = 1024
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a build needs. weights, drafter: in memory, as loaded. tables: Engram tables kept in memory. fixed: state of any context;
    per_token: state per token of context. decoded: how much larger than on disk the weights are because they are decoded.
    copies: of matrices, in another form, that a route keeps beside them. growing: per token of context, bytes of the largest buffer of
    the state, of which there are two while it grows."""

    weights: int
    drafter: int
    tables: int
    fixed: int
    per_token: float
    decoded: int
    copies: int = 0
    growing: float = 0.0

    @property
    def resident(self) -> int:
        return self.weights + self.drafter + self.tables + self.copies

    @property
    def scratch(self) -> int:
        """Activations and copies of one forward, which its rows bound; a quarter of the resident bytes, 256 MiB to 6 GiB."""
        return min(max(self.resident // 4, 256 * _MIB), 6 << 30)

    @property
    def margin(self) -> int:
        """What is left to others: a quarter of the resident bytes, 256 MiB to 8 GB."""
        return min(max(self.resident // 4, 256 * _MIB), 8 * 10**9)

    def state(self, context: int) -> int:
        """At its peak, while the largest buffer grows."""
        return self.fixed + int((self.per_token + self.growing) * context)


@dataclass(frozen=True)
class Admission:
    """verdict: fits, tight or no. context: admitted tokens, 0 with the verdict no. words: the whole sum; remedies: what to do, in order."""

    verdict: str
    context: int
    plan: MemoryPlan
    words: str
    remedies: tuple[str, ...]

    def demand(self, name: str) -> None:
        """Raises DoesNotFit unless the build is admitted."""
        if self.verdict == "no":
            raise DoesNotFit(f"{name} does not fit: {self.words}", hint="; ".join(self.remedies))


def plan_memory(
    pack: Pack, *, dtype: mx.Dtype | None = None, packed: bool | None = None, tables_resident: bool = False, routes: str = STOCK
) -> MemoryPlan:
    """From headers and plan alone: the modules are laid out without values, and their arrays are counted. routes: as they will be asked for."""
    trunk = outline_trunk(pack, dtype=dtype, packed=packed)
    weights, drafter, modules = _size(trunk), 0, [trunk]
    if pack.found.plan is not None:
        source = weight_source(pack, pack.found.plan.expected, dtype=trunk.dtype, packed=packed, empty=True)
        modules.append(load_draft_model(pack.found.plan, trunk, source, False))
        drafter = _size(modules[1]) - _size((trunk.embed, trunk.head))
    fixed, per_token, copied = 0, 0.0, 0.0
    for spec in trunk.lane_specs():
        row = spec.dtype.size
        for n in spec.tail:
            row *= n
        if isinstance(spec, PoolSpec):
            per_token += row / spec.ratio
            copied = max(copied, row / spec.ratio)
        elif isinstance(spec, RingSpec):
            fixed += spec.rows * row
    tables = pack.table_bytes if tables_resident else 0
    copies = copied_bytes(modules, trunk, routes)
    return MemoryPlan(weights, drafter, tables, fixed, per_token, max(0, weights - pack.weight_bytes), copies, copied)


def _size(module: object) -> int:
    return sum(a.nbytes for a in {id(a): a for a in arrays_of(module)}.values())


def admit(plan: MemoryPlan, machine: Machine, maximum: int, context: int | None = None, margin: int | None = None) -> Admission:
    """context: tokens asked for, None for the largest that fits. maximum: the pack's. margin: bytes instead of the plan's own."""
    margin = plan.margin if margin is None else margin
    largest = _largest(plan, machine, maximum, margin)
    asked = context if context is not None else largest or min(maximum, _STEP_TOKENS)
    verdict = _verdict(plan, machine, asked, margin)
    words = _words(plan, machine, asked, margin)
    if verdict != "no":
        return Admission(verdict, asked, plan, words, () if verdict == "fits" else _remedies(plan, machine, 0))
    return Admission("no", 0, plan, words, _remedies(plan, machine, largest if context is not None and largest < context else 0))


def _verdict(plan: MemoryPlan, machine: Machine, context: int, margin: int) -> str:
    state = plan.state(context)
    if plan.resident + state + plan.scratch > DEVICE_SHARE * machine.device and plan.resident >= SMALL_BYTES:
        return "no"
    if plan.resident < SMALL_BYTES:
        return "fits" if plan.resident + state + plan.scratch <= min(machine.available, machine.device) else "no"
    share = _projected(plan, machine, context, margin) / machine.total
    return "fits" if share < FITS_SHARE else "tight" if share <= TIGHT_SHARE else "no"


def _projected(plan: MemoryPlan, machine: Machine, context: int, margin: int) -> int:
    return machine.total - machine.available + plan.resident + plan.state(context) + margin


def _largest(plan: MemoryPlan, machine: Machine, maximum: int, margin: int) -> int:
    """The largest context that fits, else the largest that is tight; 0 when none is."""
    for wanted in ("fits", "tight"):
        good = lambda context, wanted=wanted: _verdict(plan, machine, context, margin) in ("fits", wanted)
        if good(maximum):
            return maximum
        low, high = 0, maximum // _STEP_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if good(middle * _STEP_TOKENS) else (low, middle - 1)
        if low:
            return low * _STEP_TOKENS
    return 0


def _words(plan: MemoryPlan, machine: Machine, context: int, margin: int) -> str:
    state = plan.state(context)
    parts = [f"in use now {_gb(machine.total - machine.available)}", f"weights {_gb(plan.weights)}"]
    parts += [f"drafter {_gb(plan.drafter)}"] if plan.drafter else []
    parts += [f"tables {_gb(plan.tables)}"] if plan.tables else []
    parts += [f"copies of routes {_gb(plan.copies)}"] if plan.copies else []
    parts += [f"{context:,} tokens {_gb(state)}", f"margin {_gb(margin)}"]
    projected = _projected(plan, machine, context, margin)
    device = plan.resident + state + plan.scratch
    share = f"{100 * projected / machine.total:.0f} %; fits below 75 %, tight to 85 %"
    total = f"{' + '.join(parts)} = {_gb(projected)} of {_gb(machine.total)} ({share})"
    return f"{total}; the device's part with scratch {_gb(plan.scratch)} is {_gb(device)} of 92 % of {_gb(machine.device)} {machine.limit}"


def _remedies(plan: MemoryPlan, machine: Machine, largest: int) -> tuple[str, ...]:
    out = [f"--context {largest}"] if largest else []
    out += ["--engram stream"] if plan.tables else []
    out += ["engine.routes = stock"] if plan.copies else []
    out += ["a smaller build"]
    return tuple(out)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"

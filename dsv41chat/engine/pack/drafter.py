"""The drafter of a pack, found by its tensors and never by the config alone: `find_drafter(tensors, config)`.

Most conversions drop these tensors while the config still announces them. A drafter is optional: one that is absent,
incomplete or of the wrong shape is left out, in one line that names what is wrong, and the pack answers without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsv41chat.engine.errors import PackError
from dsv41chat.engine.pack.gate import check_tensor, is_there, names_in_use, shorten
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.names import Expected, block_tensors
from dsv41chat.engine.pack.names_v4 import expected_block

_STAGE = re.compile(r"mtp\.(\d+)\.")
_DSPARK_PARTS = (".main_proj.", ".markov_head.", ".confidence_head.")


@dataclass(frozen=True)
class DraftPlan:
    """kind: dspark or mtp. prefixes: of the stages, first to last, such as `mtp.0`. expected: every tensor it needs.

    block: proposals of one pass. For DSpark noise is a token id, taps are trunk layers, rank and experts, picks are sizes.
    """

    kind: str
    prefixes: tuple[str, ...]
    expected: dict[str, Expected]
    block: int
    experts: int
    picks: int
    noise: int = 0
    taps: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class DrafterFound:
    """plan: None without a usable drafter. fault: why tensors that are there are not used, or None. notes: what was ignored."""

    plan: DraftPlan | None
    fault: str | None = None
    notes: tuple[str, ...] = ()

    def nbytes(self, tensors: dict[str, TensorRef]) -> int:
        """Bytes of the drafter on disk."""
        return sum(tensors[n].nbytes for n in names_in_use(tensors, self.plan.expected if self.plan else {}))


def find_drafter(tensors: dict[str, TensorRef], c) -> DrafterFound:
    """c: V41Config or V4Config. Reads names and headers only; never raises for what it finds."""
    mine = [n for n in tensors if n.startswith("mtp.")]
    if not mine:
        return DrafterFound(None)
    stages = sorted({int(m.group(1)) for n in mine if (m := _STAGE.match(n))})
    dspark = any(part in n for n in mine for part in _DSPARK_PARTS) or int(c.dspark.get("dspark_block_size") or 0) > 0
    try:
        plan = (_dspark_plan if dspark else _mtp_plan)(c, stages)
    except ValueError as error:
        return DrafterFound(None, f"the drafter is left out: {error}")
    missing = [name for name, want in plan.expected.items() if not is_there(tensors, name, want)]
    if missing:
        shown = shorten(missing, plan.expected)
        return DrafterFound(None, f"the drafter is incomplete and left out: {len(missing)} of {len(plan.expected)} tensors missing: {shown}")
    try:
        for name, want in plan.expected.items():
            check_tensor(tensors, name, want, c.weight_block)
    except PackError as error:
        return DrafterFound(None, f"the drafter is left out: {error}")
    known = names_in_use(tensors, plan.expected)
    extra = [n for n in mine if n not in known and not n.endswith(".gate.bias_vl")]
    notes = (f"{len(extra)} tensors of the drafter are not used: {', '.join(sorted(extra)[:4])}",) if extra else ()
    return DrafterFound(plan, None, notes)


def drafter_tensors(c, stages: list[int]) -> dict[str, Expected]:
    """The tensors of the drafter that the releases of this architecture carry: DSpark where the config has it, else the next-token block.

    Raises ValueError for a config that describes none.
    """
    return (_dspark_plan if int(c.dspark.get("dspark_block_size") or 0) > 0 else _mtp_plan)(c, stages).expected


def _setting(c, name: str, low: int, high: int | None = None) -> int:
    value = c.dspark.get(f"dspark_{name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value >= high):
        raise ValueError(f"config.json: $.dspark_{name} is {value!r}")
    return value


def _dspark_plan(c, stages: list[int]) -> DraftPlan:
    count = len(stages)
    if not stages or stages != list(range(count)):
        raise ValueError(f"its stages are {stages}, expected 0, 1, ... without a gap")
    taps = c.dspark.get("dspark_target_layer_ids")
    if not isinstance(taps, list) or not taps or taps != sorted(set(taps)) or not all(0 <= t < c.num_hidden_layers for t in taps):
        raise ValueError(f"config.json: $.dspark_target_layer_ids is {taps!r}, expected ascending layers of the trunk")
    rank = _setting(c, "markov_rank", 1)
    own = c.family == "v41"
    experts = _setting(c, "n_routed_experts", 1) if own else c.whole_experts
    picks = _setting(c, "num_experts_per_tok", 1, experts + 1) if own else c.num_experts_per_tok
    d, v = c.hidden_size, c.vocab_size
    prefixes = tuple(f"mtp.{s}" for s in stages)
    out: dict[str, Expected] = {}
    for p in prefixes:
        out |= {f"{p}.{name}": e for name, e in block_tensors(c, experts).items()} if own else expected_block(c, p)
    out["mtp.0.main_proj.weight"] = Expected((d, len(taps) * d), "linear")
    out["mtp.0.main_norm.weight"] = Expected((d,), "float")
    last = prefixes[-1]
    embed, head = ("embed", "head") if own else ("markov_w1", "markov_w2")
    out[f"{last}.markov_head.{embed}.weight"] = Expected((v, rank), "float")
    out[f"{last}.markov_head.{head}.weight"] = Expected((v, rank), "linear")
    out[f"{last}.confidence_head.proj.weight"] = Expected((1, d + rank), "float")
    out[f"{last}.norm.weight"] = Expected((d,), "float")
    if not own:
        out |= _collapse_head(c, last)
    return DraftPlan("dspark", prefixes, out, _setting(c, "block_size", 1), experts, picks, _setting(c, "noise_token_id", 0, v), tuple(taps), rank)


# Chaining is not defined by the release; beyond three guesses nothing is gained.
_MTP_BLOCK = 3


def _mtp_plan(c, stages: list[int]) -> DraftPlan:
    if c.family != "v4":
        raise ValueError("it is a next-token block, which belongs to DeepSeek-V4 only")
    prefix, d = f"mtp.{stages[0]}" if stages else "mtp", c.hidden_size
    out = expected_block(c, prefix)
    out |= {f"{prefix}.{name}.weight": Expected((d,), "float") for name in ("enorm", "hnorm", "norm")}
    out |= {f"{prefix}.{name}.weight": Expected((d, d), "linear") for name in ("e_proj", "h_proj")}
    return DraftPlan("mtp", (prefix,), out | _collapse_head(c, prefix), _MTP_BLOCK, c.whole_experts, c.num_experts_per_tok)


def _collapse_head(c, prefix: str) -> dict[str, Expected]:
    s = c.hc_mult
    shapes = {"fn": (s, s * c.hidden_size), "base": (s,), "scale": (1,)}
    return {f"{prefix}.hc_head_{part}": Expected(shape, "float") for part, shape in shapes.items()}


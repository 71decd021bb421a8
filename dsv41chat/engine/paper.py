"""Builds on paper: what a published release and its conversions take on disk and in memory, from the configuration alone.

The headers of a release are laid out, the recipe is planned over them, and the result goes through the gate and the memory plan that
admit a real folder. Only the number of routed experts is not laid out in full: every byte count is a straight line in it, so
small builds give the line, and with it the real one exactly (tests/engine/test_paper.py lays one out in full).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dsv41chat.engine.admission import Admission, MemoryPlan, admit, plan_memory
from dsv41chat.engine.config import family_of, parse_v41
from dsv41chat.engine.config_v4 import parse_v4
from dsv41chat.engine.convert.layout import plan_groups
from dsv41chat.engine.convert.recipes import Choice
from dsv41chat.engine.device import Machine
from dsv41chat.engine.pack.build import Pack
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.drafter import drafter_tensors, find_drafter
from dsv41chat.engine.pack.gate import check_names
from dsv41chat.engine.pack.index import ITEM_BYTES, PackIndex, TensorRef
from dsv41chat.engine.pack.names import expected_v41
from dsv41chat.engine.pack.names_v4 import expected_v4, ignored_v4
from dsv41chat.engine.plan import build_plan
from dsv41chat.engine.published import RELEASES, stored

_NOWHERE = Path("published")
_COUNTS = ("n_routed_experts", "dspark_n_routed_experts")
_FEW = 6  # routed experts of the small builds: as many as a token picks


@dataclass(frozen=True)
class PaperBuild:
    """name: of a release. recipe: of its conversion. disk: bytes of the shards, tables and drafter included, vision not."""

    name: str
    recipe: str
    disk: int
    plan: MemoryPlan
    maximum: int

    def on(self, machine: Machine, context: int | None = None) -> Admission:
        return admit(self.plan, machine, self.maximum, context)


def paper_builds(
    names: Iterable[str] | None = None, recipes: Iterable[str] = ("native",), progress: Callable[[int, int], None] = lambda done, total: None
) -> list[PaperBuild]:
    """One per release (all of them by default) and recipe, in that order. progress: builds done, builds in all.

    Raises KeyError for a name that is none, PackUnsupported for a recipe.
    """
    names, recipes, found = list(RELEASES if names is None else names), list(recipes), []
    for name in names:
        released: dict[tuple[int, ...], Pack] = {}  # by numbers of experts: every recipe starts from the same headers
        for recipe in recipes:
            progress(len(found), len(names) * len(recipes))
            found.append(_line(name, recipe, released))
    return found


def laid_out(outer: dict[str, Any], recipe: str, pack: Pack | None = None) -> tuple[int, MemoryPlan]:
    """(bytes on disk, memory) of a conversion of the release with this configuration. pack: its `release_pack`, where that is at hand."""
    pack = pack or release_pack(outer)
    groups = plan_groups(pack, Choice.of(recipe, None, "keep", pack.config.num_hidden_layers))
    out = {t.name: TensorRef(t.name, _NOWHERE, t.tag, t.shape, 8, t.nbytes) for group in groups for t in group.tensors}
    converted = _pack(outer, release_tensors(out), None)
    return sum(ref.nbytes for ref in out.values()), plan_memory(converted, dtype=mx.bfloat16, packed=True)


def release_pack(outer: dict[str, Any]) -> Pack:
    """The headers of a release with this configuration, its drafter complete, without the vision part."""
    config = _config(outer)
    expected = _expected(config)
    block = outer["quantization_config"]["weight_block_size"][0]
    stages = range(3 if config.family == "v41" or "dspark_block_size" in outer else 1)
    wanted = {name: want for name, want in (expected | drafter_tensors(config, list(stages))).items() if not want.optional}
    found = {key: one for name, want in wanted.items() for key, one in stored(name, want.shape, block).items()}
    refs = {name: TensorRef(name, _NOWHERE, tag, shape, 8, math.prod(shape) * ITEM_BYTES[tag]) for name, (tag, shape) in found.items()}
    return _pack(outer, refs, block)


def _config(outer: dict[str, Any]) -> Any:
    return parse_v4(outer) if family_of(outer) == "v4" else parse_v41(outer)


def _expected(config: Any) -> dict[str, Any]:
    plan = build_plan(config)
    return expected_v4(config, plan) if config.family == "v4" else expected_v41(config, plan)


def _pack(outer: dict[str, Any], refs: dict[str, TensorRef], block: int | None) -> Pack:
    config = _config(outer)
    plan, expected = build_plan(config), _expected(config)
    check_names(refs, expected, config.num_hidden_layers, block, ignored_v4(config, plan) if config.family == "v4" else ())
    return Pack(_NOWHERE, config, plan, PackIndex(_NOWHERE, refs, ()), expected, "", {}, (), find_drafter(refs, config))


def _line(name: str, recipe: str, released: dict[tuple[int, ...], Pack]) -> PaperBuild:
    outer = RELEASES[name]
    inner = outer.get("text_config", outer)
    counts = {key: inner[key] for key in _COUNTS if key in inner}
    base = _sizes(outer, recipe, dict.fromkeys(counts, _FEW), released)
    found = dict(base)
    for key, count in counts.items():
        one_more = _sizes(outer, recipe, dict.fromkeys(counts, _FEW) | {key: _FEW + 1}, released)
        found = {size: found[size] + (count - _FEW) * (one_more[size] - base[size]) for size in found}
    return PaperBuild(name, recipe, found.pop("disk"), MemoryPlan(**found), inner["max_position_embeddings"])


def _sizes(outer: dict[str, Any], recipe: str, counts: dict[str, int], released: dict[tuple[int, ...], Pack]) -> dict[str, Any]:
    """Every byte count of the build with so many experts."""
    changed = copy.deepcopy(outer)
    changed.get("text_config", changed).update(counts)
    key = tuple(counts.values())
    if key not in released:
        released[key] = release_pack(changed)
    disk, plan = laid_out(changed, recipe, released[key])
    return {"disk": disk, **asdict(plan)}

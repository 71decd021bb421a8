"""Everything that differs between layers, as data: `build_plan(config) -> tuple[LayerPlan, ...]`.

Roles are static. Which layer owns the compressed entries, whose selection is used and whose keys are scored follow from the
layer index alone; a "most recently published" pointer would give a layer another layer's keys on every step that closes no group.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv41chat.engine.config import V41Config, Yarn
from dsv41chat.engine.config_v4 import OVERLAP_RATIO, V4Config
from dsv41chat.engine.errors import PackUnsupported


@dataclass(frozen=True)
class RopeSpec:
    """One rope per layer, used for q, window rows, entries, index rows and the inverse on the output. dims: rotated channels."""

    base: float
    dims: int
    yarn: Yarn | None


@dataclass(frozen=True)
class LayerPlan:
    """ratio: tokens per compressed entry (0: window only). kv_source: owner of the entries and index keys that this layer reads
    (-1: none). index_source: layer whose selection it uses (-1: none: every visible entry). makes_candidates / uses_candidates:
    block pre-selection. engram_slot: index into the engram tables, -1 without one. overlap: a group also pools the first channels
    of the group before it. hashed: the token id chooses the experts."""

    index: int
    ratio: int
    rope: RopeSpec
    kv_source: int
    index_source: int
    makes_candidates: bool
    uses_candidates: bool
    engram_slot: int
    overlap: bool
    hashed: bool

    @property
    def owns_pool(self) -> bool:
        return self.kv_source == self.index

    @property
    def scores(self) -> bool:
        return self.index_source == self.index


def build_plan(config: V41Config | V4Config) -> tuple[LayerPlan, ...]:
    """One plan per trunk layer. Raises PackUnsupported for a V4.1 layer without an owner of its ratio or without a selection."""
    return _plan_v4(config) if isinstance(config, V4Config) else _plan_v41(config)


def _plan_v41(c: V41Config) -> tuple[LayerPlan, ...]:
    plan, source, selector = [], -1, -1
    engram_layers = c.engram.layer_ids if c.engram else ()
    plain = RopeSpec(c.rope_theta, c.qk_rope_head_dim, None)
    compressed = RopeSpec(c.compress_rope_theta, c.qk_rope_head_dim, c.yarn)
    for i in range(c.num_hidden_layers):
        ratio = c.compress_ratios[i]
        if i in c.kv_source_layer_ids:
            source = i
        if i in c.index_source_layer_ids:
            selector = i
        if ratio:
            if source < 0 or c.compress_ratios[source] != ratio:
                raise PackUnsupported(f"config.json: layer {i} has compress ratio {ratio}, but no kv source of that ratio at or above it")
            if selector < 0 or (source == i and selector != i):
                raise PackUnsupported(f"config.json: layer {i} has compress ratio {ratio}, but no index source serves it")
        candidates_known = ratio > 0 and source == c.candidate_source_layer_id
        plan.append(
            LayerPlan(
                index=i,
                ratio=ratio,
                rope=compressed if ratio else plain,
                kv_source=source if ratio else -1,
                index_source=selector if ratio else -1,
                makes_candidates=candidates_known and selector == i and i == c.candidate_source_layer_id,
                uses_candidates=candidates_known and selector == i and i > c.candidate_source_layer_id,
                engram_slot=engram_layers.index(i) if i in engram_layers else -1,
                overlap=False,
                hashed=False,
            )
        )
    return tuple(plan)


def _plan_v4(c: V4Config) -> tuple[LayerPlan, ...]:
    """Every layer reads its own entries. Only the overlapping ratio has an indexer; heavier layers see all of theirs."""
    plain = RopeSpec(c.rope_theta, c.qk_rope_head_dim, None)
    compressed = RopeSpec(c.compress_rope_theta, c.qk_rope_head_dim, c.yarn)
    return tuple(
        LayerPlan(
            index=i,
            ratio=ratio,
            rope=compressed if ratio else plain,
            kv_source=i if ratio else -1,
            index_source=i if ratio == OVERLAP_RATIO else -1,
            makes_candidates=False,
            uses_candidates=False,
            engram_slot=-1,
            overlap=ratio == OVERLAP_RATIO,
            hashed=i < c.num_hash_layers,
        )
        for i, ratio in enumerate(c.compress_ratios)
    )

"""From a pack's draft tensors to a drafter. The caller evaluates its weights, never inside a request."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.draft.base import Drafter
from dsv41chat.engine.draft.dspark import DSparkDrafter, DSparkModel
from dsv41chat.engine.draft.mtp import MTPDrafter, MTPModel
from dsv41chat.engine.draft.stage import Stage
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.ops.rope import inverse_frequencies
from dsv41chat.engine.pack.drafter import DraftPlan
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import RopeSpec
from dsv41chat.engine.trial import Trunk

DraftModel = DSparkModel | MTPModel


def load_draft_model(plan: DraftPlan, trunk: Trunk, source: WeightSource, rounded: bool) -> DraftModel:
    """The drafter's weights on a trunk whose embedding and head it shares. rounded: whether the trunk rounds its window rows."""
    return (_dspark if plan.kind == "dspark" else _mtp)(plan, trunk, source, rounded)


def new_drafter(model: DraftModel) -> Drafter:
    """A conversation's own drafter on shared weights."""
    return DSparkDrafter(model) if isinstance(model, DSparkModel) else MTPDrafter(model)


def _shared(trunk: Trunk) -> dict:
    c = trunk.config
    rope = RopeSpec(c.rope_theta, c.qk_rope_head_dim, None)
    return {
        "embed": trunk.embed,
        "head": trunk.head,
        "frequencies": inverse_frequencies(rope),
        "window": c.sliding_window,
        "streams": c.hc_mult,
        "eps": c.rms_norm_eps,
        "dtype": trunk.dtype,
    }


def _dspark(plan: DraftPlan, trunk: Trunk, source: WeightSource, rounded: bool) -> DSparkModel:
    c, last = trunk.config, plan.prefixes[-1]
    lagged = c.family == "v41"
    embed, head = ("embed", "head") if lagged else ("markov_w1", "markov_w2")
    return DSparkModel(
        stages=[Stage.load(c, source, prefix, plan.experts, plan.picks, rounded) for prefix in plan.prefixes],
        main_proj=source.linear("mtp.0.main_proj.weight"),
        main_norm=source.float32("mtp.0.main_norm.weight"),
        norm=source.float32(f"{last}.norm.weight"),
        markov_embed=source.array(f"{last}.markov_head.{embed}.weight"),
        markov_head=source.linear(f"{last}.markov_head.{head}.weight", rounds=False, dtype=mx.float32),
        confidence=source.float32(f"{last}.confidence_head.proj.weight")[0],
        block=plan.block,
        noise=plan.noise,
        lagged=lagged,
        collapse_head=None if lagged else HyperHead.load(c, source, f"{last}.hc_head"),
        head_dtype=mx.float32 if lagged else trunk.dtype,
        host=trunk.routes.host,
        **_shared(trunk),
    )


def _mtp(plan: DraftPlan, trunk: Trunk, source: WeightSource, rounded: bool) -> MTPModel:
    c, p = trunk.config, plan.prefixes[0]
    return MTPModel(
        stage=Stage.load(c, source, p, plan.experts, plan.picks, rounded),
        enorm=source.float32(f"{p}.enorm.weight"),
        hnorm=source.float32(f"{p}.hnorm.weight"),
        e_proj=source.linear(f"{p}.e_proj.weight"),
        h_proj=source.linear(f"{p}.h_proj.weight"),
        collapse_head=HyperHead.load(c, source, f"{p}.hc_head"),
        norm=source.float32(f"{p}.norm.weight"),
        block=plan.block,
        **_shared(trunk),
    )

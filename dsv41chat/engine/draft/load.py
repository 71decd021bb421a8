"""From a pack's draft tensors to a drafter. Weights are materialised here, never inside a request."""

from __future__ import annotations

import mlx.core as mx

from dsv41chat.engine.draft.dspark import DSparkDrafter, DSparkModel
from dsv41chat.engine.draft.stage import Stage
from dsv41chat.engine.ops.rope import inverse_frequencies
from dsv41chat.engine.pack.drafter import DraftPlan
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import RopeSpec
from dsv41chat.engine.trunk_v41 import TrunkV41


def load_draft_model(plan: DraftPlan, trunk: TrunkV41, source: WeightSource, cache_quant: bool) -> DSparkModel:
    """The drafter's weights on a trunk whose embedding and head it shares. cache_quant: the trunk's rounding of window rows."""
    c = trunk.config
    last = plan.prefixes[-1]
    rope = RopeSpec(c.rope_theta, c.qk_rope_head_dim, None)
    model = DSparkModel(
        stages=[Stage.load(c, source, prefix, plan.experts, plan.picks, cache_quant) for prefix in plan.prefixes],
        main_proj=source.linear("mtp.0.main_proj.weight"),
        main_norm=source.float32("mtp.0.main_norm.weight"),
        norm=source.float32(f"{last}.norm.weight"),
        markov_embed=source.array(f"{last}.markov_head.embed.weight"),
        markov_head=source.linear(f"{last}.markov_head.head.weight", rounds=False, dtype=mx.float32),
        confidence=source.float32(f"{last}.confidence_head.proj.weight")[0],
        embed=trunk.embed,
        head=trunk.head,
        frequencies=inverse_frequencies(rope),
        block=plan.block,
        noise=plan.noise,
        window=c.sliding_window,
        streams=c.hc_mult,
        eps=c.rms_norm_eps,
        lagged=True,
        collapse_head=None,
        dtype=trunk.dtype,
    )
    mx.eval(arrays(model))
    return model


def new_drafter(model: DSparkModel) -> DSparkDrafter:
    """A conversation's own drafter on shared weights."""
    return DSparkDrafter(model)


def arrays(module: object) -> list[mx.array]:
    """Every array below a module; modules are dataclasses, alone or in lists."""
    if isinstance(module, mx.array):
        return [module]
    children = module if isinstance(module, (list, tuple)) else getattr(module, "__dict__", {}).values()
    return [a for child in children for a in arrays(child)]

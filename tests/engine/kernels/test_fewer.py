"""Recorded steps of trellis-coded builds: fewer launches than built steps have, and their bits."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.kernels import fewer as fewer_module
from dsv41chat.engine.kernels import text_hyper
from dsv41chat.engine.kernels.fewer import fewer
from dsv41chat.engine.kernels.gpu import builders
from dsv41chat.engine.kernels.recorder import Memory, Place, Recorder, Tape
from dsv41chat.engine.kernels.replay import Replay
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.kernels.paper import TRELLISES, on_paper, paper
from tests.engine.kernels.shim import needs_compiler
from tests.engine.kernels.test_exl3_route import one_width
from tests.engine.kernels.test_gpu_route import planted, state, tokens
from tests.engine.kernels.test_replay import PROMPT, feed, put, replays
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import wo_a_slices

__all__ = ["paper"]
pytestmark = needs_compiler


def trellises(name: str):
    """As the releases' builds are: compressors stay as they were."""
    return p.plain("BF16") if "compressor" in name or "indexer.wk" in name else one_width(name)


def small(family: str, folder, full: bool = False):
    """With the streams that the kernels have, and queries wider than latents. full: compressors are trellises too."""
    outer = copy.deepcopy(p.CONFIGS[family])
    outer.get("text_config", outer).update(hc_mult=4, q_lora_rank=256, index_n_heads=2)
    parts, _ = p.encode(p.tensors(family, outer), one_width if full else trellises)
    p.write(folder, outer, p.flat(wo_a_slices(parts)), family=family)
    return build_trunk(open_pack(folder), dtype=mx.bfloat16, packed=True)


@pytest.fixture(scope="module", params=[("v41", False), ("v41", True), ("v4", True)], ids=lambda way: f"{way[0]}{' full' * way[1]}")
def trunk(request, tmp_path_factory):
    return put(small(request.param[0], tmp_path_factory.mktemp("pack"), request.param[1]))


def test_rows_have_the_bits_of_built_steps(trunk):
    """Alone and in windows, past groups that close and past choices among entries."""
    ids = list(tokens(trunk.config.vocab_size, 40))
    cuts = [PROMPT, *range(PROMPT + 1, 22), 25, 30]
    want, built, _ = feed(trunk, ids, cuts, recorded=False)
    played = trunk.routes.replay.player.played
    played.clear()
    got, target, _ = feed(trunk, ids, cuts)
    np.testing.assert_array_equal(got, want)
    assert state(target) == state(built)
    count = Counter(played)
    assert min(count[name] for name in ("hyper_joined", "exl3_latent", "exl3_join_turn", "exl3_queries")) > 0 and "exl3_join" not in played[:1]

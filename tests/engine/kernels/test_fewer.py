"""Recorded steps of trellis-coded builds: fewer launches than built steps have, and their bits."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.bench.ops import LIMIT_KERNELS
from dsv41chat.engine.kernels import attend, exl3, exl3_chains
from dsv41chat.engine.kernels import fewer as rules
from dsv41chat.engine.kernels.attend import TensorAttend
from dsv41chat.engine.kernels.exl3 import Exl3TensorMatvec
from dsv41chat.engine.kernels.exl3_chains import Exl3Project, Exl3RawRows
from dsv41chat.engine.kernels.exl3_experts import Exl3Experts
from dsv41chat.engine.kernels.fewer import fewer
from dsv41chat.engine.kernels.finish import FP8_UE8M0
from dsv41chat.engine.kernels.glue import Scatter
from dsv41chat.engine.kernels.gpu import builders
from dsv41chat.engine.kernels.hyper import Enter
from dsv41chat.engine.kernels.recorder import Memory, Place, Recorder, Tape
from dsv41chat.engine.kernels.recording import Given
from dsv41chat.engine.kernels.replay import Home, Replay
from dsv41chat.engine.nn import linear as nn
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear
from dsv41chat.engine.nn.hyper_connection import HyperConnection
from dsv41chat.engine.ops import fakequant
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.kernels.cases import Draw
from tests.engine.kernels.cases_exl3 import stack, weights
from tests.engine.kernels.paper import TRELLISES, outline
from tests.engine.kernels.play import ShimPlayer
from tests.engine.kernels.shim import needs_compiler
from tests.engine.kernels.test_exl3_route import one_width
from tests.engine.kernels.test_gpu_route import state, tokens
from tests.engine.kernels.test_replay import PROMPT, feed, put
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import wo_a_slices

pytestmark = needs_compiler
N, D = 3, 256


# whole steps ----------------------------------------------------------------------------------------------------------------


def outlined(name: str):
    """As the builds of the releases on paper are: compressors stay as they were."""
    return p.plain("BF16") if "compressor" in name or "indexer.wk" in name else one_width(name)


def small(family: str, folder, full: bool):
    """With the streams that the kernels have, and queries wider than latents. full: compressors are trellises too."""
    outer = copy.deepcopy(p.CONFIGS[family])
    outer.get("text_config", outer).update(hc_mult=4, q_lora_rank=256, index_n_heads=2)
    parts, _ = p.encode(p.tensors(family, outer), one_width if full else outlined)
    p.write(folder, outer, p.flat(wo_a_slices(parts)), family=family)
    return build_trunk(open_pack(folder), dtype=mx.bfloat16, packed=True)


# V4.1: both places in a pair, a window past the end of the ring and to the first block choice, both places again. V4: an end of both kinds of
# groups, the end of the ring, the first choice.
CUTS = {"v41": [PROMPT, 10, 11, 18, 19, 20], "v4": [PROMPT, 11, 12, 16, 19, 20, 21]}


@pytest.mark.parametrize(("family", "full"), [("v41", False), ("v4", True)], ids=["v41", "v4 full"])
def test_rows_have_the_bits_of_built_steps(family, full, tmp_path):
    """Alone and in windows, past groups that close and past choices among entries."""
    trunk = put(small(family, tmp_path, full))
    ids = list(tokens(trunk.config.vocab_size, 40))
    cuts = CUTS[family]
    want, built, _ = feed(trunk, ids, cuts, recorded=False)
    trunk.routes.replay.player.played.clear()
    got, target, _ = feed(trunk, ids, cuts)
    np.testing.assert_array_equal(got, want)
    assert state(target) == state(built)
    count = Counter(trunk.routes.replay.player.played)
    steps, layers = len(cuts) - 1, len(trunk.layers)
    assert [count[f"exl3_{name}"] for name in ("latent", "join_turn", "tensor_turn")] == [steps * layers] * 3
    assert count["hyper_joined"] > count["hyper_spread"] > 0 and (count["exl3_raw"] > 0) == full and count["exl3_queries"] > 0


@pytest.mark.parametrize("build", TRELLISES, ids=lambda build: build[0])
def test_a_step_of_a_release_in_trellises_is_short(build):
    """In the mean of steps that close a group and of others, behind a choice among entries."""
    trunk, notes = outline(*build), Recorder("cuda")
    replay = Replay(trunk, notes, None, builders(notes), {})
    lane = replay._lane()
    lane.reserve(4100)
    launches = [len(replay.record(lane, context, 1, True, False)[0].launches) for context in range(4096, 4100)]
    assert np.mean(launches) <= LIMIT_KERNELS * len(trunk.layers), launches


# pairs of launches ------------------------------------------------------------------------------------------------------------


class Pairs:
    """Operations that are noted, and what they leave; played as they are and with fewer launches."""

    def __init__(self):
        self.notes, self.d, self.results = Recorder("cuda"), Draw(71), []
        self.tape: Tape = self.notes.begin()

    def keep(self, *places: Place) -> None:
        for place in places:
            place.memory.kind = "result"
            self.results.append(place)

    def played(self, tape: Tape) -> list[bytes]:
        step = ShimPlayer().load(tape, Given(), self.results, Home({}, {}))
        step.play(0)
        return [a.tobytes() for a in step.results()]

    def entered(self, y: Place, lagged: bool) -> tuple[Place, ...]:
        d = self.d
        mix = HyperConnection(d.normal(24, 4 * D, size=0.05), d.normal(24), mx.array([1.1, 0.9, 2.0]), 4, 1e-6, 1e-6)
        enter = Enter(self.notes, mix, d.positive(D), 1e-6, lagged)
        return enter(d.rows(N, 4, D), d.positive(N, 4) if lagged else None, y, d.positive(N, 4), d.positive(N, 4, 4) / 3)

    def product(self, inputs: int = 640, outputs: int = D, groups: int = 1, biased: bool = False) -> Exl3TensorMatvec:
        module = stack(self.d, groups, inputs, outputs, "mcg", 6, biased=biased)
        return Exl3TensorMatvec(self.notes, module if groups > 1 else module[0], mx.bfloat16, 5)


def after_a_product(lagged: bool) -> Pairs:
    pairs = Pairs()
    pairs.keep(*pairs.entered(pairs.product(biased=not lagged)(pairs.d.rows(N, 640)), lagged))
    return pairs


def after_experts(packed: bool) -> Pairs:
    """packed: the shared expert is stored in another form and comes in rounded."""
    pairs = Pairs()
    d, E, I = pairs.d, 3, 256
    routed = [Exl3ExpertLinear(stack(d, E, *shape, "mcg", 6), mx.bfloat16) for shape in ((D, I), (D, I), (I, D))]
    if packed:
        shared = [nn.QuantizedLinear(d.packed((D, D), "affine", 4, 64)) for _ in range(3)]
    else:
        shared = [stack(d, 1, D, D, "mcg", 6)[0] for _ in range(3)]
    experts = Exl3Experts(pairs.notes, tuple(routed[:2]), routed[2], tuple(shared[:2]), shared[2], 2.0, processors=4)
    pairs.keep(*pairs.entered(experts(d.rows(N, D), d.chosen(2, E)[:N], d.positive(N, 2)), True))
    return pairs


def after_attention() -> Pairs:
    pairs = Pairs()
    d, H, C, W = pairs.d, 4, 128, 40
    core = TensorAttend(pairs.notes, H, C, 64, W, d.normal(H), None)
    present = mx.array(np.arange(W)[None] >= d.rng.integers(0, W, (N, 1)))
    o = core(d.rows(N, H, C), d.table(N, 64), d.rows(48, C), d.whole(0, 48, N, W), present, None, None, None)
    pairs.keep(pairs.product(H * C // 2, 128, 2)(o.reshape(N, -1)))
    return pairs


def before_a_ring(look: bool = False, part: bool = False) -> Pairs:
    """Latents and raw rows into rings, a second product of the query. look: somebody reads the ring before; part: another part begins."""
    pairs = Pairs()
    d, x = pairs.d, pairs.d.rows(N, 640)
    w = weights(d, fakequant.fp8_ue8m0)
    qr, q, kv = Exl3Project(pairs.notes, w, 64, FP8_UE8M0, 7)(x, d.table(N, 64))
    raw = Exl3RawRows(pairs.notes, *(stack(d, 1, 640, 128, "mcg", 6)[0] for _ in range(2)), None, 7)(x)
    rings = [Place(Memory("result", 8 * a.nbytes // N), (8, *a.shape[1:]), a.dtype) for a in (kv, raw)]
    if part:
        pairs.tape.parts.append(len(pairs.tape.launches))
    second = pairs.product(256)(qr)
    if look:
        pairs.keep(pairs.product(128)(rings[0][:N]))
    put = Scatter(pairs.notes)
    put.into(kv, mx.array([5, -1, 0]), rings[0])
    put.into(raw, mx.array([7, 2, -1]), rings[1])
    pairs.keep(q, second, *rings)
    return pairs


WAYS: dict[str, tuple[Callable[[], Pairs], list[str], list[str]]] = {
    "sums where they are spread": (lambda: after_a_product(True), ["exl3_join", "hyper_spread"], ["hyper_joined"]),
    "sums with a bias": (lambda: after_a_product(False), ["exl3_join", "hyper_spread"], ["hyper_joined"]),
    "slots of experts where they are spread": (lambda: after_experts(False), ["exl3_sum", "hyper_spread"], ["hyper_joined"]),
    "slots and a shared expert": (lambda: after_experts(True), ["exl3_sum", "hyper_spread"], ["hyper_joined"]),
    "attention that is turned": (after_attention, ["exl3_split"], []),
    "rows that go to their rings": (before_a_ring, ["exl3_split"] * 2 + ["scatter"] * 2, []),
}


def gone(pairs: Pairs) -> tuple[list[str], list[str]]:
    """Names of launches that are there no more, and of those that are new."""
    old, new = (Counter(x.kernel.base for x in tape.launches) for tape in (pairs.tape, fewer(pairs.tape)))
    return sorted((old - new).elements()), sorted((new - old).elements())


@pytest.mark.parametrize("way", WAYS)
def test_a_launch_that_takes_over(way):
    make, *changed = WAYS[way]
    pairs = make()
    assert gone(pairs) == tuple(map(sorted, changed))
    assert pairs.played(fewer(pairs.tape)) == pairs.played(pairs.tape)


FAULTS = {
    "a part that is lost": ("sums where they are spread", [rules], "HYPER_JOINED", "z < KZ", "z < KZ - 1"),
    "sums that are not turned": ("sums where they are spread", [rules], "HYPER_JOINED", "mix128(v, lane);", ""),
    "the other half of a run": ("sums where they are spread", [rules], "HYPER_JOINED", "(d0 & 127u) + d", "d"),
    "a bias that is lost": ("sums with a bias", [rules], "HYPER_JOINED", "if (BIAS)", "if (!BIAS)"),
    "the slots of another row": ("slots of experts where they are spread", [rules], "HYPER_JOINED", "(u64)gy * KZ + z", "(u64)z"),
    "a shared expert that is lost": ("slots and a shared expert", [rules], "HYPER_JOINED", "if (ADD)", "if (!ADD)"),
    "no rounding in between": ("slots and a shared expert", [rules], "HYPER_JOINED", "= rbf(v[i]);", "= v[i];"),
    "attention that is not rounded": ("attention that is turned", [rules, attend], "TENSOR_MERGE", "rbf(v[i]) * factor[i]", "v[i] * factor[i]"),
    "scales of another head": ("attention that is turned", [rules, attend], "TENSOR_MERGE", "[head * C + ch + i]", "[ch + i]"),
    "rows where they were": ("rows that go to their rings", [exl3_chains], "EXL3_RAW", "(u64)to * W", "(u64)gy * W"),
    "a latent where it was": ("rows that go to their rings", [rules, exl3_chains], "EXL3_LATENT", "(u64)to * C", "(u64)gy * C"),
    "one more product's scales": ("rows that go to their rings", [rules, exl3_chains], "EXL3_LATENT", "gx ? suh2 : suh", "suh"),
    "rows of another set": ("rows that go to their rings", [rules, exl3], "EXL3_SPLIT", "set == 1 ? suh3 : suh5", "set == 1 ? suh5 : suh5"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_is_taken_over(fault):
    way, modules, kernel, old, new = FAULTS[fault]
    text = getattr(modules[0], kernel)
    assert old in text.body
    with pytest.MonkeyPatch.context() as patch:
        planted = replace(text, body=text.body.replace(old, new))
        for module in modules:
            patch.setattr(module, kernel, planted)
        pairs = WAYS[way][0]()
        assert pairs.played(fewer(pairs.tape)) != pairs.played(pairs.tape)


def test_what_somebody_else_reads_stays():
    """A ring that is read before it is written; a launch of the part before; sums that are also wanted by themselves."""
    assert gone(before_a_ring(look=True)) == (["exl3_split", "exl3_split", "scatter"], [])
    assert gone(before_a_ring(part=True)) == (["exl3_split"], [])
    pairs = Pairs()
    y = pairs.product()(pairs.d.rows(N, 640))
    pairs.keep(*pairs.entered(y, True), *pairs.entered(y, False))
    assert gone(pairs) == ([], [])
    pairs = Pairs()
    y = pairs.product()(pairs.d.rows(N, 640))
    pairs.keep(y, *pairs.entered(y, True))
    assert gone(pairs) == ([], [])

"""The route of a GPU in whole trunks, with the CPU shim as its device: right, row-exact, and refused where it would be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import rowcheck
from dsv41chat.engine.errors import RouteUnavailable
from dsv41chat.engine.kernels import hyper, matrix, text_hyper
from dsv41chat.engine.kernels.gpu import gpu_route, text_digest
from dsv41chat.engine.kernels.prompt import SortedExperts
from dsv41chat.engine.kernels.routes import install
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target
from dsv41chat.nano import embedded_pack
from tests.engine.kernels.cases import Draw
from tests.engine.kernels.shim import Shim, needs_compiler
from tests.engine.v4.tiny import write_pack

pytestmark = needs_compiler
# Shapes that the kernels have, with few layers: window only, every group, a hashed router.
V4 = {
    "hidden_size": 64, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 32, "o_lora_rank": 16, "moe_intermediate_size": 32,
    "index_head_dim": 64, "num_hidden_layers": 3, "compress_ratios": [0, 4, 12, 0], "sliding_window": 32,
}  # fmt: skip
LAYERS = 3


def route(dialect: str = "metal"):
    return gpu_route(dialect, Shim(dialect), lambda: None, frozenset({"cpu"}))


def put(trunk, wanted: str = "metal", dialect: str = "metal"):
    trunk.routes = install(trunk, trunk, wanted, routes=(route(dialect),), device="cpu")
    return trunk


def nano(dtype: mx.Dtype = mx.bfloat16):
    """The first layers of the embedded pack, packed as on a GPU: window only, and an owner of pooled entries that scores them."""
    trunk = build_trunk(open_pack(embedded_pack()), dtype=dtype, packed=True, engram=False)
    for layer in trunk.layers[:LAYERS]:
        if layer.attention.indexer is not None:
            layer.attention.indexer.topk = 8  # so that few rows are enough to choose from
    return replace(trunk, layers=[replace(layer, engram=None) for layer in trunk.layers[:LAYERS]], plan=trunk.plan[:LAYERS])


def tiny_v4(folder, dtype: mx.Dtype = mx.bfloat16, changes: dict = V4):
    if not (folder / "config.json").is_file():
        write_pack(folder, changes)
    return build_trunk(open_pack(folder), dtype=dtype, packed=True, qat_sim=True)


@pytest.fixture(scope="module")
def routed_nano():
    return put(nano())


@pytest.fixture(scope="module")
def wanted() -> tuple[np.ndarray, np.ndarray]:
    """The embedded model's logits by stock operations, in float32 and in bfloat16."""
    return tuple(feed(nano(dtype), list(tokens(4000)), [0, 35])[0] for dtype in (mx.float32, mx.bfloat16))


def feed(trunk, ids, cuts) -> tuple[np.ndarray, Target]:
    target, out = Target(trunk), []
    for a, b in zip(cuts, cuts[1:]):
        trial = target.rows(ids[a:b])
        out.append(np.array(trial.logits))
        target.commit(trial, b - a)
    return np.concatenate(out), target


def state(target: Target) -> dict[str, bytes]:
    return {k: np.array(v.view(mx.uint8)).tobytes() for k, v in target.lane.state().items() if isinstance(v, mx.array)}


@cache
def tokens(vocabulary: int, count: int = 35) -> tuple[int, ...]:
    return tuple(np.random.default_rng(1).integers(3, vocabulary, count).tolist())


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def singles_and_windows(trunk, ids) -> np.ndarray:
    """Logits of a prompt of 30 and single rows, after a check that a window of 5 gives the same bits and the same state."""
    alone, one = feed(trunk, ids, [0, 30, *range(31, 36)])
    windows, five = feed(trunk, ids, [0, 30, 35])
    np.testing.assert_array_equal(alone, windows)
    assert state(one) == state(five)
    return alone


def test_the_embedded_model_by_kernels(routed_nano, wanted):
    found = routed_nano.routes.by_op()
    assert {op for op, how in found.items() if how == "metal"} >= {
        "mix", "enter", "project", "latent", "gathered", "scores", "select", "router", "experts",
    }  # fmt: skip
    assert set(found["matrix"].split("+")) == {"metal", "stock"}, "plain matrices and the experts' own ones stay"
    exact, rounded = wanted
    assert apart(singles_and_windows(routed_nano, list(tokens(4000))), exact) <= 1.5 * apart(rounded, exact)


def test_the_texts_are_part_of_what_a_state_depends_on():
    before = text_digest("metal"), text_digest("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_hyper, "HYPER_FINISH", replace(text_hyper.HYPER_FINISH, body=text_hyper.HYPER_FINISH.body + " "))
        assert text_digest("metal") != before[0] and text_digest("cuda") != before[1] and before[0] != before[1]


def test_sorted_experts_are_the_modules_experts():
    moe, d = nano(mx.float32).layers[0].moe, Draw(20)
    x, weight = d.normal(40, 256), d.positive(40, 2)
    ids = mx.array(np.sort(np.stack([d.rng.permutation(8)[:2] for _ in range(40)]), axis=1).astype(np.int32))
    assert mx.array_equal(SortedExperts(moe, (moe.w1, moe.w3, moe.w2))(x, ids, weight), moe.experts(x, ids, weight))


def test_a_prompt_on_the_matrix_unit(wanted):
    """CUDA decodes matrices and experts for wide calls; the logits of a prompt stay as close as stock's."""
    unit = Shim("cuda")
    trunk = nano()
    trunk.routes = install(trunk, trunk, "cuda", routes=(gpu_route("cuda", unit, lambda: None, frozenset({"cpu"})),), device="cpu")
    unit.launches.clear()
    exact, rounded = (a[:20] for a in wanted)
    assert apart(feed(trunk, list(tokens(4000)), [0, 20])[0], exact) <= 1.5 * apart(rounded, exact)
    count = Counter(unit.launches)
    assert count["tensor_tiles"] == 4 * LAYERS, "the shared expert is stored in another form"
    assert count["tile_order"] == count["join_picks"] == count["route"] == LAYERS, count
    assert count["decode_three"] == count["finish_two"] == LAYERS
    # The output's, and the head.
    assert count["decode_matrix"] == LAYERS + 1 and count["tensor_groups"] == LAYERS and count["tensor_spread"] == 2 * LAYERS
    assert not {"matvec", "experts_up", "tensor_experts_up"} & {*unit.launches}


def test_a_tiny_v4_by_kernels(tmp_path):
    folder = tmp_path / "v4"
    trunk = put(tiny_v4(folder), "cuda", "cuda")
    found = trunk.routes.by_op()
    assert all(found[op] == "cuda" for op in ("enter", "project", "latent", "gathered", "scores", "select", "router", "experts")), found
    ids = list(tokens(96))
    exact = feed(tiny_v4(folder, mx.float32), ids, [0, 35])[0]
    rounded = apart(feed(tiny_v4(folder), ids, [0, 35])[0], exact)
    assert apart(singles_and_windows(trunk, ids), exact) <= 1.5 * rounded


@pytest.mark.slow
def test_the_row_check_finds_every_kernel_alike(routed_nano):
    verdicts = [v for v in rowcheck.probe(routed_nano, 8) if "by metal" in v.op]
    assert len(verdicts) >= 15 and not any(v.tokenwise for v in verdicts), [str(v) for v in verdicts if v.tokenwise]


def test_shapes_and_dtypes_that_the_kernels_do_not_have_stay_stock(tmp_path):
    reasons = {c.op: c.reason for c in put(nano(mx.float32), "auto").routes.choices if c.route == "stock" and c.reason}
    assert reasons["enter"] == "metal: the kernels compute on bfloat16 rows, not float32"
    reasons = {c.op: c.reason for c in put(tiny_v4(tmp_path / "small", changes={}), "auto").routes.choices if c.reason}
    assert "are not a multiple of 64" in reasons["gathered"] and "not a multiple of 32" in reasons["experts"]


@contextmanager
def planted(module, kernel: str, old: str, new: str) -> Iterator[None]:
    text = getattr(module, kernel)
    assert old in text.body + text.helpers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, kernel, replace(text, body=text.body.replace(old, new), helpers=text.helpers.replace(old, new)))
        yield


@pytest.mark.parametrize(
    "fault",
    [
        ("matrix", matrix, "MATVEC", "asf(UMX(((DEV const u8*)sc)[i], 1u) << 23);", "1.01f * asf(UMX(((DEV const u8*)sc)[i], 1u) << 23);"),
        ("experts", matrix, "EXPERTS_DOWN", "j < S; j++", "j < S - 1; j++"),
        ("enter", hyper, "HYPER_SPREAD", "FMA(pre[gy * 4 + k], o, c)", "FMA(pre[gy * 4], o, c)"),
    ],
    ids=lambda fault: fault[0],
)
def test_a_wrong_kernel_is_refused_at_installation(fault):
    op, *where = fault
    with planted(*where):
        trunk = put(nano(), "auto")
        mine = [c for c in trunk.routes.choices if c.op == op and "are not" not in (c.reason or "") and c.reason]
        assert mine and all("from the stock operation's" in c.reason or "stays with" in c.reason for c in mine)
        assert all("metal" not in how for name, how in trunk.routes.by_op().items() if name == op)
    assert trunk.routes.by_op()["router"] == "metal", "the others are not touched"
    with planted(*where), pytest.raises(RouteUnavailable, match="from the stock operation's"):
        put(nano(), "metal")

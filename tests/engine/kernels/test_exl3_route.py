"""Trellis-coded matrices and experts in whole trunks, with the CPU shim as their device."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.kernels import joined, text_exl3_experts
from dsv41chat.engine.kernels.exl3 import Exl3Matvec, Exl3TensorMatvec
from dsv41chat.engine.kernels.exl3_experts import Exl3Experts
from dsv41chat.engine.kernels.gpu import in_float32
from dsv41chat.engine.kernels.sites import Site
from dsv41chat.engine.nn.exl3 import Exl3Stack
from dsv41chat.engine.pack.build import arrays_of, build_trunk, open_pack, outline_trunk
from tests.engine.kernels.paper import TRELLISES, on_paper, paper
from tests.engine.kernels.shim import Shim, needs_compiler
from tests.engine.kernels.test_gpu_route import apart, feed, planted, put, singles_and_windows
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES, make, release, routed

__all__ = ["paper"]
pytestmark = needs_compiler
IDS = [int(i) for i in p.IDS[:35]]


def one_width(name: str):
    """As full packs are, with another width and codebook for the shared expert."""
    if any(part in name for part in ("embed", "weights_proj")):
        return CASES["exl3-full"]["v41"](name)
    return p.exl3(4, "mul1") if "shared" in name else p.exl3(3, "mcg")


def experts_only(name: str):
    """The shared expert and all else as the release stores it."""
    return p.exl3(3, "mcg") if routed(name) else release(name)


def opened(folder, family: str, choose, dtype=mx.bfloat16):
    if not (folder / "pack").is_dir():
        make(folder, family, choose)
    return build_trunk(open_pack(folder / "pack"), dtype=dtype, packed=True, engram=family == "v41")


@pytest.mark.parametrize(("family", "dialect"), [("v41", "cuda"), ("v4", "metal")])
def test_a_trunk_of_trellises(family, dialect, tmp_path):
    trunk = put(opened(tmp_path, family, one_width), dialect, dialect)
    assert trunk.routes.by_op()["experts"] == dialect, [c for c in trunk.routes.choices if c.op == "experts"]
    exact = feed(opened(tmp_path, family, one_width, mx.float32), IDS, [0, 35])[0]
    rounded = apart(feed(opened(tmp_path, family, one_width), IDS, [0, 35])[0], exact)
    assert apart(singles_and_windows(trunk, IDS), exact) <= 1.5 * rounded


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_a_shared_expert_in_other_words(dialect, tmp_path):
    trunk = opened(tmp_path, "v41", experts_only)
    moe, want = trunk.layers[0].moe, in_float32(Site("experts", trunk.layers[0].moe, "experts", trunk))
    rng = np.random.default_rng(3)
    x = mx.array(rng.standard_normal((8, 128)).astype(np.float32)).astype(mx.bfloat16)
    ids = mx.array(np.sort(np.stack([rng.permutation(3)[:2] for _ in range(8)]), axis=1).astype(np.int32))
    weight = mx.array(rng.random((8, 2)).astype(np.float32))
    shim = Shim(dialect)
    kernel = Exl3Experts(shim, (moe.w1, moe.w3), moe.w2, (moe.shared1, moe.shared3), moe.shared2, moe.limit)
    got = kernel(x, ids, weight)
    assert apart(np.array(got.astype(mx.float32)), np.array(want(x, ids, weight).astype(mx.float32))) < 4e-3
    few = "exl3_tensor_" if dialect == "cuda" else "exl3_"
    assert shim.launches == [f"{few}turn", f"{few}up", f"{few}down", "experts_up", "experts_down", "exl3_sum"]
    for n in (1, 2, 5):
        assert mx.array_equal(kernel(x[:n], ids[:n], weight[:n]), got[:n])


def test_experts_of_mixed_widths_are_declined_and_still_right(tmp_path):
    trunk = put(opened(tmp_path, "v41", CASES["exl3-experts"]["v41"]), "auto", "cuda")
    reasons = {c.reason for c in trunk.routes.choices if c.op == "experts"}
    assert any("different widths or codebooks" in reason for reason in reasons), reasons
    exact, rounded = (feed(opened(tmp_path, "v41", CASES["exl3-experts"]["v41"], dtype), IDS, [0, 20])[0] for dtype in (mx.float32, mx.bfloat16))
    # Of most rows: a near tie sends some to other experts, in bfloat16 as well.
    middle = lambda found: float(np.median([apart(a, b) for a, b in zip(found, exact)]))
    assert middle(feed(trunk, IDS, [0, 15, 20])[0]) <= 1.5 * middle(rounded)


def test_experts_that_are_called_one_by_one_are_part_of_no_graph(tmp_path):
    # In float32 most of what MLX has compiled are texts that `test_joined` has compiled too.
    trunk = opened(tmp_path, "v41", CASES["exl3-experts"]["v41"], mx.float32)
    trunk = replace(trunk, layers=trunk.layers[:1], plan=trunk.plan[:1])
    want = feed(trunk, IDS, [0, 12, 13, 16])[0]
    joined.join(trunk)
    assert np.array_equal(feed(trunk, IDS, [0, 12, 13, 16])[0], want) and isinstance(trunk.layers[0].before, joined.Joined)


def test_experts_lie_side_by_side_once(tmp_path):
    """What a matrix is made of are views of the stack, and a layout without values has the same arrays."""
    trunk = opened(tmp_path, "v41", one_width)
    stack = trunk.layers[0].moe.w1.matrices
    assert isinstance(stack, Exl3Stack) and len(stack) == len(list(stack)) == 3
    assert isinstance(trunk.layers[0].attention.weights.wo_a.groups, Exl3Stack)
    assert mx.array_equal(stack[2].words, stack.words[2]) and mx.array_equal(stack[-1].svh, stack.svh[2])
    mx.eval(arrays_of(trunk))
    before = mx.get_active_memory()
    views = [(one.words, one.suh) for one in stack]
    mx.eval(views)
    assert mx.get_active_memory() - before < stack.words.nbytes // 4
    sizes = lambda trunk: sorted(a.nbytes for a in arrays_of(trunk.layers))
    assert sizes(outline_trunk(open_pack(tmp_path / "pack"), dtype=mx.bfloat16, packed=True)) == sizes(trunk)
    with pytest.raises(IndexError):
        stack[3]


def test_grouped_products_are_one_call_of_any_number_of_groups(tmp_path):
    weights = opened(tmp_path, "v41", one_width).layers[0].attention.weights
    shim = Shim("cuda")
    made = Exl3TensorMatvec(shim, weights.wo_a.groups)
    x = mx.random.normal((3, 256), key=mx.random.key(1)).astype(mx.bfloat16)
    assert apart(*(np.array(a.astype(mx.float32)) for a in (made(x), weights.wo_a(x.astype(mx.float32))))) < 4e-3
    assert shim.launches == ["exl3_split", "exl3_tensor"]
    assert mx.array_equal(made(x[1:2]), made(x)[1:2]) and isinstance(made, Exl3Matvec)


@on_paper(*((build, dialect) for build in TRELLISES for dialect in ("metal", "cuda")))
def test_a_decode_step_of_a_release_in_trellises(paper):
    """Four launches for the experts of a layer, none for one expert. On CUDA query and latent are one product, and two of its four products
    have their rows turned by what comes before."""
    trunk, backend, declined = paper
    assert declined.pop("matrix", set()) <= {"", "Linear stays with the stock product"} and all(reasons == {""} for reasons in declined.values())
    trunk.forward(trunk.new_lane(), [5], 300)
    count, layers, tensor = backend.launches, len(trunk.layers), "tensor_" if backend.dialect == "cuda" else ""
    assert [count[f"exl3_{name}"] for name in (f"{tensor}turn", f"{tensor}up", f"{tensor}down", "sum")] == [layers] * 4
    assert "experts_up" not in count
    if not tensor:
        assert count["exl3_matvec"] >= 5 * layers and count["exl3_rotate"] == count["exl3_matvec"]
        return
    assert count["exl3_tensor"] >= 4 * layers and count["exl3_split"] == count["exl3_tensor"] - 2 * layers
    assert count["exl3_latent"] == count["exl3_join_turn"] == layers
    # No processor of the device is left without work by a matrix of few outputs.
    assert count["exl3_join"] >= layers


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("EXL3_TENSOR_UP", "own ? z2 : suh2", "own ? z2 : svh1"),
        ("EXL3_TENSOR_DOWN", "own ? z2 : svh2", "svh2"),
        ("EXL3_SUM", "j < S; j++", "j < S - 1; j++"),
    ],
    ids=["the scales of another matrix", "the scales of another expert", "a lost slot"],
)
def test_wrong_experts_are_refused_at_installation(kernel, old, new, tmp_path):
    with planted(text_exl3_experts, kernel, old, new):
        trunk = put(opened(tmp_path, "v41", one_width), "auto", "cuda")
    mine = [c for c in trunk.routes.choices if c.op == "experts"]
    assert all(c.route == "stock" and "from the stock operation's" in c.reason for c in mine), mine

"""The speed arms on builds of seconds: what they write, that random builds are read as the release is, that their ids agree."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat import cli
from dsv41chat.bench import arms, decode, equality, ops, prefill, receipt, shapes, verify_cost, weights
from dsv41chat.bench.equality import compare
from dsv41chat.bench.peer import Peer
from dsv41chat.engine.engine import open_engine
from dsv41chat.engine.errors import EngineError
from dsv41chat.engine.kernels.compiled import Graph, as_graphs
from dsv41chat.engine.ops import exl3
from dsv41chat.engine.ops.blocks import HOST_BYTES
from dsv41chat.engine.pack.build import arrays_of, build_trunk, open_pack, outline_trunk
from dsv41chat.nano import embedded_pack


def run(arm, tmp_path, *words: str) -> dict:
    assert run_code(arm, tmp_path, *words) == 0
    return json.loads((tmp_path / "receipt.json").read_text())


def run_code(arm, tmp_path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    arm.add_options(parser)
    return arm.run_options(parser.parse_args([*words, "-o", str(tmp_path / "receipt.json")]))


SMALL = ("--shape", "nano", "--layers", "4", "--experts", "4", "--routes", "auto", "stock")


def test_decode(tmp_path):
    found = run(decode, tmp_path, *SMALL, "--context", "20", "--steps", "4")
    assert found["command"].startswith("dsv41chat bench decode --shape nano --layers 4") and "receipt" not in found["command"]
    mine = found["arms"]
    assert mine["auto"]["ids_hash"] == mine["stock"]["ids_hash"] and mine["auto"]["step_ms"]["count"] == 4
    assert found["routes"]["stock"]["identity"] == "stock" and found["build"]["layers"] == 4 and not found["build"]["engram"]
    assert found["distinct_experts"]["one_row"] == 2 and found["distinct_experts"]["19_rows"] > 3


def test_long_context(tmp_path):
    found = run(decode, tmp_path, "--shape", "nano", "--layers", "6", "--experts", "4", "--context", "20", "--steps", "2", "--cached", "600", "9600")
    short, long = found["long_context"]["auto"].values()
    assert short["state_bytes"] < long["state_bytes"] and all(v["planned_state_bytes"] > 0.5 * v["state_bytes"] for v in (short, long))
    assert long["planned_state_bytes"] >= long["state_bytes"], "a buffer is rounded up to a block, which counts in a short context"
    (peaks,) = (v for name, v in found["bars"].items() if name.startswith("auto: peak bytes of a chunk at 9,600"))
    assert peaks == round(long["chunk_peak_bytes"] / short["chunk_peak_bytes"], 3)
    assert long["chunk_peak_bytes"] - short["chunk_peak_bytes"] < HOST_BYTES


def test_prefill_and_verify_cost(tmp_path):
    found = run(prefill, tmp_path, *SMALL, "--tokens", "150", "--repeats", "1", "--chunks", "128", "256")
    assert set(found["lengths"]["150"]["seconds"]) == {"auto", "stock"} and found["lengths"]["150"]["chunk"]["auto"] in (128, 256)
    found = run(verify_cost, tmp_path, *SMALL, "--context", "20", "--steps", "2")
    assert set(found["arms"]["stock"]["c"]) == {"1", "2", "3", "4", "5"} and found["arms"]["auto"]["parts_c"]["dense"]


def test_random_builds_of_release_shapes_are_laid_out_without_values():
    for shape in ("v41", "v4"):
        pack = shapes.outline_pack(shape, layers=4, experts=8)
        trunk = outline_trunk(pack, dtype=mx.bfloat16, packed=True)
        before = mx.get_active_memory()
        mx.eval(arrays_of(trunk))
        assert mx.get_active_memory() - before < 64 << 20, "a layout takes no memory"
        assert trunk.layers[0].moe.w1.packed.weight.shape[0] == 8


def test_trellises_against_affine_matrices_of_one_shape(tmp_path):
    """Both builds' arms in one run, and what a random build of trellises holds."""
    a, b = (str(tmp_path / name) for name in ("trellis", "affine"))
    for words in ((a, "--form", "exl3"), (b,)):
        parser = argparse.ArgumentParser()
        weights.add_options(parser)
        assert weights.run_options(parser.parse_args([*words, "--shape", "nano", "--layers", "3", "--experts", "4"])) == 0
    pack = open_pack(tmp_path / "trellis")
    assert pack.formats["exl3 3 3inst"] >= 5 and not pack.notes
    laid = shapes.outline_pack("nano", 3, 4, 3, "exl3").index.tensors
    assert {k: (v.shape, v.dtype) for k, v in laid.items()} == {k: (v.shape, v.dtype) for k, v in pack.index.tensors.items()}
    found = run(decode, tmp_path, "--build", a, "--against", b, "--context", "10", "--steps", "3")
    assert set(found["arms"]) == {"auto", "auto of affine"} and found["against"]["formats"]["affine 4 g64"] > 10
    assert "auto over auto of affine, layers only" in found["bars"] and "--build trellis --against affine" in found["command"]
    assert run_code(decode, tmp_path, "--build", a, "--against", str(shapes.write_pack(tmp_path / "c", "nano", 2, 4, 4))) == 2


def test_words_of_trellises_have_the_size_of_other_weights(tmp_path):
    rng = np.random.default_rng(1)
    part = shapes._trellis((2, 256, 512), 3, rng, quiet=32)
    words = mx.array(np.array(part["trellis"])[1].view(np.uint32))
    w = np.array(exl3.dense(words, "3inst", part["suh"][1], part["svh"][1]))
    assert w.shape == (256, 512) and not w[:32].any() and 0.9 < w[32:].std() * 512**0.5 < 1.1 and abs(w.mean()) < 1e-3
    again = shapes._trellis((2, 256, 512), 3, np.random.default_rng(1), quiet=32)
    assert all(mx.array_equal(part[leaf], again[leaf]) for leaf in part), "a seed gives the same words"


def test_a_quantised_random_build_is_read_and_spread(tmp_path):
    folder = shapes.write_pack(tmp_path / "b", "nano", 4, 8, 4)
    engine = open_engine(folder)
    assert engine.pack.formats["affine 4 g64"] > 100 and not engine.pack.notes
    assert arms.distinct_experts(engine, arms.prompt(engine, 65))["64_rows"] > 7
    first, again = (open_pack(shapes.write_pack(tmp_path / str(i), "nano", 2, 4, 4)).fingerprint for i in range(2))
    assert first == again, "a seed gives the same build"
    layers = engine.trunk.layers
    assert not mx.array_equal(layers[0].moe.w1.packed.weight, layers[1].moe.w1.packed.weight).item(), "layers differ"


def test_ids_that_end_an_answer_are_never_the_likeliest(tmp_path):
    trunk = build_trunk(open_pack(shapes.write_pack(tmp_path / "b", "nano", 2, 4, 32)))
    from dsv41chat.engine.target import Target

    logits = np.array(Target(trunk).rows(list(range(50, 90))).logits)
    assert (logits[:, :32] == 0).all() and (logits.argmax(axis=1) >= 32).all()


def test_primitives_are_counted_from_the_graph():
    x = mx.ones((3, 3))
    mx.eval(x)
    assert ops.primitives([mx.exp(x) @ x, mx.exp(x)])["Matmul"] == 1
    one = mx.exp(x)
    assert sum(ops.primitives([one, one @ x]).values()) == 2, "a shared node is counted once"


def test_compiled_blocks_cut_the_graph(tmp_path):
    found = run(ops, tmp_path, "--shape", "nano", "--bits", "32", "--dtype", "float32", "--context", "64")["counts"]
    assert found["nano, compiled"]["mean_per_layer"] < 0.6 * found["nano, stock"]["mean_per_layer"]


@pytest.mark.parametrize("shape", ["v41", "v4"])
def test_a_release_layer_stays_within_its_primitives(shape):
    """spec: performance, P4: at most 350 with compiled blocks. The first layers have every kind but what a closed group adds."""
    trunk = outline_trunk(shapes.outline_pack(shape, layers=9, experts=8), dtype=mx.bfloat16, packed=True)
    mx.eval(arrays_of(trunk))
    as_graphs(trunk)
    found = ops.count(trunk, 512, ops.LIMIT_COMPILED)
    assert found["mean_per_layer"] <= found["limit"] == 350, found["first_layers"]


def test_a_compiled_operation_is_traced_once_per_shape():
    """Positions and lengths enter as arrays; many steps leave one trace, another number of rows makes one more."""
    trunk = outline_trunk(shapes.outline_pack("nano", layers=2, experts=4, bits=32), dtype=mx.float32)
    mx.eval(arrays_of(trunk))
    layer = trunk.layers[0]
    graph = Graph(layer.attention.weights.project)
    for n in (1, 1, 3, 1, 3):
        for position in range(5):
            table = tuple(mx.full((n, 16), position + i, mx.float32) for i in range(2))
            graph(mx.zeros((n, 256)), table)
    assert list(graph.traced.values()) == [2]


def test_an_arm_without_its_peer_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlx_lm.generate", None)
    parser = argparse.ArgumentParser()
    decode.add_options(parser)
    assert decode.run_options(parser.parse_args([*SMALL, "--peer", "mlx-lm", "--context", "8", "--steps", "1", "-o", str(tmp_path / "r.json")])) == 2
    assert "pip install mlx-lm" in capsys.readouterr().err


@pytest.mark.oracle
def test_layers_equal_the_peers(tmp_path):
    pytest.importorskip("mlx_lm.models.deepseek_v41")
    found = run(decode, tmp_path, *SMALL, "--peer", "mlx-lm", "--context", "70", "--steps", "3")
    assert found["equality"]["worst"] < 1e-4 and found["equality"]["rows_with_other_experts"] == 0


def test_weights_for_several_runs(tmp_path, capsys):
    folder = tmp_path / "b"
    words = ["bench", "weights", str(folder), "--shape", "nano", "--layers", "2", "--experts", "4"]
    assert cli.main(words).code == 0 and cli.main(words).code == 2
    assert shapes.made_as(folder) == {"shape": "nano", "layers": 2, "experts": 4, "bits": 4, "seed": 0, "form": "affine", "drafter": None}
    found = run(decode, tmp_path, "--build", str(folder), "--context", "10", "--steps", "2")
    assert found["build"]["random"]["layers"] == 2 and str(tmp_path) not in str(found)


@pytest.mark.oracle
def test_layers_of_v4_equal_the_peers(tmp_path, monkeypatch):
    """Every kind of layer and the head, float32, on small random weights: groups of 4 with picked entries, one group of 128, hashed experts."""
    monkeypatch.setattr(socket, "has_ipv6", False)  # a library of the peer's tries a socket when it is imported
    pytest.importorskip("mlx_vlm.models.deepseek_v4")
    small = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 128, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 4, "vocab_size": 1024}
    small |= {"moe_intermediate_size": 128, "index_n_heads": 8, "index_topk": 32}
    for key, value in small.items():
        monkeypatch.setitem(shapes._V4, key, value)
    folder = shapes.write_pack(tmp_path / "b", "v4", 5, 8, 32)
    engine = open_engine(folder, routes="stock")
    found = compare(engine, Peer("mlx-vlm", folder), arms.prompt(engine, 200))
    assert set(found["relative_l2"]) == {"window, hashed", "ratio 4, scoring, hashed", "ratio 128", "ratio 4, scoring", "head"}
    assert found["worst"] < 1e-5 and found["rows_with_other_experts"] == 0 and found["to_float32"] is None
    half = open_engine(folder, routes="stock", dtype="bfloat16")
    monkeypatch.setattr(equality, "LIMIT", 1e-4)
    found = compare(half, Peer("mlx-vlm", folder), arms.prompt(engine, 200))
    far = found["to_float32"]["window, hashed"]
    assert 1e-4 < found["worst"] and far["peer"] < 1e-3 < far["own"], "the peer computes in what the weights are stored in, float32 here"


def test_a_peer_that_refuses_a_build_is_told(tmp_path, monkeypatch):
    """Such as one with a drafter, whose tensors the peer does not know."""

    def refuses(folder):
        raise ValueError("Received 3 parameters not in model:\nmtp.0.a,\nmtp.0.b")

    stand_in = {"mlx_lm": {}, "mlx_lm.generate": {"generate_step": None, "generation_stream": None}, "mlx_lm.utils": {"load_model": refuses}}
    for name, parts in stand_in.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))
    with pytest.raises(EngineError, match="mlx-lm does not open this build: Received 3 parameters not in model:$") as refusal:
        Peer("mlx-lm", tmp_path)
    assert "--drafter" in refusal.value.hint


def test_a_build_without_a_graph_is_not_counted(tmp_path, capsys):
    """On a CPU the embedded model is computed in numpy: nothing counted must not pass for few."""
    if "blas" in open_engine(embedded_pack()).trunk.routes.names:
        assert run_code(ops, tmp_path, "--build", "nano", "--routes", "auto") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "nano is computed by numpy here" in line and line.endswith("try dsv41chat bench ops --build nano --routes stock compiled")
        counts = run(ops, tmp_path, "--build", "nano")["counts"]
        assert list(counts) == ["nano, stock", "nano, compiled"] and all(found["whole_step"] > 500 for found in counts.values())
        assert "nano is computed by numpy here" in capsys.readouterr().err
    assert run_code(ops, tmp_path, "--build", "nano", "--routes", "stock") == 0


def test_the_bars_of_primitives_stand_where_they_apply(tmp_path):
    """spec: performance, P4: bars for compiled graphs and for kernels; the stock operations one by one have none."""
    bars = run(ops, tmp_path, "--build", "nano", "--routes", "stock", "compiled")["bars"]
    assert list(bars) == ["nano, stock: mean per layer", "nano, compiled: mean per layer, at most 350"]
    bars = run(ops, tmp_path, "--shape", "nano", "--context", "64")["bars"]
    assert list(bars) == ["nano, stock: mean per layer", "nano, compiled: mean per layer, at most 350"]
    assert [ops.limit_of(names) for names in ((), ("compiled",), ("cuda",), ("compiled", "metal"))] == [None, 350, 25, 25]
    assert run_code(ops, tmp_path, "--shape", "nano", "--routes", "auto") == 2, "without weights nothing is installed"


def test_receipts_stay_out_of_an_installed_package(tmp_path, monkeypatch, capsys):
    words = ["bench", "ops", "--shape", "nano", "--routes", "stock", "--context", "64"]
    assert receipt.receipts_folder() == receipt.RECEIPTS, "in a checkout they are part of it"
    monkeypatch.setattr(receipt, "RECEIPTS", tmp_path / "site-packages" / "dsv41chat" / "bench" / "receipts")
    places = {(): Path(os.environ["XDG_STATE_HOME"]) / "dsv41chat", ("--data-dir", str(tmp_path / "data")): tmp_path / "data" / "state"}
    if sys.platform != "linux":
        del places[()]
    for option, state in places.items():
        assert cli.main([*option, *words]).code == 0
        path = Path(capsys.readouterr().out.splitlines()[-1])
        assert path.parent == state / "bench" and json.loads(path.read_text())["what"].startswith("primitives")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "-o", "here"]).code == 0
    first = Path(capsys.readouterr().out.splitlines()[-1])
    assert first.parent == tmp_path / "here"
    kept = receipt.write_receipt(tmp_path / "here", "ops", {"later": 1})
    assert kept.name == f"{first.stem}-2.json" and "later" not in json.loads(first.read_text()), "no receipt takes another's place"
    assert not (tmp_path / "site-packages").exists()

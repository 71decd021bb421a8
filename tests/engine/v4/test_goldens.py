"""The V4 trunk against goldens made with another program: values, layer by layer, one shot and streamed."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import verify_goldens
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.v4 import golden as g
from tests.engine.v4 import tiny

PRO_LAYOUT = {"compress_ratios": [12, 12, 4, 12], "num_hash_layers": 3, "index_n_heads": 16, "hc_sinkhorn_iters": 20, "routed_scaling_factor": 2.5}


def test_one_shot_logits(oneshot, golden):
    logits = np.array(oneshot[0].logits)
    assert np.abs(logits[golden["positions"]] - golden["logits"]).max() <= g.ATOL
    assert (logits.argmax(-1) == golden["argmax"]).all()


def test_every_layer(oneshot, golden):
    at, seen = golden["positions"], oneshot[2]
    compared = 0
    for i in range(6):
        for half in ("attn_out", "ffn_out"):
            name = f"layer{i}.{half}"
            assert np.abs(np.array(seen[name])[at] - golden[name]).max() <= g.ATOL, name
            compared += 1
    for name, value in zip(("hc_pre", "hc_post", "hc_comb"), seen["layer0.hc"]):
        assert np.abs(np.array(value)[at] - golden[f"layer0.{name}"]).max() <= g.ATOL, name
        compared += 1
    assert compared == 15


def test_streams_are_what_drafters_tap(oneshot, trunk, golden, ids):
    """MTP reads the streams after the last layer, DSpark the mean over the streams after each tapped layer."""
    at, trial = golden["positions"], oneshot[0]
    assert np.abs(np.array(trial.streams)[at] - golden["layer5.streams"]).max() <= g.ATOL
    assert g.same_bits(np.array(trial.taps), np.array(trial.streams).reshape(len(ids), -1))
    tapped = replace(trunk, tap_layers=(1, 3, 4))
    taps = np.array(g.Target(tapped).rows(ids, logits_from=None, want_taps=True).taps)
    want = np.concatenate([golden[f"layer{i}.streams"].mean(1) for i in (1, 3, 4)], axis=-1)
    assert np.abs(taps[at] - want).max() <= g.ATOL


def test_pooled_rows_and_selection(oneshot, golden):
    _, lane, seen = oneshot
    for name, buffer in (("layer1.comp_rows", "pool.1"), ("layer2.comp_rows", "pool.2"), ("layer1.index_rows", "keys.1")):
        rows = np.array(lane.buffers[buffer])[: len(golden[name])]
        assert np.abs(rows - golden[name]).max() <= g.ATOL, name
    index, present = (np.array(v) for v in seen["layer1.picked"])
    for row, position in enumerate(golden["positions"]):
        assert set(index[position][present[position]]) == set(np.flatnonzero(golden["layer1.index_selected"][row])), position


@pytest.mark.parametrize("layer", [0, 2])
def test_routes(oneshot, golden, layer):
    ids, weights = (np.array(v)[golden["positions"]] for v in oneshot[2][f"layer{layer}.route"])
    want, want_weights = golden[f"layer{layer}.route_index"], golden[f"layer{layer}.route_weight"]
    order = np.argsort(want, axis=-1)
    assert (ids == np.take_along_axis(want, order, -1)).all()
    assert np.abs(weights - np.take_along_axis(want_weights, order, -1)).max() <= g.ATOL


def test_decode_after_chunks(trunk, golden, ids, oneshot):
    """The file's chunks, then one token at a time; index rows, pooled rows and n // ratio never part."""
    chunks = golden["chunks"].tolist()

    def counts(target):
        for p in trunk.plan:
            if p.ratio:
                state = target.lane.state()
                held = [len(state[name]) if name in state else 0 for name in (f"pool.{p.index}", *([f"keys.{p.index}"] if p.scores else []))]
                assert set(held) == {target.n // p.ratio}

    logits, _ = g.feed(trunk, ids, chunks + [1] * (len(ids) - sum(chunks)), seen=counts)
    assert np.abs(logits[sum(chunks) :] - golden["logits_decode"]).max() <= g.ATOL
    assert g.same_bits(logits, np.array(oneshot[0].logits))


def test_verify_command_on_the_golden_pack(golden, tmp_path):
    """One shot, chunks of 7 and 128, the file's own chunks, and token by token, all within 2e-4; of the sequence to past a group of 128."""
    near = golden["positions"] < 130
    short = {"input_ids": golden["input_ids"][:130], "positions": golden["positions"][near], "logits": golden["logits"][near]}
    short["chunks"] = golden["chunks"][:4]
    mx.save_safetensors(str(tmp_path / "short.safetensors"), {name: mx.array(value) for name, value in short.items()})
    report = verify_goldens(g.FOLDER, tmp_path / "short.safetensors", dtype="float32", atol=g.ATOL, chunks=(7, 128))
    assert report.ok, report
    assert {(c.name, c.mode) for c in report.checks} == {
        ("logits", "one-shot"), ("logits (chunks)", "chunks"), ("logits (pieces of 7)", "chunks"), ("logits (pieces of 128)", "chunks"),
        ("logits", "decode"),
    }  # fmt: skip
    assert all(c.top1 == 1.0 and c.hard for c in report.checks)


def test_layout_of_pro(tmp_path):
    """No window-only layer, heavy ones first (ratio 12 here), three hashed layers: logits of a float64 program, streamed too."""
    tiny.write_pack(tmp_path, PRO_LAYOUT, seed=5)
    report = verify_goldens(tmp_path, g.FOLDER / "pro_layout.safetensors", atol=g.ATOL, chunks=(7, 64))
    assert report.ok and len(report.checks) == 4 and all(c.hard and c.n == 30 for c in report.checks)
    tiny.write_pack(tmp_path / "other", PRO_LAYOUT | {"compress_ratios": [12, 12, 4, 13]}, seed=5)
    assert not verify_goldens(tmp_path / "other", g.FOLDER / "pro_layout.safetensors", atol=g.ATOL).ok


def test_simulated_rounding():
    """Short sequences with the release's rounding, from a float64 program of its own: one value at a rounding midpoint moves a row,
    so most sequences agree and not all. Without the rounding none does."""
    file = g.FOLDER / "qat_sim.safetensors"
    (check,) = verify_goldens(g.FOLDER, file, dtype="float32").checks
    assert check.name == "short_logits.qat_sim" and check.hard and check.ok and check.n == 16
    trunk, short = build_trunk(open_pack(g.FOLDER)), {k: np.array(v) for k, v in mx.load(str(file)).items()}
    for row, want in zip(short["short_ids"], short["short_logits.qat_sim"]):
        logits, _ = g.feed(trunk, row.tolist(), [len(row)])
        assert np.abs(logits[short["short_positions"]] - want).max() > 0.1


def test_bfloat16(pack, golden, ids):
    """Most argmaxes survive, and nothing but the listed float32 places is wider than the model."""
    trunk = build_trunk(pack, dtype=mx.bfloat16)
    watched, seen = g.recorded(trunk)
    target = g.Target(watched)
    trial = target.rows(ids, want_taps=True)
    target.commit(trial, trial.count)
    logits = np.array(trial.logits)
    assert (logits.argmax(-1) == golden["argmax"]).sum() >= 300
    assert np.abs(logits[golden["positions"]] - golden["logits"]).mean() <= 0.3
    assert {str(v.dtype) for k, v in seen.items() if k.endswith("_out")} == {"mlx.core.bfloat16"}
    assert trial.streams.dtype == trial.taps.dtype == mx.bfloat16
    wide = {name for name, spec in target.lane.specs.items() if spec.dtype == mx.float32}
    assert wide == {name for name in target.lane.specs if name.startswith("raw")}
    for name, spec in target.lane.specs.items():
        assert target.lane.buffers[name].dtype == spec.dtype, name
    layer = trunk.layers[3]
    kept = [layer.attention.weights.sink, layer.attn_mix.fn, layer.attn_mix.base, layer.attn_mix.scale, layer.attention.compressor.ape]
    kept += [layer.moe.bias, trunk.head_mix.fn]
    assert {v.dtype for v in kept} == {mx.float32}
    assert {v.dtype for v in (trunk.embed, trunk.head.weight, layer.attention.weights.wq_b.weight, layer.moe.shared1.weight)} == {mx.bfloat16}

"""The trainer at toy length on the CPU; needs torch, which only the trainer may import."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from dsv41chat.nano import embedded_pack, export
from tests.nano.small_facts import folder

torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_it_learns_and_goes_on_where_it_stopped(tmp_path):
    """24 steps of 512 tokens bring the loss well down; a second command goes on from the state; the shards are a readable pack."""
    data, out, state = folder(tmp_path), tmp_path / "out", tmp_path / "state"
    (data / "corpus.json").write_text("{}")
    command = [sys.executable, "-m", "dsv41chat.nano.train", "--tiny", "--workers", "1", "--data", str(data), "--out", str(out)]
    command += ["--state", str(state)]
    first = [*command, "--steps", "24", "--log-every", "6", "--long-every", "5", "--total", "100000"]
    subprocess.run(first, check=True, capture_output=True, timeout=900)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [d["lm"] for d in log if "step" in d]
    assert losses[-1] < 0.75 * losses[0] and np.isfinite(losses).all()
    weights, bias = export.read_weights(out)
    assert all(np.isfinite(v).all() for v in (*weights.values(), *bias.values()))
    subprocess.run([*command, "--steps", "26", "--resume", "--log-every", "1"], check=True, capture_output=True, timeout=900)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert any(d.get("resumed") == 24 for d in log) and [d["step"] for d in log if "step" in d][-2:] == [25, 26]


@pytest.mark.slow
def test_it_goes_on_from_a_pack_and_exports_its_best_state(tmp_path):
    """Four steps on the weights that ship: the loss starts where theirs is, the papers are written, and the export is no worse than the start."""
    data, out = folder(tmp_path), tmp_path / "out"
    (data / "corpus.json").write_text("{}")
    command = [sys.executable, "-m", "dsv41chat.nano.train", "--tiny", "--workers", "1", "--data", str(data), "--out", str(out)]
    command += ["--start", str(embedded_pack()), "--mix", "missed", "--lr", "1e-4", "--steps", "4", "--log-every", "1", "--long-every", "3"]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [d for d in log if "step" in d][0]["lm"] < 2  # random weights begin at 8.3
    looks = [d["standing"] for d in log if "quick" in d]
    assert len(looks) == 4 and max(looks) == next(d["standing"] for d in log if "exported" in d)
    assert set(json.loads((out / "eval.json").read_text())["trainer"]["sets"]) == {"definitions", "sums_chat"}
    weights, _ = export.read_weights(out)
    assert all(np.isfinite(v).all() for v in weights.values())


def test_rounding_in_the_trainer_is_the_exporters(tmp_path):
    from dsv41chat.nano import model

    start, _ = export.read_weights(embedded_pack())
    net = model.Model(list(range(4096)), 4082)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for name, value in start.items():
            net.p[name].copy_(torch.from_numpy(value * (1 + 0.1 * rng.standard_normal(value.shape).astype(np.float32))))
    masters = {k: v.detach().numpy().copy() for k, v in net.p.items()}
    export.write_weights(tmp_path, masters, {k: v.numpy() for k, v in net.bias.items()})
    stored, _ = export.read_weights(tmp_path)
    keep = net.round_weights()
    for name in keep:
        assert np.array_equal(net.p[name].detach().numpy(), stored[name]), name
    net.restore(keep)
    assert all(np.array_equal(net.p[k].detach().numpy(), masters[k]) for k in masters)

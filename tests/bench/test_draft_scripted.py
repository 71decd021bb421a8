"""Random builds with a drafter, and drafted decode with a scripted acceptance on them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsv41chat import cli
from dsv41chat.bench import shapes
from dsv41chat.bench.draft_scripted import ScriptedDrafter, Seen, measure, usual_seconds
from dsv41chat.engine.draft.base import PlainDrafter, Proposal
from dsv41chat.engine.draft.depth import RoundTimes
from dsv41chat.engine.engine import open_engine
from dsv41chat.engine.sampling import SamplingParams
from dsv41chat.engine.target import Target

SMALL_V4 = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2,
    "vocab_size": 512, "moe_intermediate_size": 64, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 16, "sliding_window": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    "shape, drafter, found",
    [
        # As the releases have it: block, stages, experts, picks, taps of a trunk of 6 layers, parameters.
        ("v41", "own", ("dspark", 5, 3, 128, 3, (3, 4, 5), 14_225_362_530)),
        ("v4", "own", ("mtp", 3, 1, 256, 6, (), None)),
        ("v4", "dspark", ("dspark", 5, 3, 256, 6, (3, 4, 5), None)),
    ],
)
def test_a_drafter_of_a_release_s_shape(shape, drafter, found):
    """Headers only: every tensor that the release's drafter has, in the trunk's quantisation."""
    pack = shapes.outline_pack(shape, layers=6, drafter=drafter)
    plan = pack.found.plan
    assert pack.found.fault is None and not pack.found.notes
    assert (plan.kind, plan.block, len(plan.prefixes), plan.experts, plan.picks, plan.taps) == found[:6]
    values = sum(int(np.prod(want.shape)) for want in plan.expected.values())
    if found[6]:
        # The release counts an image bias per stage besides.
        assert values + 3 * 128 == found[6]
    expert, trunk = ({n.split(".", 2)[2]: r.dtype for n, r in pack.index.tensors.items() if n.startswith(p)} for p in ("mtp.0.", "layers.4."))
    shared = expert.keys() & trunk.keys()
    assert "ffn.experts.0.w1.scales" in shared and all(expert[n] == trunk[n] for n in shared)


def test_fewer_layers_and_experts_than_the_drafter_wants(tmp_path):
    text = shapes.config_of("v41", 2, 2, "own")["text_config"]
    assert text["dspark_target_layer_ids"] == [0, 1] and text["dspark_n_routed_experts"] == text["dspark_num_experts_per_tok"] == 2
    plain, drafted = (shapes.write_pack(tmp_path / str(d), "nano", 2, 4, 4, drafter=d) for d in (None, "own"))
    for file in ("model-000.safetensors", "model-001.safetensors", "model-head.safetensors"):
        assert (plain / file).read_bytes() == (drafted / file).read_bytes(), "the trunk is the same with a drafter and without"
    assert {f.name for f in drafted.glob("model-draft*")} == {"model-draft-000.safetensors", "model-draft-001.safetensors"}
    engine = open_engine(drafted)
    assert engine.drafting.block == 5 and engine.drafting.kind == "dspark" and shapes.made_as(drafted)["drafter"] == "own"
    assert open_engine(plain).drafting.block == 0


class Counting(PlainDrafter):
    """Proposes nonsense and counts its calls."""

    kind, block, window, needs_taps = "counting", 3, 16, True

    def __init__(self):
        self.passes, self.rows = 0, 0

    def ingest(self, taps, first_pos, next_tokens):
        self.rows += len(next_tokens)

    def propose(self, pending, n, want, sampling):
        self.passes += 1
        return Proposal((7,) * want, (0.5,) * want)


def test_only_the_ids_of_a_drafter_are_replaced():
    text = list(range(100, 300))
    inner = Counting()
    scripted = ScriptedDrafter(inner, text, 0.75, 1, 4096)
    ids = [scripted.propose(0, n, 1, SamplingParams()).ids[0] for n in range(len(text) - 1)]
    hits = sum(mine == true for mine, true in zip(ids, text[1:]))
    assert inner.passes == len(ids) and 0.65 < hits / len(ids) < 0.85 and all(40 <= i < 4096 - 40 for i in ids)
    proposal = scripted.propose(0, 4, 3, SamplingParams())
    assert proposal.ids == (ids[4], ids[5], ids[6]), "a position's luck is the same at every depth"
    assert proposal.confidence == pytest.approx((np.log(3),) * 3)
    assert len(scripted.propose(0, 198, 3, SamplingParams()).ids) == 3, "a pass past the end of what is known"
    scripted.ingest(None, 0, (1, 2))
    assert inner.rows == 2


def test_slow_first_rounds_do_not_count():
    rounds = [Seen(rows, True, RoundTimes(1, 1, s)) for rows, s in ((4, 90.0), (4, 2.0), (4, 2.0), (1, 1.0), (1, 1.0), (1, 1.0), (2, 70.0))]
    assert usual_seconds(rounds) == 3 * 2 + 3 * 1 + 2, "one of two rows, seen once, as the dearest other"
    recorded = [Seen(3, True, RoundTimes(1, 1, 60.0, True)), *(Seen(3, True, RoundTimes(1, 1, 4.0)) for _ in range(3))]
    assert usual_seconds(recorded) == 4 * 4 and usual_seconds(recorded[:1]) == 60


def test_the_command(tmp_path, capsys):
    folder, receipt = tmp_path / "b", tmp_path / "r.json"
    assert cli.main(["bench", "weights", str(folder), "--shape", "nano", "--layers", "2", "--experts", "4", "--drafter"]).code == 0
    words = ["bench", "draft", "--build", str(folder), "--acceptance", "0", "0.7", "1", "--context", "20", "--steps", "24", "--repeats", "1"]
    assert cli.main([*words, "--output", str(receipt)]).code == 0
    found = json.loads(receipt.read_text())
    assert found["build"]["random"]["drafter"] == "own" and found["context"] == 20 and str(tmp_path) not in str(found)
    assert found["bars"]["all arms gave plain decode's ids"] is True and found["drafter"]["stages"] == 2
    assert found["distinct_experts"]["one_row"] == 2
    never, some, always = (found["rates"][rate] for rate in ("0.0", "0.7", "1.0"))
    assert list(some) == ["off", "1", "2", "3", "5", "auto"] and len(found["calibrated_ms"]["rows"]) == 6
    assert all(arm["tokens"] == 24 for arm in some.values()) and some["off"]["draft_ms"] is None
    for depth in (1, 2, 3, 5):
        arm = always[str(depth)]
        assert arm["acceptance"] == 1 and arm["rounds"] == -(-24 // (depth + 1)) and arm["draft_ms"]["count"] >= arm["rounds"] - 1
        assert never[str(depth)]["acceptance"] == 0 and never[str(depth)]["tokens_per_verify"] == 1
    assert 0 < some["3"]["acceptance"] < 1 and some["3"]["rounds_by_rows"]["4"] > 3
    assert cli.main(["bench", "draft", "--acceptance", "1.5"]).code == 2
    shapes.write_pack(tmp_path / "plain", "nano", 2, 4, 4)
    assert cli.main(["bench", "draft", "--build", str(tmp_path / "plain"), "--acceptance", "1"]).code == 2
    assert "bench weights --drafter" in capsys.readouterr().err


def test_windows_that_break_their_contract_are_an_error(tmp_path, capsys, monkeypatch):
    rows = Target.rows

    def spoiled(self, ids, *args, **options):
        trial = rows(self, ids, *args, **options)
        if len(ids) == 3 and trial.logits is not None:
            trial.logits = np.array(trial.logits)[:, ::-1]
        return trial

    monkeypatch.setattr(Target, "rows", spoiled)
    folder = shapes.write_pack(tmp_path / "b", "nano", 2, 4, 4, drafter="own")
    words = ["bench", "draft", "--build", str(folder), "--acceptance", "1", "--context", "20", "--steps", "8", "--repeats", "1"]
    assert cli.main([*words, "--output", str(tmp_path / "r.json")]).code == 1
    assert "do not give plain decode's ids" in capsys.readouterr().err
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["bars"]["all arms gave plain decode's ids"] is False and {d["mode"] for d in found["differing"]} >= {2}


@pytest.mark.parametrize("drafter, kind, block", [("own", "mtp", 3), ("dspark", "dspark", 5)])
def test_both_drafters_of_v4(tmp_path, monkeypatch, drafter, kind, block):
    """Every depth and rate on a build of a few narrow layers."""
    for key, value in SMALL_V4.items():
        monkeypatch.setitem(shapes._V4, key, value)
    monkeypatch.setitem(shapes._0731, "dspark_noise_token_id", 500)
    engine = open_engine(shapes.write_pack(tmp_path / "b", "v4", 5, 8, 4, drafter=drafter))
    assert (engine.drafting.kind, engine.drafting.block) == (kind, block)
    seen, propose = [], ScriptedDrafter.propose
    monkeypatch.setattr(ScriptedDrafter, "propose", lambda self, *args: seen.append(propose(self, *args)) or seen[-1])
    found = measure(engine, (0.5,), 40, 12, 1, lambda line: None)
    assert found["bars"]["all arms gave plain decode's ids"] and found["drafter"]["kind"] == kind
    assert list(found["rates"]["0.5"]) == ["off", *(str(d) for d in (1, 2, 3, 5) if d <= block), "auto"]
    assert len(seen) > 10 and all(p.ids and (p.confidence is None) == (kind == "mtp") for p in seen), "confidence only where the drafter has one"

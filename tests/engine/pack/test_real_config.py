"""DeepSeek-V4.1-Flash from its published configuration alone: tensors, bytes, the gate at full size, and what it needs in memory."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

from dsv41chat.engine.admission import admit, plan_memory
from dsv41chat.engine.config import parse_v41
from dsv41chat.engine.device import Machine
from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.engine.pack.build import Pack
from dsv41chat.engine.pack.drafter import find_drafter
from dsv41chat.engine.pack.gate import check_names
from dsv41chat.engine.pack.index import PackIndex, TensorRef
from dsv41chat.engine.pack.names import expected_v41
from dsv41chat.engine.plan import build_plan
from dsv41chat.engine.published import V41_FLASH, stored
from tests.engine.pack.packs import SIZES


def inventory(config: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    c = parse_v41(config)
    plan = build_plan(c)
    expected = dict(expected_v41(c, plan))
    out = {k: v for name, want in expected.items() for k, v in stored(name, want.shape, 32).items()}
    # Draft stages: a layer without compression and with its own expert count, and what the published list adds.
    block = expected_v41(c, plan)
    experts = config["text_config"]["dspark_n_routed_experts"]
    for stage in range(config["text_config"]["num_nextn_predict_layers"]):
        for name, want in block.items():
            if name.startswith("layers.0.") and not (".experts." in name and int(name.split(".")[4]) >= experts):
                shape = (experts, *want.shape[1:]) if ".ffn.gate." in name else want.shape
                out |= stored(name.replace("layers.0.", f"mtp.{stage}."), shape, 32)
    d, v, rank = c.hidden_size, c.vocab_size, 256
    out |= stored("mtp.0.main_proj.weight", (d, 3 * d), 32) | stored("mtp.0.main_norm.weight", (d,), 32) | stored("mtp.2.norm.weight", (d,), 32)
    out |= stored("mtp.2.markov_head.embed.weight", (v, rank), 32) | stored("mtp.2.markov_head.head.weight", (v, rank), 32)
    return out | stored("mtp.2.confidence_head.proj.weight", (1, d + rank), 32)


def total(found: dict) -> Counter:
    out = Counter()
    for tag, shape in found.values():
        out[tag] += math.prod(shape) * SIZES[tag]
    return out


VISION_TENSORS = 266


@pytest.fixture(scope="module")
def flash():
    return inventory(V41_FLASH)


def test_tensors_and_bytes(flash):
    """96,085 tensors and 510,286,023,000 bytes with the vision part, and the published bytes of every dtype."""
    assert len(flash) + VISION_TENSORS == 96_085
    owner = lambda n: "draft" if n.startswith("mtp.") else "tables" if "engram.embed" in n else "engram" if ".engram." in n else "trunk"
    owners = Counter(owner(n) for n in flash)
    assert owners == {"draft": 2_401, "tables": 4, "engram": 8, "trunk": 46_704 + 46_699 + 3}
    found = total(flash)
    assert (found["F32"], found["F8_E4M3"], found["F8_E8M0"], found["I8"]) == (169_229_128, 204_015_223_296, 23_563_015_184, 278_585_671_680)
    vision = 3_952_883_712 - found["BF16"]
    assert found.total() + vision == 510_286_023_000
    tables = total({k: v for k, v in flash.items() if "engram.embed" in k})
    assert tables.total() == 202_758_032_400 and 510_286_023_000 - tables.total() == 307_527_990_600
    assert 0.9e9 < vision < 1.1e9  # 0.49 G parameters in bfloat16


def test_counts_follow_layers_and_experts(flash):
    fewer = copy.deepcopy(V41_FLASH)
    fewer["text_config"]["n_routed_experts"] = 383
    less = inventory(fewer)
    expert = {k: v for k, v in flash.items() if k.startswith("layers.0.ffn.experts.383.")}
    gates = 40 * (5120 * 2 + 4 + 4)
    assert len(flash) - len(less) == 40 * 6 and total(flash).total() - total(less).total() == 40 * total(expert).total() + gates
    fewer = copy.deepcopy(V41_FLASH)
    fewer["text_config"] |= {"num_hidden_layers": 39, "dspark_target_layer_ids": [36, 37, 38]}
    less = inventory(fewer)
    layer = {k: v for k, v in flash.items() if k.startswith("layers.39.")}
    assert len(layer) == 2_334 and len(flash) - len(less) == 2_334 and total(flash).total() - total(less).total() == total(layer).total()


def pack_of(found: dict) -> Pack:
    """The headers of a folder that is not there."""
    c = parse_v41(V41_FLASH)
    plan = build_plan(c)
    refs = {n: TensorRef(n, Path("release"), tag, shape, 8, math.prod(shape) * SIZES[tag]) for n, (tag, shape) in found.items()}
    expected = expected_v41(c, plan)
    check_names(refs, expected, c.num_hidden_layers, 32)
    return Pack(Path("release"), c, plan, PackIndex(Path("release"), refs, ()), expected, "", {}, (), find_drafter(refs, c))


@pytest.fixture(scope="module")
def whole(flash) -> Pack:
    return pack_of(flash)


@pytest.fixture(scope="module")
def streamed(whole):
    """(memory plan with tables on the disk, bytes that MLX took for it)"""
    before = mx.get_active_memory()
    plan = plan_memory(whole, dtype=mx.bfloat16, packed=True)
    return plan, mx.get_active_memory() - before


def test_the_gate_at_full_size(flash, whole):
    pack = whole
    assert pack.found.fault is None and not pack.found.notes and pack.found.plan.kind == "dspark"
    assert pack.table_bytes == 202_758_032_400
    gone = {k: v for k, v in flash.items() if not k.startswith(("layers.7.ffn.experts.5.w2", "layers.7.ffn.experts.9.w2"))}
    with pytest.raises(PackIncomplete, match=r"2 tensors missing: layers\.7\.ffn\.experts\.\{5,9\}\.w2\.weight"):
        pack_of(gone)


def test_memory_from_headers(streamed):
    """Lossless words and the float32 head: 297 GB within 2 %; 3,200 bytes of state per token in bfloat16; nothing is allocated for it."""
    plan, taken = streamed
    assert taken < 1 << 20
    assert abs(plan.weights - 297e9) < 0.02 * 297e9 and 7.2e9 < plan.drafter < 9e9
    assert plan.per_token == 3_200 and 40 * 256 * 512 * 2 <= plan.fixed < 30e6
    studio = Machine("metal", 512 << 30, 480 << 30, 464 << 30, "Metal's working set")
    found = admit(plan, studio, 1_048_576)
    assert found.verdict == "fits" and found.context == 1_048_576
    small = admit(plan, Machine("metal", 192 << 30, 180 << 30, 155 << 30, "Metal's working set"), 1_048_576)
    assert small.verdict == "no" and small.context == 0 and "weights 300.3 GB" in small.words and small.remedies == ("a smaller build",)


def test_the_tables_can_be_kept_in_memory(whole, streamed):
    plan = plan_memory(whole, dtype=mx.bfloat16, packed=True, tables_resident=True)
    assert plan.resident - streamed[0].resident == 202_758_032_400
    found = admit(plan, Machine("metal", 512 << 30, 480 << 30, 464 << 30, ""), 1_048_576)
    assert found.verdict == "no" and found.remedies[0] == "--engram stream"

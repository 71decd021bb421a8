"""Packs large enough that memory shows: what was projected against what was used, and conversions in bounded memory. Slow.

Each measurement is a process of its own, because a peak never goes down. Bytes are random; the numbers they mean do not matter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv41chat.engine.config_v4 import parse_v4
from dsv41chat.engine.convert.convert import MEMORY_BYTES
from dsv41chat.engine.pack.names_v4 import expected_v4
from dsv41chat.engine.plan import build_plan
from tests.engine.pack import packs as p

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def config(experts: int, **changes) -> dict:
    return p.V4 | {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": experts, "vocab_size": 4096} | changes


def write_big(folder: Path, experts: int, bits: int | None, **changes) -> Path:
    """Matrices as affine words of `bits` in groups of 64, or as bfloat16 when bits is None; written tensor by tensor."""
    outer = config(experts, **changes)
    c = parse_v4(outer)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, want in expected_v4(c, build_plan(c), stacked=True).items():
        if want.kind not in ("linear", "lookup"):
            found[name] = ("I64" if want.kind == "ids" else "F32", want.shape)
        elif bits is None:
            found[name] = ("BF16", want.shape)
        else:
            *lead, columns = want.shape
            found[name] = ("U32", (*lead, columns * bits // 32))
            for leaf in ("scales", "biases"):
                found[name.removesuffix("weight") + leaf] = ("BF16", (*lead, columns // 64))
    header, at, rng = {}, 0, np.random.default_rng(3)
    for name, (tag, shape) in found.items():
        size = int(np.prod(shape)) * p.SIZES[tag]
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(outer))
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, (tag, shape) in found.items():
            count = int(np.prod(shape))
            if tag == "I64":
                values = rng.integers(0, experts, count)
            elif tag == "F32":
                values = np.full(count, 0.5, np.float32)
            elif tag == "U32":
                values = rng.integers(0, 1 << 32, count, dtype=np.uint32)
            else:
                small = name.endswith(("scales", "biases"))
                values = p.bf16_bits(np.full(count, 0.001, np.float32) if small else (rng.random(count, np.float32) - 0.5) * 0.1)
            f.write(values.tobytes())
    return folder


MEASURE = """
import json, resource, sys
import numpy as np
from dsv41chat.engine.admission import plan_memory
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.engine.target import Target
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
pack = open_pack(sys.argv[1])
plan = plan_memory(pack)
target = Target(build_trunk(pack))
loaded = peak() - before
for n in [128, 128] + [1] * 16:
    trial = target.rows(np.random.default_rng(n).integers(3, 4000, n), logits_from=n - 1)
    target.commit(trial, n)
print(json.dumps({"loaded": loaded, "peak": peak() - before, "projected": plan.resident + plan.state(target.n), "scratch": plan.scratch}))
"""


def measure(folder: Path) -> dict:
    out = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, timeout=1200, check=True, cwd=ROOT)
    return json.loads(out.stdout)


@pytest.mark.parametrize("experts, size", [(50, 0.5e9), (102, 1e9), (258, 2.5e9)])
def test_projected_memory_is_what_is_used(experts, size, tmp_path):
    """Peak while loading and answering, over what the process had before, within 15 % of the projection and below it with its scratch."""
    folder = write_big(tmp_path / "big", experts, 8)
    assert abs((folder / "model.safetensors").stat().st_size - size) < 0.1 * size
    seen = measure(folder)
    assert abs(seen["peak"] - seen["projected"]) <= 0.15 * seen["projected"], seen
    assert seen["peak"] <= seen["projected"] + seen["scratch"], seen


CONVERT = """
import json, resource, sys
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
convert_pack(plan_conversion(sys.argv[1], sys.argv[2], sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("recipe", ["mixed-4_8", "2bit-dq"])
def test_a_conversion_stays_within_its_memory(recipe, tmp_path):
    """The source is larger than the bound that `models convert` states."""
    folder = write_big(tmp_path / "big", 66, None)
    assert (folder / "model.safetensors").stat().st_size > 1.1 * MEMORY_BYTES
    words = [sys.executable, "-c", CONVERT, str(folder), str(tmp_path / "out"), recipe]
    out = subprocess.run(words, capture_output=True, text=True, timeout=2400, check=True, cwd=ROOT)
    assert int(out.stdout) < MEMORY_BYTES, int(out.stdout)

"""What fits, on machines that are only described, and under cgroups that are only files."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dsv41chat.engine import open_engine, probe_pack
from dsv41chat.engine.admission import SMALL_BYTES, MemoryPlan, admit, plan_memory
from dsv41chat.engine.device import Machine, read_machine
from dsv41chat.engine.errors import DoesNotFit
from dsv41chat.engine.pack.build import arrays_of, build_drafter, build_trunk, open_pack
from dsv41chat.nano import embedded_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES
from tests.engine.pack.test_refusals import sample

GB = 10**9
PLAN = MemoryPlan(weights=80 * GB, drafter=4 * GB, tables=0, fixed=GB // 100, per_token=10_000, decoded=0)


def machine(total: int, used: int = 10 * GB, device: int | None = None) -> Machine:
    return Machine("metal", total, total - used, device or total, "Metal's working set")


@pytest.mark.parametrize(
    "total, verdict, context", [(160 * GB, "fits", 1_048_576), (130 * GB, "tight", None), (110 * GB, "no", 0)]
)  # fmt: skip
def test_verdicts_follow_from_the_numbers(total, verdict, context):
    found = admit(PLAN, machine(total), 1_048_576)
    assert found.verdict == verdict
    if verdict != "no":
        share = (10 * GB + PLAN.resident + PLAN.state(found.context) + 8 * GB) / total
        assert share < 0.75 if verdict == "fits" else 0.75 <= share <= 0.85
    if context is not None:
        assert found.context == context
    assert "in use now 10.0 GB + weights 80.0 GB + drafter 4.0 GB" in found.words and "margin 8.0 GB" in found.words


def test_the_margin_decides_as_well():
    assert admit(PLAN, machine(160 * GB), 65_536).verdict == "fits"
    assert admit(PLAN, machine(160 * GB), 65_536, margin=30 * GB).verdict == "tight"
    assert admit(PLAN, machine(160 * GB), 65_536, margin=50 * GB).verdict == "no"
    assert admit(PLAN, machine(160 * GB), 1_048_576, margin=25 * GB).context < 1_048_576


def test_the_device_decides_as_well():
    found = admit(PLAN, machine(256 * GB, device=90 * GB), 65_536)
    assert found.verdict == "no" and "is 90.5 GB of 92 % of 90.0 GB Metal's working set" in found.words


def test_a_context_that_is_too_large_gets_a_smaller_one_that_fits():
    plan = MemoryPlan(60 * GB, 0, 0, 0, 100_000, 0)
    asked = admit(plan, machine(128 * GB), 1_048_576, 900_000)
    assert asked.verdict == "no" and asked.remedies[0].startswith("--context ")
    smaller = int(asked.remedies[0].split()[1])
    assert admit(plan, machine(128 * GB), 1_048_576, smaller).verdict in ("fits", "tight")
    assert admit(plan, machine(128 * GB), 1_048_576, smaller + 1024).verdict != "fits"


def test_small_builds_only_need_what_is_available():
    plan = MemoryPlan(SMALL_BYTES // 2, 0, 0, 0, 1000, 0)
    full = Machine("cpu", 8 * GB, 2 * GB, 8 * GB, "memory")
    assert admit(plan, full, 8192).verdict == "fits"
    assert admit(plan, Machine("cpu", 8 * GB, GB // 2, 8 * GB, "memory"), 8192).verdict == "no"


CGROUP_2 = {
    "proc/self/cgroup": "0::/user/job\n", "sys/fs/cgroup/user/memory.max": "max\n", "sys/fs/cgroup/user/job/memory.max": "3000000000\n",
    "sys/fs/cgroup/user/job/memory.current": "1500000000\n", "sys/fs/cgroup/user/job/memory.stat": "anon 5\ninactive_file 900000000\n",
}  # fmt: skip
CGROUP_1 = {
    "proc/self/cgroup": "4:memory:/job\n2:cpu:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000000\n", "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1500000000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 900000000\n",
}  # fmt: skip
CONTAINER = {"proc/self/cgroup": "0::/outside/of/it\n", "sys/fs/cgroup/memory.max": "3000000000\n", "sys/fs/cgroup/memory.current": "600000000\n"}


def fake_root(tmp_path, files):
    for name, text in ({"proc/meminfo": "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 12000000 kB\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("files", [CGROUP_2, CGROUP_1, CONTAINER], ids=["version 2", "version 1", "container"])
def test_a_cgroup_is_the_machine(files, tmp_path):
    found = read_machine(fake_root(tmp_path, files), "cpu")
    assert (found.total, found.available, found.device) == (3 * GB, 2_400_000_000, 3 * GB)


def test_without_a_cgroup_the_machine_is_the_machine(tmp_path):
    found = read_machine(fake_root(tmp_path, {}), "cpu")
    assert (found.total, found.available) == (16_384_000_000, 12_288_000_000)


def test_this_machine_can_be_read():
    found = read_machine()
    assert 0 < found.available <= found.total and found.device > 0


def cramped(available: int) -> Machine:
    return Machine("cpu", 2 * GB, available, 2 * GB, "memory")


def test_nothing_is_read_before_admission(tmp_path, monkeypatch):
    """A build that does not fit is refused from its headers; --force loads it all the same."""
    family, config, tensors = sample("affine-4 v4")
    folder = p.write(tmp_path, config, tensors, family=family)
    with monkeypatch.context() as patch:
        patch.setattr("dsv41chat.engine.pack.index.TensorRef.bytes", lambda self: pytest.fail(f"{self.name} was read"))
        with pytest.raises(DoesNotFit, match=r"does not fit: in use now .* weights .* of 2\.0 GB"):
            open_engine(folder, machine=cramped(100 << 20))
        assert probe_pack(folder, machine=cramped(100 << 20)).admission.verdict == "no"
    engine = open_engine(folder, machine=cramped(100 << 20), force=True)
    assert engine.admission.verdict == "no" and engine.context_limit == 4096


@pytest.mark.usefixtures("shared_weights")
def test_the_suggested_context_is_admitted_and_used():
    """Under a limit the whole context does not fit; the hint names one that does, and the engine holds it."""
    pack = open_pack(embedded_pack())
    plan = plan_memory(pack, routes="auto")
    tight = cramped(plan.resident + plan.scratch + plan.state(5000))
    with pytest.raises(DoesNotFit) as refused:
        open_engine(embedded_pack(), context=8192, machine=tight)
    context = int(refused.value.hint.split("--context ")[1].split(";")[0])
    assert 4096 <= context <= 5000
    engine = open_engine(embedded_pack(), context=context, machine=tight)
    assert engine.context_limit == context
    assert open_engine(embedded_pack(), machine=tight).context_limit == context


@pytest.mark.parametrize("case", ["release", "mixed", "exl3-experts", "plain-f16"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_plan_counts_what_is_really_held(case, packed, tmp_path):
    family, config, tensors = sample(f"{case} v4")
    assert case in CASES
    pack = open_pack(p.write(tmp_path, config, tensors, family=family))
    held = build_trunk(pack, dtype=mx.bfloat16, packed=packed)
    want = sum(a.nbytes for a in {id(a): a for a in arrays_of(held)}.values())
    plan = plan_memory(pack, dtype=mx.bfloat16, packed=packed)
    assert plan.weights == want
    lane = held.new_lane()
    rings = sum(a.nbytes for name, a in lane.buffers.items() if hasattr(lane.specs[name], "window"))
    assert plan.fixed == rings


def test_the_plan_counts_the_drafter():
    pack = open_pack(embedded_pack())
    trunk = build_trunk(pack)
    model = build_drafter(pack, trunk, rounded=True)
    shared = {id(a) for a in arrays_of((trunk.embed, trunk.head))}
    assert plan_memory(pack).drafter == sum(a.nbytes for a in {id(a): a for a in arrays_of(model)}.values() if id(a) not in shared)

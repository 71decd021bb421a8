"""Graphs of launches, memory and copies over a driver in host memory (`fake_driver.cpp`), and what a real GPU does with them:
`python -m pytest -m device tests/engine/kernels/test_driver.py -s`."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.device import device_kind
from dsv41chat.engine.errors import DeviceLost, OutOfMemory, RouteUnavailable, device_failure
from dsv41chat.engine.kernels import driver as made
from dsv41chat.engine.kernels import finish
from dsv41chat.engine.kernels.driver import DeviceMemory, Driver, DriverFailed, Graph, Node, PinnedMemory, addresses, copy_into
from dsv41chat.engine.kernels.nvrtc import NvrtcBackend, code_folder, compiled, library, program
from dsv41chat.engine.kernels.player import CudaPlayer
from dsv41chat.engine.kernels.replay import Home
from tests.engine.kernels.shim import HERE, built, compiler, needs_compiler

N = 64  # uint32 numbers in each block of memory here
BYTES = 4 * N
OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS, LAUNCH_FAILED = 2, 1, 700, 719


class Fake:
    """A Driver over the fake one, and what the fake one knows."""

    def __init__(self):
        text = (HERE / "fake_driver.cpp").read_text()
        path = str(built(text, libraries=True))
        self.driver, self._fake = Driver(path), ctypes.CDLL(path)

    def fail(self, call: str, result: int) -> None:
        """The next such call fails."""
        self._fake.fake_fail(call.encode(), result)

    def live(self, kind: str) -> int:
        gc.collect()
        return self._fake.fake_live(kind.encode())

    def calls(self, call: str) -> int:
        return self._fake.fake_calls(call.encode())

    def memory(self, values: np.ndarray | None = None) -> DeviceMemory:
        memory = DeviceMemory(self.driver.allocate(BYTES), BYTES, self.driver)
        if values is not None:
            pinned = PinnedMemory(BYTES, self.driver)
            pinned.array.view(np.uint32)[:] = values
            self.driver.copy_in(memory.address, pinned, BYTES)
        return memory

    def read(self, memory: DeviceMemory) -> np.ndarray:
        pinned = PinnedMemory(BYTES, self.driver)
        self.driver.copy_out(pinned, memory.address, BYTES)
        self.driver.synchronize()
        return pinned.array.view(np.uint32).copy()

    def node(self, *memories: DeviceMemory, after: tuple[int, ...] = ()) -> Node:
        name = f"mix_{len(memories)}"
        return Node(self.driver.function(name, name.encode()), (2, 4, 1), N // 8, tuple(m.address for m in memories), after)


@pytest.fixture
def fake():
    if compiler() is None:
        pytest.skip("needs a C++20 compiler")
    return Fake()


def mixed(out: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
    """The fake device's only operation."""
    return (31 * out.astype(np.uint64) + sum((i + 1) * x.astype(np.uint64) for i, x in enumerate(inputs))).astype(np.uint32)


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, N).astype(np.uint32)


def test_a_graph_runs_in_the_order_of_its_dependencies_each_time_it_is_launched(fake):
    a, b = drawn(1), drawn(2)
    x, y, s, t = fake.memory(a), fake.memory(b), fake.memory(), fake.memory()
    nodes = [fake.node(x, y, s), fake.node(s, t, after=(0,)), fake.node(x, s, t, after=(1, 0, 1))]
    graph = Graph(nodes, fake.driver)
    sums, totals = np.zeros(N, np.uint32), np.zeros(N, np.uint32)
    for _ in range(3):
        sums = mixed(sums, a, b)
        totals = mixed(mixed(totals, sums), a, sums)
        graph.launch()
    assert np.array_equal(fake.read(s), sums) and np.array_equal(fake.read(t), totals)
    # Without its dependencies the same graph gives something else, or this test would see nothing.
    p, q = fake.memory(), fake.memory()
    Graph([fake.node(x, y, p), fake.node(p, q), fake.node(x, p, q)], fake.driver).launch()
    first = mixed(np.zeros(N, np.uint32), a, b)
    assert not np.array_equal(fake.read(q), mixed(mixed(np.zeros(N, np.uint32), first), a, first))


def test_nothing_is_done_before_the_wait_and_the_graph_needs_nothing_of_its_building(fake):
    a = drawn(3)
    x, out = fake.memory(a), fake.memory()
    nodes = [fake.node(x, out)]
    graph = Graph(nodes, fake.driver)
    del nodes
    assert fake.live("graphs") == 0  # only the executable stays
    pinned = PinnedMemory(BYTES, fake.driver)
    pinned.array[:] = 1
    graph.launch()
    fake.driver.copy_out(pinned, out.address, BYTES)
    assert (pinned.array == 1).all()
    fake.driver.synchronize()
    assert np.array_equal(pinned.array.view(np.uint32), a)
    graph.launch()
    fake.driver.copy_out(pinned, out.address, BYTES)
    fake.driver.finish()
    assert np.array_equal(pinned.array.view(np.uint32), mixed(a, a))


def test_a_step_of_many_nodes(fake):
    blocks = [fake.memory(drawn(9))] + [fake.memory() for _ in range(8)]
    want = [drawn(9)] + [np.zeros(N, np.uint32)] * 8
    nodes = []
    for i in range(1200):
        source, target = i % 9, (i + 1) % 9
        nodes.append(fake.node(blocks[source], blocks[(i + 4) % 9], blocks[target], after=(i - 1,) if i else ()))
        want[target] = mixed(want[target], want[source], want[(i + 4) % 9])
    Graph(nodes, fake.driver).launch()
    assert all(np.array_equal(fake.read(block), values) for block, values in zip(blocks, want))


@pytest.mark.parametrize("target, early", [("sm_80", 0), ("sm_90a", 998), ("sm_121", 998)])
def test_nodes_of_one_predecessor_start_early(fake, monkeypatch, target, early):
    """Results are those of the order all the same; what comes after two waits for their ends."""
    monkeypatch.setattr(made, "architecture", lambda: target)
    a, b = drawn(1), drawn(2)
    x, y, out = fake.memory(a), fake.memory(b), fake.memory()
    nodes = [fake.node(x, out)] + [fake.node(y if i % 2 else x, out, after=(i,)) for i in range(998)] + [fake.node(x, y, out, after=(3, 998))]
    before = fake.calls("cuGraphAddDependencies_v2")
    graph = Graph(nodes, fake.driver, early=True)
    assert fake.calls("cuGraphAddDependencies_v2") - before == early
    want = mixed(np.zeros(N, np.uint32), a)
    for i in range(998):
        want = mixed(want, b if i % 2 else a)
    graph.launch()
    assert np.array_equal(fake.read(out), mixed(want, a, b))
    Graph(nodes, fake.driver)
    assert fake.calls("cuGraphAddDependencies_v2") - before == early, "others wait for ends"


def test_a_driver_without_early_starts(fake, monkeypatch):
    monkeypatch.setattr(made, "architecture", lambda: "sm_90")
    old = (HERE / "fake_driver.cpp").read_text().replace("cuGraphAddDependencies_v2", "cuGraphAddDependencies")
    assert fake.driver.starts_early() and not Driver(str(built(old, libraries=True))).starts_early()


@pytest.mark.parametrize("after", [(1,), (2,), (-1,), (0, 5)])
def test_a_node_cannot_wait_for_a_later_one(fake, after):
    x, out = fake.memory(), fake.memory()
    live = fake.live("executables")
    with pytest.raises(ValueError, match="not all before it"):
        Graph([fake.node(x, out), fake.node(x, out, after=after)], fake.driver)
    assert fake.live("graphs") == 0 and fake.live("executables") == live


@pytest.mark.parametrize("pointers", [1, 4])
def test_a_node_passes_as_many_pointers_as_its_kernel_takes(fake, pointers):
    x = fake.memory()
    wrong = fake.node(x, x, x)._replace(pointers=(x.address,) * pointers)
    with pytest.raises(ValueError, match=f"node 1 passes {pointers} pointers to a kernel of 3"):
        Graph([fake.node(x, x), wrong], fake.driver)
    assert fake.live("graphs") == 0


def test_a_driver_that_does_not_tell_the_number_of_arguments(fake):
    function = fake.node(fake.memory()).function
    assert fake.driver.parameters(function) == 1
    fake.fail("cuFuncGetParamInfo", LAUNCH_FAILED)
    assert fake.driver.parameters(function) is None
    before_12_4 = (HERE / "fake_driver.cpp").read_text().replace("cuFuncGetParamInfo", "absent")
    assert Driver(str(built(before_12_4, libraries=True))).parameters(function) is None


def test_a_graph_goes_with_its_last_reference_or_when_closed(fake):
    x, out = fake.memory(drawn(1)), fake.memory()
    live = fake.live("executables")
    graph = Graph([fake.node(x, out)], fake.driver)
    assert fake.live("executables") == live + 1
    graph.launch()
    del graph
    assert fake.live("executables") == live and np.array_equal(fake.read(out), drawn(1))
    graph = Graph([fake.node(x, out)], fake.driver)
    graph.close()
    graph.close()
    with pytest.raises(ValueError, match="closed"):
        graph.launch()
    assert fake.live("executables") == live


@pytest.mark.parametrize("call", ["cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags"])
def test_a_graph_that_is_not_built_leaves_nothing(fake, call):
    x, out = fake.memory(), fake.memory()
    nodes, live = [fake.node(x, out)] * 3, fake.live("executables")
    fake.fail(call, OUT_OF_MEMORY)
    with pytest.raises(DriverFailed, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        Graph(nodes, fake.driver)
    assert fake.live("graphs") == 0 and fake.live("executables") == live


def test_failures_say_the_call_and_the_drivers_words_and_what_they_mean(fake):
    fake.fail("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(DriverFailed) as failed:
        fake.driver.allocate(16)
    assert str(failed.value) == "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    assert isinstance(device_failure(failed.value), OutOfMemory)
    fake.fail("cuStreamSynchronize", LAUNCH_FAILED)
    with pytest.raises(DriverFailed) as failed:
        fake.driver.synchronize()
    assert isinstance(device_failure(failed.value), DeviceLost)
    fake.fail("cuCtxSynchronize", LAUNCH_FAILED)
    with pytest.raises(DriverFailed) as failed:
        fake.driver.finish()
    assert isinstance(device_failure(failed.value), DeviceLost)
    fake.fail("cuGraphLaunch", 12345)
    graph = Graph([], fake.driver)
    with pytest.raises(DriverFailed, match=r"^cuGraphLaunch: unknown error \(12345\): unknown error$"):
        graph.launch()
    x = fake.memory()
    Graph([fake.node(x, DeviceMemory(x.address + 4, BYTES, fake.driver))], fake.driver).launch()
    with pytest.raises(DriverFailed, match="illegal memory access") as failed:
        fake.driver.synchronize()
    assert isinstance(device_failure(failed.value), DeviceLost)


def test_memory_is_clear_and_aligned_and_goes_with_its_owner(fake):
    live = fake.live("memory")
    memory = fake.memory()
    assert memory.address % 256 == 0 and not fake.read(memory).any() and fake.live("memory") == live + 1
    del memory
    assert fake.live("memory") == live
    memory = fake.memory()
    memory.free()
    memory.free()
    assert fake.live("memory") == live
    address = fake.driver.allocate(8)
    fake.driver.free(address)
    assert fake.live("memory") == live
    fake.fail("cuMemsetD8Async", INVALID_VALUE)
    with pytest.raises(DriverFailed, match="cuMemsetD8Async"):
        fake.driver.allocate(8)
    assert fake.live("memory") == live


def test_freeing_waits_for_work_that_uses_the_memory(fake):
    a, b = drawn(4), fake.memory()
    x = fake.memory(a)
    Graph([fake.node(x, b)], fake.driver).launch()
    del x
    gc.collect()
    assert np.array_equal(fake.read(b), a)


def test_page_locked_memory_lives_as_long_as_a_view_of_it(fake):
    live = fake.live("pinned")
    pinned = PinnedMemory(BYTES, fake.driver)
    assert pinned.array.shape == (BYTES,) and pinned.array.dtype == np.uint8 and pinned.array.flags.writeable
    assert pinned.array.ctypes.data == pinned.address
    view = pinned.array[8:].view(np.uint32)
    del pinned
    assert fake.live("pinned") == live + 1
    view[:] = 5
    assert (view == 5).all()
    del view
    assert fake.live("pinned") == live


def test_page_locked_memory_stays_until_a_copy_was_waited_for(fake):
    live, memory = fake.live("pinned"), fake.memory()
    fake.driver.synchronize()
    pinned = PinnedMemory(BYTES, fake.driver)
    pinned.array.view(np.uint32)[:] = drawn(6)
    fake.driver.copy_in(memory.address, pinned, BYTES)
    del pinned
    assert fake.live("pinned") == live + 1
    assert np.array_equal(fake.read(memory), drawn(6))
    assert fake.live("pinned") == live


def test_copies_of_parts(fake):
    a, x, y = drawn(7), fake.memory(drawn(7)), fake.memory()
    fake.driver.copy(y.address + 16, x.address + 8, 40)
    assert np.array_equal(fake.read(y)[4:14], a[2:12]) and not fake.read(y)[14:].any()
    pinned = PinnedMemory(100, fake.driver)
    pinned.array[:] = 9
    fake.driver.copy_out(pinned, x.address, 20, offset=60)
    fake.driver.synchronize()
    assert np.array_equal(pinned.array[60:80].view(np.uint32), a[:5]) and (pinned.array[80:] == 9).all()
    fake.driver.copy_in(y.address, pinned, 20, offset=60)
    assert np.array_equal(fake.read(y)[:5], a[:5])
    for nbytes, offset in ((101, 0), (20, 81), (8, -8), (-1, 4)):
        with pytest.raises(ValueError, match="page-locked"):
            fake.driver.copy_in(y.address, pinned, nbytes, offset)
        with pytest.raises(ValueError, match="page-locked"):
            fake.driver.copy_out(pinned, y.address, nbytes, offset)


def test_any_thread_may_call(fake):
    seen = []

    def work():
        x, out = fake.memory(drawn(8)), fake.memory()
        Graph([fake.node(x, out)], fake.driver).launch()
        seen.append(fake.read(out))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert np.array_equal(seen[0], drawn(8))


def test_code_is_loaded_once_for_a_name(fake):
    loads = fake.calls("cuModuleLoadData")
    first = fake.driver.function("mix_2", b"mix_2 mix_3")
    assert fake.driver.function("mix_2", b"mix_2 mix_3") == first and fake.driver.function("mix_3", b"mix_2 mix_3") != first
    assert fake.calls("cuModuleLoadData") == loads + 2
    with pytest.raises(DriverFailed, match="cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"):
        fake.driver.function("absent_2", b"mix_2")


@needs_compiler
def test_no_driver_and_an_old_one():
    with pytest.raises(RouteUnavailable, match="could not be opened") as failed:
        Driver("libabsent.so.1")
    assert "engine.routes" in failed.value.hint
    old = (HERE / "fake_driver.cpp").read_text().replace("cuGraphAddKernelNode_v2", "cuGraphAddKernelNode")
    with pytest.raises(RouteUnavailable, match="no cuGraphAddKernelNode_v2"):
        Driver(str(built(old, libraries=True)))


@pytest.fixture
def mlx_on_cuda(monkeypatch):
    """MLX's launch, as far as addresses need it: an array's address is 4096 times its first element; what is not row-contiguous is copied."""
    calls = []

    def launch(*, inputs, ensure_row_contiguous, output_shapes, output_dtypes, **call):
        calls.append(call)
        assert len(inputs) == 120 and output_shapes == [(120,)] and output_dtypes == [mx.uint64]
        first = [int(a.reshape(-1)[0].item()) for a in inputs]
        # memoryview's strides tell the layout on the CPU
        copied = [ensure_row_contiguous and not memoryview(a).c_contiguous for a in inputs]
        return [mx.array(np.array([2**40 + 4096 * v + c for v, c in zip(first, copied)], np.uint64))]

    made._address_code.cache_clear()
    monkeypatch.setattr(made, "_address_code", lambda: ("addresses", b"code"))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch, raising=False)
    return calls


def test_addresses_of_any_number_of_arrays(mlx_on_cuda):
    arrays = [mx.full((2, 2), i, (mx.uint8, mx.float32, mx.int32)[i % 3]) for i in range(250)]
    assert addresses(arrays) == [2**40 + 4096 * i for i in range(250)] and len(mlx_on_cuda) == 6
    assert addresses(arrays, whole=True) == [2**40 + 4096 * i for i in range(250)] and len(mlx_on_cuda) == 9
    assert addresses([]) == [] and addresses(arrays[:1]) == [2**40]
    assert addresses([mx.arange(12).reshape(4, 3)[1:]]) == [2**40 + 4096 * 3]


@pytest.mark.parametrize("wrong", [mx.array(1.0), mx.zeros((0, 4)), mx.arange(12).reshape(3, 4).T, mx.arange(12).reshape(3, 4)[:, 1:]])
def test_arrays_without_an_address_for_a_kernel(mlx_on_cuda, wrong):
    with pytest.raises(ValueError, match="array 133|elements of array 133"):
        addresses([mx.ones((4,))] * 133 + [wrong])


# What the text of a kernel finds on a device, and a call of it for a whole grid.
_GRID = """
#define __global__
struct uint4 { unsigned x, y, z, w; };
struct { unsigned x, y; } blockIdx, blockDim, threadIdx, gridDim;
%s
extern "C" void run(void** p, int* n, unsigned x, unsigned y, unsigned threads) {
  gridDim = {x, y}; blockDim = {threads, 1};
  for (unsigned b = 0; b < y; b++) for (unsigned a = 0; a < x; a++) for (unsigned t = 0; t < threads; t++) {
    blockIdx = {a, b}; threadIdx = {t, 0};
    %s(%s);
  }
}
"""


def memory(array: mx.array) -> np.ndarray:
    return np.array(array.reshape(-1).view(mx.uint8), copy=False)


@pytest.fixture
def mlx_copies(monkeypatch):
    """MLX's launch of the kernel that copies: its text, compiled for the host and run on the arrays' memory. The pairs of each launch."""
    (name, text), pairs, launches = made.copy_program(), range(60), []
    arguments = ", ".join([*(f"p[{i}]" for i in range(120)), "(unsigned*)p[120]", *(f"n[{i}]" for i in pairs)])
    kernel = ctypes.CDLL(str(built(_GRID % (text, name, arguments))))

    def launch(*, inputs, scalars, grid, threadgroup, output_shapes, output_dtypes, ensure_row_contiguous, **call):
        assert len(inputs) == 120 and len(scalars) == 60 and call["name"] == name and not ensure_row_contiguous and grid[0] % threadgroup[0] == 0
        out = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]
        mx.eval(out)
        pointers = (ctypes.c_void_p * 121)(*(memory(a).ctypes.data for a in [*inputs, *out]))
        kernel.run(pointers, (ctypes.c_int * 60)(*scalars), grid[0] // threadgroup[0], grid[1], threadgroup[0])
        launches.append(grid[1])
        return out

    monkeypatch.setattr(made, "_copy_code", lambda: (name, b"code"))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch, raising=False)
    return launches


def numbered(count: int, first: int) -> list[mx.array]:
    """Arrays of several sizes, of 2 to 20,000 rows of 32 bytes."""
    made = [mx.arange(8 * rows).reshape(rows, 8) + (first + i) for i, rows in enumerate([2, 20_000, *(3 + i % 7 for i in range(count - 2))])]
    mx.eval(made)
    return made


@needs_compiler
def test_arrays_are_copied_where_others_lie(mlx_copies):
    sources, targets = numbered(130, 7), numbered(130, 99)
    targets[5], left = sources[5], memory(targets[8]).copy()
    at, want = [memory(t).ctypes.data for t in targets], [memory(s).copy() for s in sources]
    copy_into([pair for i, pair in enumerate(zip(sources, targets)) if i != 8])
    assert mlx_copies == [60, 60, 9] and [memory(t).ctypes.data for t in targets] == at
    for i, (source, target, bits) in enumerate(zip(sources, targets, want)):
        assert np.array_equal(memory(source), bits) and np.array_equal(memory(target), left if i == 8 else bits)
    copy_into([])
    assert len(mlx_copies) == 3
    for wrong in (mx.zeros((4, 8)), mx.zeros((3,))):
        with pytest.raises(ValueError, match="whole runs of 16 bytes"):
            copy_into([(wrong, targets[0]), (wrong, wrong)] if wrong.size > 3 else [(wrong, wrong)])


@needs_compiler
def test_a_player_brings_a_lane_home(mlx_copies):
    kept, written = numbered(70, 0), numbered(70, 50)
    names = [f"ring.{i}" for i in range(70)]
    home, buffers = Home({}, dict(zip(names, kept))), dict(zip(names, written))
    CudaPlayer(NvrtcBackend()).bring_back(home, buffers)
    assert list(buffers) == names and mlx_copies == [60, 10]
    for name, array, other in zip(names, kept, written):
        assert buffers[name] is not array and memory(buffers[name]).ctypes.data == memory(array).ctypes.data
        assert np.array_equal(memory(array), memory(other))


@pytest.mark.oracle
@pytest.mark.skipif(library() is None, reason="needs the package nvidia-cuda-nvrtc")
@pytest.mark.parametrize("program_of", [made.address_program, made.copy_program])
def test_kernels_of_the_driver_compile(program_of):
    for target in ("sm_80", "sm_90", "sm_120"):
        code, _ = compiled(*program_of(), target)
        assert program_of()[0].encode() in code


# On a real GPU


class Noted:
    """A backend that notes what it is asked to run."""

    dialect, lazy, warpgroups = "cuda", True, False

    def __init__(self):
        self.backend, self.calls = NvrtcBackend(), []

    def run(self, kernel, inputs, constants, groups, threads, outputs):
        results = self.backend.run(kernel, inputs, constants, groups, threads, outputs)
        self.calls.append((kernel, inputs, constants, groups, threads, outputs))
        return results


def on_device(test):
    return pytest.mark.device(pytest.mark.skipif(device_kind() != "cuda", reason="needs a GPU of NVIDIA that MLX computes on")(test))


def finished() -> tuple[list[mx.array], list[mx.array], Noted]:
    """Three finishes in a row: inputs (the rows a view at an offset), results, and the launches."""
    rng, noted = np.random.default_rng(5), Noted()
    rows = mx.array(rng.standard_normal((11, 512)).astype(np.float32)).astype(mx.bfloat16)[3:]
    weight = mx.array(rng.random(512).astype(np.float32) + 0.5)
    phase = rng.random((8, 32)) * 6
    table = mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))
    step = finish.Finish(noted, 512, weight=weight, eps=1e-6, rope=64, rounding=finish.v4_fp8(64))
    results, x = [], rows
    for _ in range(3):
        x = step(x, table)
        results.append(x)
    mx.eval(rows, weight, table, results)
    return [rows, weight, *table], results, noted


def handle_of(driver: Driver, call: tuple) -> int:
    kernel, inputs, constants, _, _, outputs = call
    name, text = program(kernel, [a.dtype for a in inputs], [dtype for _, dtype in outputs], constants)
    return driver.function(name, code_folder().load(name, text, made.architecture()))


@on_device
def test_a_graph_of_three_launches_on_the_device():
    inputs, results, noted = finished()
    driver, size = made.driver(), results[0].nbytes
    blocks = [DeviceMemory(driver.allocate(size), size) for _ in range(3)]
    at = addresses(inputs)
    assert addresses(inputs) == at and all(a % 4 == 0 for a in at)
    nodes = []
    for i, call in enumerate(noted.calls):
        source = blocks[i - 1].address if i else at[0]
        nodes.append(Node(handle_of(driver, call), call[3], call[4], (source, *at[1:], blocks[i].address), (i - 1,) if i else ()))
    assert driver.parameters(nodes[0].function) == 5
    graph, pinned = Graph(nodes), PinnedMemory(size)
    for _ in range(3):
        graph.launch()
    want = [np.array(r.view(mx.uint16)) for r in results]
    for block, values in zip(blocks, want):
        driver.copy_out(pinned, block.address, size)
        driver.synchronize()
        assert np.array_equal(pinned.array.view(np.uint16).reshape(values.shape), values)
    chain = [nodes[0]] + [nodes[1 + i % 2]._replace(after=(i,)) for i in range(1199)]
    begun = time.perf_counter()
    graph = Graph(chain)
    made_in = time.perf_counter() - begun
    for turn in ("first", "second", "third"):
        begun = time.perf_counter()
        graph.launch()
        started = time.perf_counter() - begun
        driver.synchronize()
        took = time.perf_counter() - begun
        print(f"1200 nodes in a row: built in {1e3 * made_in:.1f} ms; {turn} launch {1e6 * started:.0f} us, done after {1e6 * took:.0f} us")


@on_device
@pytest.mark.parametrize("kind", ["of host data", "made on the device"])
def test_what_is_written_into_an_array_is_seen_by_mlx(kind):
    inputs, results, noted = finished()
    target = mx.array(np.ones((8, 512), np.uint16))
    target = target + target if kind == "made on the device" else target
    mx.eval(target)
    driver, call = made.driver(), noted.calls[0]
    at = addresses([*inputs, target])
    whole = Graph([Node(handle_of(driver, call), call[3], call[4], (*at[:4], at[4]))])
    whole.launch()
    driver.synchronize()
    bits = lambda a: a.view(mx.uint16)
    assert mx.array_equal(bits(target), bits(results[0])) and mx.array_equal(bits(target) + 1, bits(results[0]) + 1)
    driver.copy(at[4], at[0], target.nbytes)
    driver.synchronize()
    assert mx.array_equal(bits(target), bits(inputs[0]))
    if addresses([target]) != at[4:]:
        pytest.fail("operations on the device moved the array")
    np.array(bits(target))
    print(f"an array {kind} {'stays where it was' if addresses([target]) == at[4:] else 'moves'} when the host reads it")
    assert mx.array_equal(bits(target), bits(inputs[0]))


@on_device
def test_arrays_are_copied_where_others_lie_on_the_device():
    sources, targets = ([mx.full((256, 512), i + first, mx.bfloat16) for i in range(130)] for first in (0, 300))
    mx.eval(sources, targets)
    at = addresses(targets, whole=True)
    for turn in ("first", "second", "third"):
        begun = time.perf_counter()
        mx.eval(copy_into(list(zip(sources, targets))))
        print(f"130 arrays of 256 KiB: the {turn} time {1e6 * (time.perf_counter() - begun):.0f} us")
    assert addresses(targets, whole=True) == at
    assert all(bool(mx.all(s == t)) for s, t in zip(sources, targets))


@on_device
def test_what_mlx_was_told_before_reads_what_lay_there():
    """Long work on arrays that others are copied into at once; nothing of it names the copies."""
    driver = made.driver()
    for _ in range(5):
        sources, targets = ([mx.full((512, 512), first + i % 3, mx.float32) for i in range(70)] for first in (5, 1))
        mx.eval(sources, targets)
        at, new = addresses(targets, whole=True), [s + 1 for s in sources]
        slow = mx.ones((4096, 4096))
        for _ in range(10):
            slow = (slow @ slow) * 1e-4
        # Of the old contents, after the slow ones in the same parts of work.
        sums = [mx.sum(t) + 0 * slow[0, 0] for t in targets]
        mx.async_eval(sums, new)
        moved = copy_into(list(zip(new, targets)))
        driver.finish()
        mx.eval(moved)
        assert [s.item() for s in sums] == [(1 + i % 3) * 512 * 512 for i in range(70)]
        assert all(bool(mx.all(t == 6 + i % 3)) for i, t in enumerate(targets)) and addresses(targets, whole=True) == at

"""Machine code on disk: kept by text, target and compiler, never read when damaged, and compiled when nothing can be kept."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import mlx.core as mx
import pytest

from dsv41chat.engine.kernels import nvrtc
from dsv41chat.engine.kernels.dialect import Kernel
from dsv41chat.engine.kernels.launch import Constants

DOUBLE = Kernel("double_it", ("x",), ("out",), "  if (tid < N) out[tid] = 2.0f * x[tid];\n")


@pytest.fixture
def compiler(monkeypatch):
    """Stands for NVIDIA's compiler: notes what it is given."""
    given = []

    def compiled(name, text, target, options=()):
        given.append((name, target))
        if "refused" in text:
            raise nvrtc.CompileFailed(f"{name}: refused")
        return hashlib.sha256(text.encode()).digest(), ""

    monkeypatch.setattr(nvrtc, "compiled", compiled)
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    monkeypatch.setattr(nvrtc, "architecture", lambda: "sm_90")
    return given


def test_a_text_is_compiled_once_for_a_target(tmp_path, compiler):
    folder = nvrtc.CodeFolder(tmp_path / "kernels")
    first = folder.load("a", "text", "sm_90")
    assert folder.load("a", "text", "sm_90") == first and compiler == [("a", "sm_90")]
    folder.load("a", "text", "sm_120")
    folder.load("a", "another text", "sm_90")
    assert len(compiler) == 3 and len(list((tmp_path / "kernels").iterdir())) == 3


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]])
def test_damaged_code_is_compiled_again(tmp_path, compiler, damage):
    folder = nvrtc.CodeFolder(tmp_path)
    code = folder.load("a", "text", "sm_90")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert folder.load("a", "text", "sm_90") == code and len(compiler) == 2
    assert folder.load("a", "text", "sm_90") == code and len(compiler) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, compiler):
    (tmp_path / "file").write_text("")
    folder = nvrtc.CodeFolder(tmp_path / "file" / "kernels")
    assert folder.load("a", "text", "sm_90") == folder.load("a", "text", "sm_90") and len(compiler) == 2


def test_a_launch_passes_the_code_of_its_text_types_and_constants(tmp_path, compiler, monkeypatch):
    calls = []
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: calls.append(call) or ["result"], raising=False)
    backend = nvrtc.NvrtcBackend(tmp_path)
    run = lambda x, n: backend.run(DOUBLE, [x], {"N": n}, (3, 2, 1), 32, [((4,), mx.float32)])
    x = mx.zeros((16,))
    assert run(x, 4) == run(x, 4) == ["result"] and len(compiler) == 1
    run(x.astype(mx.bfloat16), 4), run(x, 5)
    assert len({name for name, _ in compiler}) == 3 and all(c["name"] == name for c, (name, _) in zip(calls[1:], compiler))
    backend.run(DOUBLE, [x], {"N": 4, "SHARED": 1, "SHARED_BYTES": 64}, (3, 2, 1), 32, [((4,), mx.float32)])
    assert calls[0]["shared_memory"] == 0 and calls[-1]["shared_memory"] == 64, "SHARED is a constant of texts of experts"
    assert calls[0]["grid"] == (96, 2, 1) and calls[0]["threadgroup"] == (32, 1, 1) and calls[0]["output_shapes"] == [(4,)]
    name, text = nvrtc.program(DOUBLE, [mx.float32], [mx.float32], {"N": 4})
    assert f'extern "C" __global__ void {name}(const float* x, float* out)' in text and "constexpr int N = 4;" in text


def test_a_launch_is_remembered_by_the_constants_that_its_caller_keeps(tmp_path, compiler, monkeypatch):
    calls, x = [], mx.zeros((16,))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: calls.append(call["name"]) or ["result"], raising=False)
    one, other, kept = nvrtc.NvrtcBackend(tmp_path), nvrtc.NvrtcBackend(tmp_path / "other"), Constants({"N": 4})
    run = lambda backend, constants, kernel=DOUBLE: backend.run(kernel, [x], constants, (3, 2, 1), 32, [((4,), mx.float32)])
    run(one, kept)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "program", None)
        patch.setattr(nvrtc, "_key", None)
        run(one, kept)
    run(other, kept), run(one, kept, replace(DOUBLE, base="another"))
    more = kept.plus(M=5)
    assert more is kept.plus(M=5) and more == {"N": 4, "M": 5} and more is not kept.plus(N=5) and kept.plus(N=5) == {"N": 5}
    run(one, more), run(one, {"N": 4, "M": 5})
    assert calls[0] == calls[1] == calls[2] and calls[3].startswith("another") and calls[4] == calls[5] != calls[0]
    with one.collecting():
        fresh = Constants({"N": 6})
        assert run(one, fresh)[0].tolist() == [0, 0, 0, 0] and not fresh.found
    assert run(one, fresh) == ["result"]
    for change in (lambda: kept.update(N=5), lambda: kept.__setitem__("N", 5)):
        with pytest.raises(TypeError, match="do not change"):
            change()


def test_what_is_collected_is_compiled_on_leaving_and_failures_wait_for_their_call(tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: ["result"], raising=False)
    backend, x = nvrtc.NvrtcBackend(tmp_path), mx.zeros((16,))
    bad = Kernel("refused", ("x",), ("out",), "refused")
    with backend.collecting():
        (zeros,) = backend.run(DOUBLE, [x], {"N": 4}, (1, 1, 1), 32, [((4,), mx.float32)])
        backend.run(bad, [x], {}, (1, 1, 1), 32, [((4,), mx.float32)])
        assert zeros.tolist() == [0, 0, 0, 0] and not compiler
    assert len(compiler) == 2
    assert backend.run(DOUBLE, [x], {"N": 4}, (1, 1, 1), 32, [((4,), mx.float32)]) == ["result"] and len(compiler) == 2
    with pytest.raises(nvrtc.CompileFailed, match="refused"):
        backend.run(bad, [x], {}, (1, 1, 1), 32, [((4,), mx.float32)])

"""EXL3 decoding, bit for bit against the goldens, and matrices in use."""

from __future__ import annotations

import hashlib
import json

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3Linear
from dsv41chat.engine.ops import exl3
from dsv41chat.engine.pack.exl3 import unpack_signs
from dsv41chat.engine.pack.formats import identify
from dsv41chat.engine.pack.index import read_header
from tests.engine.pack import exl3_reference, packs

FOLDER = packs.DATA / "exl3"
BOOKS = json.loads((FOLDER / "codebooks.json").read_text())
TILES = {name: np.array(value) for name, value in mx.load(str(FOLDER / "tiles.safetensors")).items()}
PACKED = [name.removesuffix(".packed") for name in TILES if name.endswith(".packed")]
WIDTHS = [(book, name.removeprefix(book + ".k")) for book in exl3.CODEBOOKS for name in PACKED if name.startswith(book + ".")]
LINEARS = sorted(FOLDER.glob("linear_*.safetensors"))
NAME = "layers.0.ffn.experts.0.w1.weight"


@pytest.fixture(autouse=True)
def on_cpu():
    mx.set_default_device(mx.cpu)


@pytest.mark.parametrize("book", exl3.CODEBOOKS)
def test_codebooks(book):
    values = np.array(exl3.table(book))
    assert hashlib.sha256(values.tobytes()).hexdigest() == BOOKS[book]["sha256_f16le"]
    assert len(np.unique(values)) == BOOKS[book]["distinct"]


def halves_of(width: str) -> int:
    return int(2 * float(width.replace("p", ".")))


def words_of(trellis: np.ndarray) -> mx.array:
    return mx.array(trellis).view(mx.uint32)


@pytest.mark.parametrize("book, width", WIDTHS)
def test_tiles(book, width):
    words = words_of(TILES[f"{book}.k{width}.packed"].reshape(1, 1, -1))
    states = np.array(exl3.states(words, halves_of(width))).reshape(-1)
    np.testing.assert_array_equal(states, TILES[f"{book}.k{width}.states"])
    tile = np.array(exl3.rotated(words, book))
    assert tile.dtype == np.float16 and tile.tobytes() == TILES[f"{book}.k{width}.tile"].tobytes()


def test_every_width_occurs():
    assert {halves_of(width) for _, width in WIDTHS} == {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16}


@pytest.mark.parametrize("bits", range(1, 9))
def test_states_are_a_shift_register(bits):
    trellis = np.random.default_rng(bits).integers(-(1 << 15), 1 << 15, (2, 3, 16 * bits)).astype(np.int16)
    states = np.array(exl3.states(words_of(trellis), 2 * bits))
    own = states & ((1 << bits) - 1)
    np.testing.assert_array_equal(((np.roll(states, 1, -1) << bits) | own) & 0xFFFF, states)


def test_legacy_signs():
    np.testing.assert_array_equal(unpack_signs(TILES["legacy.su"]), TILES["legacy.suh"])


@pytest.mark.parametrize("path", LINEARS, ids=lambda path: path.stem)
def test_linears(path):
    """Dense and activation form within 1e-5 of the largest value."""
    refs, golden = read_header(path), mx.load(str(path))
    want_w, x, want_y = (np.array(golden[f"expected.{n}"]) for n in ("W", "x", "y"))
    matrix = identify(refs, NAME, want_w.T.shape)
    np.testing.assert_allclose(matrix.values(), want_w.T, atol=1e-5 * np.abs(want_w).max())
    np.testing.assert_allclose(matrix.values(100, 128), want_w.T[100:128], atol=1e-5 * np.abs(want_w).max())
    part = {k: mx.array(v) for k, v in matrix.stored().items()}
    y = np.array(Exl3Linear(part["words"], part["suh"], part["svh"], None, matrix.codebook)(mx.array(x)))
    np.testing.assert_allclose(y, want_y, atol=1e-5 * np.abs(want_y).max())


def linear(bits: float, book: str, seed: int, into: int = 256, out: int = 128) -> Exl3Linear:
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-(1 << 15), 1 << 15, (into // 16, out // 16, int(16 * bits))).astype(np.int16)
    scales = [mx.array(rng.standard_normal(n).astype(np.float16)) for n in (into, out)]
    return Exl3Linear(words_of(trellis), *scales, mx.array(rng.standard_normal(out).astype(np.float16)), book)


@pytest.mark.parametrize("bits, book", [(2, "mcg"), (2.5, "mul1"), (3, "3inst")])
def test_a_row_does_not_depend_on_its_company(bits, book):
    matrix, x = linear(bits, book, 1), mx.random.normal((9, 256), key=mx.random.key(2))
    whole = np.array(matrix(x))
    for n in range(1, 10):
        assert np.array(matrix(x[9 - n :])).tobytes() == whole[9 - n :].tobytes()


def test_experts_of_different_widths_and_codebooks():
    """Rows grouped by expert equal rows alone, and the reference with the bias."""
    kinds = [(2, "mcg"), (3.5, "mul1"), (5, "3inst")]
    experts = Exl3ExpertLinear([linear(bits, book, 10 + e) for e, (bits, book) in enumerate(kinds)], mx.float32)
    x, ids = mx.random.normal((6, 1, 1, 256), key=mx.random.key(3)), mx.array([[0, 2], [1, 2], [0, 1], [2, 0], [1, 0], [2, 1]])
    got = np.array(experts(x, ids))
    assert got.shape == (6, 2, 1, 128)
    for row in range(6):
        assert np.array(experts(x[row : row + 1], ids[row : row + 1])).tobytes() == got[row : row + 1].tobytes()
        for pick, e in enumerate(np.array(ids)[row]):
            m = experts.matrices[e]
            trellis = np.array(m.words).view(np.int16)
            want = exl3_reference.forward(np.array(x[row, 0]), trellis, np.array(m.suh), np.array(m.svh), m.codebook, np.array(m.bias))
            np.testing.assert_allclose(got[row, pick], want, atol=1e-5 * np.abs(want).max())

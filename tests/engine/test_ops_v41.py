"""Pure functions against goldens and published numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.config import EngramConfig, Yarn
from dsv41chat.engine.engram.hashing import NgramHasher
from dsv41chat.engine.engram.token_map import derive_token_map
from dsv41chat.engine.ops.fakequant import fp4_e4m3, fp4_ue8m0, fp8_ue8m0
from dsv41chat.engine.ops.norm import rms
from dsv41chat.engine.ops.rope import inverse_frequencies
from dsv41chat.engine.ops.select import NEG, ascending, best_blocks, best_mask, first_visible, inside_blocks
from dsv41chat.engine.plan import RopeSpec
from tests.release_tokenizer import release_bytes
from tests.v41 import golden

REAL_ENGRAM = EngramConfig((1, 14), (384006168, 384016682), 4, 8, 256, 16000000, 2, 99092)
REAL_INVERSE = (
    "1 .68765602 .4728708 .32517246 .2236068 .15376456 .10573713 .072710772 .05 .034382801 .02364354 .016258623 .01118034 .0076882281 "
    ".0052868563 .0036355386 .002265625 .0013968013 8.4968973e-4 5.0808196e-4 2.9697778e-4 1.6817999e-4 9.0867843e-5 4.5444232e-5 "
    "1.953125e-5 5.3723127e-6 3.6943032e-6 2.5404098e-6 1.7469281e-6 1.2012856e-6 8.260713e-7 5.680529e-7"
)


@pytest.mark.parametrize("op, name", [(fp8_ue8m0, "fp8_ue8m0_b32"), (fp4_ue8m0, "fp4_ue8m0_b32"), (fp4_e4m3, "fp4_e4m3_b16")])
def test_fake_quantisation_is_bit_equal(op, name):
    g = golden("v41/fakequant_ops.safetensors")
    got = op(mx.array(g["x"]))
    np.testing.assert_array_equal(np.array(got), g[name])
    in_bf16 = op(got.astype(mx.bfloat16)).astype(mx.float32)
    assert np.array_equal(np.array(got.astype(mx.bfloat16).astype(mx.float32)), g[name]), "every rounded value fits bfloat16"
    assert in_bf16.shape == got.shape


def test_real_rope_frequencies():
    spec = RopeSpec(160000.0, 64, Yarn(16, 32, 1, 65536))
    np.testing.assert_allclose(inverse_frequencies(spec), np.array(REAL_INVERSE.split(), np.float32), rtol=2e-7)
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(10000.0, 64, None)), 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)


def test_the_norm_keeps_the_release_epsilon():
    tiny = mx.full((1, 64), 1e-8)
    np.testing.assert_allclose(np.array(rms(tiny, None, 1e-20)), 1.0, rtol=1e-3)
    np.testing.assert_array_equal(np.array(rms(mx.zeros((1, 64)), None, 1e-20)), 0)


def test_real_engram_layout(tmp_path):
    g = golden("v41/engram_hash_real.safetensors")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(release_bytes("v41"))
    token_map = derive_token_map(path)
    np.testing.assert_array_equal(token_map[::97], g["token_map_every_97th"])
    hasher = NgramHasher(REAL_ENGRAM, token_map, image_token_id=129264)
    np.testing.assert_array_equal(np.stack(hasher.primes), g["primes"])
    np.testing.assert_array_equal(np.stack(hasher.multipliers), g["multipliers"])
    for i in range(5):
        ids = g[f"ids.{i}"]
        np.testing.assert_array_equal(hasher.compress(ids), g[f"compressed.{i}"])
        np.testing.assert_array_equal(hasher.rows([], ids), np.moveaxis(g[f"rows.{i}"].astype(np.int64), 1, 0))
        split = np.concatenate([hasher.rows([], ids[:4]), hasher.rows(list(ids[:4]), ids[4:])], axis=1)
        np.testing.assert_array_equal(split, hasher.rows([], ids))


def test_best_is_a_set_with_a_tie_rule():
    score = mx.array([[1.0, 3.0, 3.0, NEG, 3.0, 0.0], [NEG, NEG, 2.0, NEG, NEG, NEG]])
    index, present = ascending(best_mask(score, 3), 3)
    assert index.tolist() == [[1, 2, 4], [2, 0, 0]] and present.tolist() == [[True] * 3, [True, False, False]]
    index, present = ascending(best_mask(score, 2), 2)
    assert index.tolist()[0] == [1, 2], "a tie goes to the smaller index"


def test_selection_does_not_depend_on_the_buffer_width():
    rng = np.random.default_rng(0)
    row = np.round(rng.normal(size=(4, 40)), 1).astype(np.float32)
    wide = np.concatenate([row, np.full((4, 300), -np.inf, np.float32)], axis=1)
    narrow, wider = (ascending(best_mask(mx.array(s), 8), 8) for s in (row, wide))
    assert all(mx.array_equal(a, b).item() for a, b in zip(narrow, wider))


def test_everything_visible_is_what_scoring_would_pick():
    length = mx.array([[0], [3], [8]])
    score = mx.where(mx.arange(20)[None] < length, mx.random.normal((3, 20)), NEG)
    scored, direct = ascending(best_mask(score, 8), 8), first_visible(length, 8)
    assert all(mx.array_equal(a, b).item() for a, b in zip(scored, direct))


def test_the_newest_block_is_always_a_candidate():
    score = mx.array([[9.0, 9, 8, 8, 7, 7, 0, NEG]])
    chosen = best_blocks(score, mx.array([[7]]), 2, 2)
    assert [a.tolist() for a in chosen] == [[[0, 3]], [[True, True]]]
    assert inside_blocks(score, chosen, 2).tolist() == [[9, 9, NEG, NEG, NEG, NEG, 0, NEG]]
    none = best_blocks(mx.full((1, 8), NEG), mx.array([[0]]), 2, 2)
    assert not mx.any(none[1]).item() and not mx.any(inside_blocks(score, none, 2) > NEG).item(), "an empty slot chooses nothing, not block 0"
    few = best_blocks(score, mx.array([[7]]), 2, 9)
    assert few[0].shape == (1, 4) and mx.array_equal(inside_blocks(score, few, 2), score).item()

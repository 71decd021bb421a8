"""The compressed token map: the published figures, the rule written a second time, and how a pack provides it."""

from __future__ import annotations

import hashlib
import io
import json
import re
import unicodedata

import numpy as np
import pytest

from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.engram.token_map import MAP_FILE, derive_token_map, distinct_keys, load_token_map
from dsv41chat.engine.errors import PackDamaged, PackIncomplete
from dsv41chat.nano import embedded_pack
from tests.engine.chat.golden import load
from tests.release_tokenizer import SHA256, release_bytes, release_tokenizer
from tests.small_tokenizer import small_tokenizer_json

WHITE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"


def plain_map(tokenizer: ChatTokenizer) -> list[int]:
    """The rule again, with the standard library only."""
    numbers: dict[str, int] = {}
    out = []
    for id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(id).decode("utf-8", "replace")
        folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        folded = "".join(c.lower() for c in folded if unicodedata.category(c)[0] != "M")
        folded = re.sub(r"[ \t\r\n]+", " ", folded)
        folded = folded if folded == " " else folded.strip(WHITE)
        key = tokenizer.token_string(id) if "\ufffd" in text else folded or text
        out.append(numbers.setdefault(key, len(numbers)))
    return out


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """(pack folder, map) of the v4.1 release tokenizer."""
    pack = tmp_path_factory.mktemp("release")
    (pack / "tokenizer.json").write_bytes(release_bytes("v41"))
    return pack, derive_token_map(pack / "tokenizer.json")


@pytest.fixture
def small(tmp_path):
    """A pack folder that holds a small tokenizer, and its map."""
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "tokenizer.json").write_text(small_tokenizer_json(), encoding="utf-8")
    return pack, derive_token_map(pack / "tokenizer.json")


def test_the_folders_it_makes_are_private(small, tmp_path):
    kept = tmp_path / "data" / "cache"
    load_token_map(small[0], len(small[1]), kept)
    assert {folder.stat().st_mode & 0o777 for folder in (kept.parent, kept, kept / "engram_map")} == {0o700}


def test_release_figures(release):
    facts = load("tokenizer_facts")["engram_map"]
    token_map = release[1]
    assert token_map.dtype == np.int32 and token_map.shape == (facts["n_ids"],)
    assert distinct_keys(token_map) == facts["n_compressed"] == 99_092
    assert int(token_map.sum(dtype=np.int64)) == facts["sum"]
    assert hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest() == facts["int32_le_sha256"]
    text = json.dumps(token_map.tolist())
    assert len(text) == facts["json_dumps_chars"]
    assert hashlib.sha256(text.encode()).hexdigest() == facts["sha256_of_json_dumps"]
    assert {int(id): int(token_map[int(id)]) for id in facts["probes"]} == {int(k): v for k, v in facts["probes"].items()}


def test_both_releases_have_one_map(release, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(release_bytes("v4"))
    assert np.array_equal(derive_token_map(tmp_path / "tokenizer.json"), release[1])


def test_the_rule_written_twice(release, small):
    assert plain_map(release_tokenizer("v41")) == release[1].tolist()
    assert plain_map(ChatTokenizer.from_file(small[0] / "tokenizer.json")) == small[1].tolist()


def test_small_map(small):
    _, token_map = small
    assert 1 < distinct_keys(token_map) < len(token_map)
    assert distinct_keys(token_map) == len(np.unique(token_map))


def test_embedded_pack():
    """Its config names the count of the derived map."""
    pack = embedded_pack()
    config = json.loads((pack / "config.json").read_text())["text_config"]
    token_map = load_token_map(pack, config["vocab_size"], None)
    assert distinct_keys(token_map) == config["engram_compressed_vocab_size"]
    assert plain_map(ChatTokenizer.from_file(pack / "tokenizer.json")) == token_map.tolist()


def test_given_map_alone(small, tmp_path):
    pack, token_map = small
    (tmp_path / MAP_FILE).write_text(json.dumps(token_map.tolist()))
    assert np.array_equal(load_token_map(tmp_path, len(token_map), None), token_map)


def test_both_must_be_equal(small, tmp_path):
    pack, token_map = small
    (pack / MAP_FILE).write_text(json.dumps(token_map.tolist()))
    assert np.array_equal(load_token_map(pack, len(token_map), tmp_path), token_map)
    other = token_map.tolist()
    other[-1] = 0
    (pack / MAP_FILE).write_text(json.dumps(other))
    with pytest.raises(PackDamaged, match=f"first at id {len(other) - 1}"):
        load_token_map(pack, len(token_map), tmp_path)


def test_neither_is_refused(tmp_path):
    with pytest.raises(PackIncomplete, match="neither"):
        load_token_map(tmp_path, 10, None)


def test_length_must_be_the_vocabulary(small):
    pack, token_map = small
    with pytest.raises(PackDamaged, match="vocab_size"):
        load_token_map(pack, len(token_map) + 1, None)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[0, 2]", "[1]", "[0, -1]", "[0, true]", "[0, 0.5]", "[0, 99999999999]", '["0"]', "[0"])
def test_malformed_given_map(tmp_path, text):
    (tmp_path / MAP_FILE).write_text(text)
    with pytest.raises(PackDamaged, match="not a compressed token map"):
        load_token_map(tmp_path, 2, None)


def test_cache_is_written_used_and_repaired(small, tmp_path):
    pack, token_map = small
    cache = tmp_path / "cache"
    assert np.array_equal(load_token_map(pack, len(token_map), cache), token_map)
    (file,) = (cache / "engram_map").iterdir()
    assert file.name == f"{hashlib.sha256((pack / 'tokenizer.json').read_bytes()).hexdigest()}.npy"
    assert sorted(p.name for p in pack.iterdir()) == ["tokenizer.json"]
    np.save(file, np.zeros_like(token_map))  # what lies in the cache is what is used
    assert not load_token_map(pack, len(token_map), cache).any()
    for junk in (b"", b"junk", file.read_bytes()[:-3], _npy(token_map[::-1]), _npy(token_map.astype(np.int64)), _npy(token_map[:0])):
        file.write_bytes(junk)
        assert np.array_equal(load_token_map(pack, len(token_map), cache), token_map)
        assert np.array_equal(np.load(file), token_map)


def test_cache_that_cannot_be_written_costs_only_time(small, tmp_path):
    pack, token_map = small
    (tmp_path / "file").write_text("")
    assert np.array_equal(load_token_map(pack, len(token_map), tmp_path / "file"), token_map)


def test_release_tokenizers_are_the_published_files():
    assert {family: hashlib.sha256(release_bytes(family)).hexdigest() for family in SHA256} == SHA256

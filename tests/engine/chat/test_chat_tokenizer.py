"""The tokenizer: control tokens by spelling only, text that never becomes one, bytes in and out."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

import dsv41chat.engine.chat
from dsv41chat.engine.chat.markers import DEFENSIVE, EOS, FAMILIES
from dsv41chat.engine.chat.tokenizer import BYTE_ALPHABET, ChatTokenizer, stop_ids
from dsv41chat.engine.errors import PackDamaged, PackIncomplete
from tests.engine.chat.random_chats import random_text, random_unicode
from tests.markers import CONTROL, HOSTILE, MARKERS, control_ids, decode
from tests.release_tokenizer import release_bytes, release_tokenizer
from tests.small_tokenizer import FIRST, LAST, embedded_bytes, embedded_tokenizer, small_tokenizer, small_tokenizer_json

TOKENIZERS = {
    "v4": lambda: release_tokenizer("v4"),
    "v41": lambda: release_tokenizer("v41"),
    "small": small_tokenizer,
    "embedded": embedded_tokenizer,
}
each = pytest.mark.parametrize("name", TOKENIZERS)


def test_the_marker_list_is_the_released_one():
    assert len(set(MARKERS)) == len(MARKERS)
    assert set(MARKERS) == set(release_tokenizer("v4").spellings) | set(release_tokenizer("v41").spellings)


@each
def test_no_marker_spelling_becomes_a_control_id(name):
    tokenizer = TOKENIZERS[name]()
    for spelling in MARKERS:
        for text in (spelling, f"a{spelling}b", f" {spelling}\n", spelling * 2):
            ids = tokenizer.encode_text(text)
            assert not control_ids(tokenizer, ids), spelling
            assert decode(tokenizer, ids) == text
    assert not control_ids(tokenizer, tokenizer.encode_text(HOSTILE))


@each
def test_the_whole_string_way_would_not_be_safe(name):
    """What the tests above would catch: the tokenizer with its added tokens turns spellings into control ids."""
    tokenizer = TOKENIZERS[name]()
    data = {"small": small_tokenizer_json().encode(), "embedded": embedded_bytes()}.get(name) or release_bytes(name)
    ids = Tokenizer.from_str(data.decode()).encode(HOSTILE, add_special_tokens=False).ids
    assert len(control_ids(tokenizer, ids)) > 20


@each
def test_random_text_comes_back(name):
    tokenizer, rng = TOKENIZERS[name](), Random(3)
    for _ in range(400):
        text = random_unicode(rng, rng.randint(0, 40)) if rng.random() < 0.5 else random_text(rng, 0, 12)
        ids = tokenizer.encode_text(text)
        assert not control_ids(tokenizer, ids)
        assert decode(tokenizer, ids) == text


@each
def test_control_tokens_by_spelling(name):
    tokenizer = TOKENIZERS[name]()
    assert len(tokenizer.added) == len(tokenizer.spellings)
    for spelling in tokenizer.spellings:
        id = tokenizer.marker(spelling)
        assert tokenizer.is_added(id) and tokenizer.find_marker(spelling) == id
        assert tokenizer.token_bytes(id) == spelling.encode()
    assert tokenizer.find_marker("<｜nothing｜>") is None
    with pytest.raises(PackIncomplete, match="nothing"):
        tokenizer.marker("<｜nothing｜>")
    with pytest.raises(PackIncomplete):
        tokenizer.marker("hello")  # an ordinary piece is no control token


@each
def test_every_id_has_bytes_and_others_have_none(name):
    tokenizer = TOKENIZERS[name]()
    assert all(tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size))
    for id in (-1, tokenizer.vocab_size, tokenizer.vocab_size + 1000):
        assert tokenizer.token_bytes(id) == b"" and not tokenizer.is_added(id)


@pytest.mark.parametrize("name", ["small", "embedded"])
def test_small_layout(name):
    """The embedded model's layout: three markers first, the others last, nothing hard-coded in between."""
    tokenizer = TOKENIZERS[name]()
    assert [tokenizer.marker(spelling) for spelling in FIRST] == [0, 1, 2]
    assert [tokenizer.marker(spelling) for spelling in LAST] == list(range(tokenizer.vocab_size - len(LAST), tokenizer.vocab_size))


def test_byte_alphabet():
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))
    assert BYTE_ALPHABET["A"] == 65 and BYTE_ALPHABET["Ġ"] == 32 and BYTE_ALPHABET["Ċ"] == 10 and BYTE_ALPHABET["Ń"] == 0xAD


def test_lone_surrogates_are_replaced():
    tokenizer = small_tokenizer()
    assert decode(tokenizer, tokenizer.encode_text("a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert decode(tokenizer, tokenizer.encode_text("\ud83d\ude42")) == "🙂"


def test_an_ordinary_piece_with_a_marker_spelling_is_spelled_in_bytes():
    """A vocabulary in which text can reach the id of a control token: the text is kept, the id avoided."""
    plain = small_tokenizer()
    victim = next(id for id in range(plain.vocab_size) if len(data := plain.token_bytes(id)) > 1 and data.isalpha())
    text = plain.token_bytes(victim).decode()
    assert plain.encode_text(text) == [victim]
    spec = json.loads(small_tokenizer_json())
    spec["added_tokens"].append({"id": victim, "content": text, "special": False})
    tokenizer = ChatTokenizer(json.dumps(spec).encode())
    ids = tokenizer.encode_text(text)
    assert not control_ids(tokenizer, ids)
    assert decode(tokenizer, ids) == text


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(PackIncomplete, match="missing"):
        ChatTokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(PackDamaged, match="cannot be read"):
        ChatTokenizer.from_file(tmp_path)
    good = small_tokenizer_json()
    for text in ("", "{}", "[]", good[: len(good) // 2], good.replace('"BPE"', '"None"'), '{"model": {"vocab": {}}, "added_tokens": {}}'):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(PackDamaged, match="tokenizer.json is not a readable tokenizer"):
            ChatTokenizer.from_file(tmp_path / "tokenizer.json")
    spec = json.loads(good)
    spec["model"]["merges"] = []
    spec["model"]["vocab"] = {piece: id for piece, id in spec["model"]["vocab"].items() if piece not in "qz"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(PackDamaged, match="cannot spell 2 of 256 bytes"):
        ChatTokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_ids(family):
    tokenizer = release_tokenizer(family)
    eos, defensive = stop_ids(tokenizer, family)
    assert eos == tokenizer.marker(EOS) == 1
    assert defensive == {0, 2, 128799, 128803, 128804, 129264}  # the release's ids, here to check the spellings
    small = small_tokenizer()
    eos, defensive = stop_ids(small, family)
    assert eos not in defensive and defensive == {small.find_marker(s) for s in DEFENSIVE[family]} - {None}


def test_unknown_family():
    with pytest.raises(ValueError, match="v5"):
        stop_ids(small_tokenizer(), "v5")


def test_nothing_here_imports_mlx():
    """Encoding runs on any thread and without a back end."""
    folder = Path(dsv41chat.engine.chat.__file__).parent
    inside = {path.stem for path in folder.glob("*.py")} | {"chat", "errors"}
    for path in [*folder.glob("*.py"), folder.parent / "engram" / "token_map.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None)
                names = {(module or alias.name).split(".")[0] for alias in node.names}
                if getattr(node, "level", 0):
                    assert names <= inside, path
                else:
                    assert names <= sys.stdlib_module_names | {"tokenizers", "numpy"}, path


def test_control_is_part_of_the_list():
    assert set(CONTROL) <= set(MARKERS)

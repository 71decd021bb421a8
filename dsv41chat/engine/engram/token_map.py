"""The Engram's compressed token ids: tokens that differ only in case, accents or white space share one.

The n-gram hashes depend on the map and on how many compressed ids there are, so a wrong map breaks every lookup without
a visible error. A pack may carry it as engram_token_map.json; otherwise, and as a check, it is derived from the tokenizer.
Source: spec chat_encoding, section 9.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Regex, normalizers

from ..chat.tokenizer import ChatTokenizer
from ..errors import PackDamaged, PackIncomplete

log = logging.getLogger(__name__)

MAP_FILE = "engram_token_map.json"
_ONE_SPACE = "\ue000"  # stands for a text that is exactly one space while the ends are stripped


def _fold() -> normalizers.Normalizer:
    """Compatibility forms, without any marks, in lower case, white space runs as one space, ends stripped.

    Lower case goes character by character (no final sigma), and a text that is just one space stays one.
    """
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )


def derive_token_map(tokenizer_json: str | Path) -> np.ndarray:
    """int32 [ids]: the compressed id of every token id, numbered by first appearance. About a second for a release.

    Raises PackIncomplete or PackDamaged when the tokenizer cannot be read.
    """
    return _derive(ChatTokenizer.from_file(tokenizer_json))


def _derive(tokenizer: ChatTokenizer) -> np.ndarray:
    fold = _fold()
    numbers: dict[str, int] = {}
    out = np.empty(tokenizer.vocab_size, np.int32)
    for id in range(tokenizer.vocab_size):
        spelling = tokenizer.token_string(id)
        if spelling is None:
            raise PackDamaged(f"the tokenizer has no token {id}, so there is no compressed id for it")
        text = tokenizer.token_bytes(id).decode("utf-8", "replace")
        key = spelling if "\ufffd" in text else fold.normalize_str(text) or text
        out[id] = numbers.setdefault(key, len(numbers))
    return out


def distinct_keys(token_map: np.ndarray) -> int:
    """How many compressed ids a map has; a pack's config must name the same number."""
    return int(token_map.max()) + 1


def load_token_map(pack_folder: str | Path, vocab_size: int, cache_dir: str | Path | None) -> np.ndarray:
    """int32 [vocab_size]: the pack's own map, or the one derived from its tokenizer; with both they must be equal.

    cache_dir: where derived maps are kept, by the tokenizer's sha256 (None: derived anew each time). Nothing is written
    beside the pack. Raises PackIncomplete with neither file, PackDamaged for a map that is malformed, of another length, or
    not the tokenizer's.
    """
    pack = Path(pack_folder)
    given = _read_map(pack / MAP_FILE) if (pack / MAP_FILE).exists() else None
    tokenizer_json = pack / "tokenizer.json"
    derived = _derived_cached(tokenizer_json, cache_dir) if tokenizer_json.exists() else None
    if given is None and derived is None:
        raise PackIncomplete(f"{pack} has neither {MAP_FILE} nor tokenizer.json: the Engram tables cannot be addressed")
    if given is not None and derived is not None and not np.array_equal(given, derived):
        raise PackDamaged(
            f"{MAP_FILE} of {pack} is not the map of its tokenizer.json ({_difference(given, derived)})",
            "copy both files again from the same repository",
        )
    token_map = derived if given is None else given
    if len(token_map) != vocab_size:
        raise PackDamaged(f"the compressed token map of {pack} has {len(token_map)} ids, the config says vocab_size {vocab_size}")
    return token_map


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    if len(a) != len(b):
        return f"{len(a)} and {len(b)} ids"
    first = int(np.flatnonzero(a != b)[0])
    return f"first at id {first}: {a[first]} and {b[first]}"


def _read_map(path: Path) -> np.ndarray:
    """A JSON list of compressed ids, each new one the next number."""
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, list) or not values or not all(type(v) is int for v in values):
            raise ValueError("not a list of whole numbers")
        token_map = np.array(values, np.int32)
        _check_numbering(token_map)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise PackDamaged(f"{path} is not a compressed token map: {error}", "copy the file again, or delete it to derive the map") from error
    return token_map


def _check_numbering(token_map: np.ndarray) -> None:
    """Raise ValueError unless each compressed id that appears for the first time is the next number."""
    highest = np.maximum.accumulate(token_map)
    if token_map.min() < 0 or highest[0] != 0 or np.diff(highest).max(initial=0) > 1:
        raise ValueError("ids are not numbered by first appearance")


def _derived_cached(tokenizer_json: Path, cache_dir: str | Path | None) -> np.ndarray:
    """The derived map, from the cache when it is there and sound. A cache that cannot be read or written costs only time."""
    try:
        data = tokenizer_json.read_bytes()
    except OSError as error:
        raise PackDamaged(f"{tokenizer_json} cannot be read: {error.strerror or error}") from error
    if cache_dir is None:
        return _derive(ChatTokenizer(data, str(tokenizer_json)))
    file = Path(cache_dir) / "engram_map" / f"{hashlib.sha256(data).hexdigest()}.npy"
    try:
        cached = np.load(file, allow_pickle=False)
        if cached.dtype != np.int32 or cached.ndim != 1 or not len(cached):
            raise ValueError("not a list of int32")
        _check_numbering(cached)
        return cached
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s cannot be used (%s); deriving it again", file, error)
    derived = _derive(ChatTokenizer(data, str(tokenizer_json)))
    try:
        for made in (*reversed(file.parent.parents), file.parent):  # private, the cache folder above it too
            made.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            np.save(Path(folder) / file.name, derived)
            os.replace(Path(folder) / file.name, file)
    except OSError as error:
        log.warning("the token map cannot be kept in %s: %s", file.parent, error)
    return derived

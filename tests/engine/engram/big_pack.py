"""The embedded pack with engram tables of another size: sparse files in which only chosen rows hold values."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np

from dsv41chat.engine.config import parse_v41
from dsv41chat.engine.engram.hashing import NgramHasher, _primes_from
from dsv41chat.engine.engram.token_map import load_token_map
from dsv41chat.engine.pack.index import read_header


def table_rows(config: dict, vocab_size: int) -> list[int]:
    """Rows of each layer's table: the sums of its primes, all from `vocab_size` on."""
    per_layer = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
    primes = _primes_from(vocab_size)
    return [sum(next(primes) for _ in range(per_layer)) for _ in config["engram_layer_ids"]]


def grow_tables(source: Path, target: Path, vocab_size: int) -> None:
    """Copy a pack, its tables replaced by holes of the size that `vocab_size` rows a column ask for."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    text = config["text_config"]
    text["engram_vocab_size"] = vocab_size
    text["engram_num_embeddings"] = table_rows(text, vocab_size)
    (target / "config.json").write_text(json.dumps(config))
    rows = dict(zip(text["engram_layer_ids"], text["engram_num_embeddings"]))
    shards = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    for layer, count in rows.items():
        _rewrite_shard(target / shards[f"layers.{layer}.engram.embed.weight"], f"layers.{layer}.engram.embed.", count)


def _rewrite_shard(path: Path, stem: str, rows: int) -> None:
    tensors = read_header(path)
    data = path.read_bytes()
    header, at, small = {}, 0, []
    for name, ref in sorted(tensors.items(), key=lambda item: item[0].startswith(stem)):
        shape = list(ref.shape)
        size = ref.nbytes
        if name.startswith(stem):
            size = size // shape[0] * rows
            shape[0] = rows
        else:
            small.append(data[ref.offset : ref.offset + ref.nbytes])
        header[name] = {"dtype": ref.dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.unlink()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for part in small:
            out.write(part)
        out.truncate(8 + len(raw) + at)


def write_rows(pack: Path, ids: list[int], seed: int = 0) -> int:
    """Give every row that these ids address a value that depends on the row alone. Returns the number of distinct rows."""
    outer = json.loads((pack / "config.json").read_text())
    config = parse_v41(outer)
    hasher = NgramHasher(config.engram, load_token_map(pack, config.vocab_size, None), config.image_token_id)
    shards = json.loads((pack / "model.safetensors.index.json").read_text())["weight_map"]
    count = 0
    for layer, rows in zip(config.engram.layer_ids, hasher.rows([], np.array(ids))):
        name = f"layers.{layer}.engram.embed."
        path = pack / shards[name + "weight"]
        tensors = read_header(path)
        distinct = np.unique(rows)
        count += len(distinct)
        fd = os.open(path, os.O_WRONLY)
        for row in distinct.tolist():
            rng = np.random.default_rng((seed, layer, row))
            for leaf, low, high in (("weight", 0x20, 0x50), ("scale", 118, 124)):
                ref = tensors[name + leaf]
                width = ref.nbytes // ref.shape[0]
                os.pwrite(fd, rng.integers(low, high, width, np.uint8).tobytes(), ref.offset + row * width)
        os.close(fd)
    return count

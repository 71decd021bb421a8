"""From a folder to a trunk: probe by headers, check, then materialise layer by layer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from dsv41chat.engine.config import V41Config, family_of, parse_v41, read_config_json
from dsv41chat.engine.config_v4 import V4Config, parse_v4
from dsv41chat.engine.device import device_kind
from dsv41chat.engine.draft.load import DraftModel, load_draft_model
from dsv41chat.engine.engram.hashing import NgramHasher
from dsv41chat.engine.engram.os_layer import PosixLayer
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings, TableRef, TableSpec, find_table
from dsv41chat.engine.engram.token_map import load_token_map
from dsv41chat.engine.errors import Cancelled, PackUnsupported
from dsv41chat.engine.events import Loading
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.drafter import DrafterFound, find_drafter
from dsv41chat.engine.pack.index import PackIndex, TensorRef, open_index
from dsv41chat.engine.pack.names import Expected, check_names, expected_v41, scale_name
from dsv41chat.engine.pack.names_v4 import expected_v4, ignored_v4
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan, build_plan
from dsv41chat.engine.trunk_v4 import LayerV4, TrunkV4
from dsv41chat.engine.trunk_v41 import Layer, TrunkV41

# On the CPU, matrices are decoded once while that stays small; beyond it they stay packed as on a GPU.
_DECODE_LIMIT_BYTES = 4 * 2**30
_EDGE_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Pack:
    """A checked pack of which no weight has been read. notes: what was ignored, in words."""

    folder: Path
    config: V41Config | V4Config
    plan: tuple[LayerPlan, ...]
    index: PackIndex
    expected: dict[str, Expected]
    fingerprint: str
    notes: tuple[str, ...]
    found: DrafterFound

    @property
    def table_refs(self) -> list[tuple[TensorRef, TensorRef]]:
        """(rows, scales) per engram layer."""
        names = [f"layers.{i}.engram.embed.weight" for i in (self.config.engram.layer_ids if self.config.engram else ())]
        return [(self.index.tensors[n], self.index.tensors[scale_name(n)]) for n in names]

    @property
    def table_specs(self) -> list[TableSpec]:
        """What the reader is given, in slot order. Raises PackError for a table that is absent or spelled twice."""
        if (engram := self.config.engram) is None:
            return []
        refs = {n: TableRef(t.file, t.offset, t.dtype, t.shape) for n, t in self.index.tensors.items() if ".engram.embed." in n}
        return [find_table(refs, layer, engram.head_dim, rows) for layer, rows in zip(engram.layer_ids, engram.table_rows)]

    @property
    def table_bytes(self) -> int:
        return sum(ref.nbytes for pair in self.table_refs for ref in pair)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the text trunk on disk, tables not counted."""
        tensors, loaded = self.index.tensors, [n for n, e in self.expected.items() if e.kind != "table"]
        scales = [scale_name(n) for n in loaded if n.endswith("weight") and scale_name(n) in tensors]
        return sum(tensors[n].nbytes for n in (*loaded, *scales))

    @property
    def drafter(self) -> str | None:
        """The kind of drafter that the pack has complete: dspark, mtp or None."""
        return self.found.plan.kind if self.found.plan else None

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafter on disk."""
        return self.found.nbytes(self.index.tensors)


def open_pack(folder: str | Path) -> Pack:
    """Read config and headers and run the strict gate. Raises PackError; reads no tensor data."""
    folder = Path(folder)
    outer = read_config_json(folder)
    family = family_of(outer)
    method = (outer.get("quantization_config") or {}).get("quant_method")
    if outer.get("quantization") is not None or method not in (None, "fp8"):
        found = f"$.quantization_config.quant_method {method!r}" if method not in (None, "fp8") else "$.quantization"
        raise PackUnsupported(f"config.json: {found} is a converted build; this version loads the release layout", "use the original upload")
    config = parse_v4(outer) if family == "v4" else parse_v41(outer)
    plan, index = build_plan(config), open_index(folder)
    ignored: set[str] = set()
    if family == "v4":
        index = replace(index, tensors=release_tensors(index.tensors))
        expected = expected_v4(config, plan, stacked=any(n.endswith(".experts.w1.weight") for n in index.tensors))
        ignored = ignored_v4(config, plan)
    else:
        expected = expected_v41(config, plan)
    notes = check_names(index.tensors, expected, config.num_hidden_layers, config.weight_block, ignored)
    found = find_drafter(index.tensors, config)
    notes = (*index.notes, *notes, *((found.fault,) if found.fault else ()), *found.notes)
    return Pack(folder, config, plan, index, expected, pack_fingerprint(folder, index, family, outer), notes, found)


def pack_fingerprint(folder: Path, index: PackIndex, family: str, outer: dict) -> str:
    """sha256 over what the pack is: config, tokenizer, per weight file its name, size, header and data edges. Not its place or date."""
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    files = []
    for path in index.files:
        size, h = path.stat().st_size, hashlib.sha256()
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            h.update(f.read(length))
            h.update(f.read(_EDGE_BYTES))
            f.seek(max(8 + length, size - _EDGE_BYTES))
            h.update(f.read(_EDGE_BYTES))
        files.append([path.name, size, h.hexdigest()])
    what = {
        "family": family,
        "config": digest(folder / "config.json"),
        "tokenizer": digest(folder / "tokenizer.json"),
        "token_map": digest(folder / "engram_token_map.json"),
        "files": files,
        "quantization": outer.get("quantization_config") or outer.get("quantization"),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def default_dtype(pack: Pack) -> mx.Dtype:
    """float32 on the CPU, where bfloat16 is emulated; bfloat16 elsewhere."""
    return mx.float32 if device_kind() == "cpu" else mx.bfloat16


def stays_packed(pack: Pack) -> bool:
    """Whether fp8 and fp4 matrices keep their bytes in memory instead of being decoded at load."""
    values = sum(math.prod(e.shape) for e in pack.expected.values() if e.kind != "table")
    return device_kind() != "cpu" or 4 * values > _DECODE_LIMIT_BYTES


def build_trunk(
    pack: Pack,
    *,
    dtype: mx.Dtype | None = None,
    cache_quant: bool = True,
    linear_input_fp8: bool = False,
    qat_sim: bool = False,
    engram: bool = True,
    packed: bool | None = None,
    cache_dir: Path | None = None,
    engram_settings: EngramSettings | None = None,
    facts: MutableMapping[str, str] | None = None,
    os_layer: PosixLayer | None = None,
    progress: Callable[[Loading], None] = lambda event: None,
    cancel: Callable[[], bool] = lambda: False,
) -> TrunkV41 | TrunkV4:
    """Materialise the trunk. cancel is asked between layers; raises Cancelled or PackError.

    cache_quant, linear_input_fp8: the roundings of the V4.1 family. qat_sim: that of the V4 family.
    engram False leaves the tables out: only tests and goldens ask for that. packed None decides by device and size.
    engram_settings, facts, os_layer: as `EngramReader.open` takes them.
    """
    c, dtype = pack.config, dtype or default_dtype(pack)
    source = WeightSource(pack.index.tensors, dtype, stays_packed(pack) if packed is None else packed, linear_input_fp8 and c.family == "v41")
    hasher = tables = None
    progress(Loading("map", 0, len(pack.table_refs), "rows"))
    if c.engram and engram:
        hasher = NgramHasher(c.engram, load_token_map(pack.folder, c.vocab_size, cache_dir), c.image_token_id)

        def copied(done: int, total: int) -> None:
            progress(Loading("tables", done, total, "bytes"))
            if cancel():
                raise Cancelled("loading was cancelled")

        tables = EngramReader.open(pack.table_specs, engram_settings, facts, os_layer=os_layer, progress=copied)
    embed, norm = source.array("embed.weight"), source.float32("norm.weight")
    # The V4.1 head computes in float32, the V4 head in the model's dtype.
    head = source.linear("head.weight", rounds=False, dtype=mx.float32 if c.family == "v41" else None)
    mx.eval(embed, _arrays(head), norm)
    layers = []
    for plan in pack.plan:
        if cancel():
            raise Cancelled("loading was cancelled")
        progress(Loading("weights", plan.index, len(pack.plan), "layers"))
        layer = LayerV4.load(c, source, plan, qat_sim) if c.family == "v4" else Layer.load(c, source, plan, cache_quant)
        mx.eval(_arrays(layer))
        mx.clear_cache()
        layers.append(layer)
    taps = pack.found.plan.taps if pack.found.plan else ()
    if c.family == "v4":
        return TrunkV4(c, pack.plan, embed, HyperHead.load(c, source, "hc_head"), norm, head, layers, dtype, taps)
    return TrunkV41(c, pack.plan, embed, head, norm, layers, hasher, tables, dtype, taps)


def build_drafter(
    pack: Pack, trunk: TrunkV41 | TrunkV4, *, rounded: bool, linear_input_fp8: bool = False, packed: bool | None = None
) -> DraftModel | None:
    """Materialise the pack's drafter on its trunk; None when it has none. rounded: whether the trunk rounds its window rows."""
    if pack.found.plan is None:
        return None
    packed = stays_packed(pack) if packed is None else packed
    source = WeightSource(pack.index.tensors, trunk.dtype, packed, linear_input_fp8 and pack.config.family == "v41")
    return load_draft_model(pack.found.plan, trunk, source, rounded)


def _arrays(module: object) -> list[mx.array]:
    """Every array below a module; modules are plain dataclasses."""
    if isinstance(module, mx.array):
        return [module]
    return [a for v in getattr(module, "__dict__", {}).values() for a in _arrays(v)]

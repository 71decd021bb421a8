"""From a folder to a trunk: probe by headers, check, then materialise layer by layer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from dsv41chat.engine.config import V41Config, family_of, parse_v41, read_config_json, with_real_heads
from dsv41chat.engine.config_v4 import V4Config, parse_v4
from dsv41chat.engine.device import device_kind
from dsv41chat.engine.draft.load import DraftModel, load_draft_model
from dsv41chat.engine.engram.hashing import NgramHasher
from dsv41chat.engine.engram.os_layer import PosixLayer
from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings, TableSpec
from dsv41chat.engine.engram.token_map import load_token_map
from dsv41chat.engine.errors import Cancelled, PackIncomplete
from dsv41chat.engine.events import Loading
from dsv41chat.engine.kernels.routes import STOCK, extend, install
from dsv41chat.engine.kernels.verdicts import Verdicts
from dsv41chat.engine.nn.hyper_connection import HyperHead
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.drafter import DrafterFound, find_drafter
from dsv41chat.engine.pack.elsewhere import with_tables
from dsv41chat.engine.pack.gate import check_names, names_in_use, table_spec
from dsv41chat.engine.pack.index import UNFINISHED_NAME, PackIndex, open_index
from dsv41chat.engine.pack.names import Expected, expected_v41
from dsv41chat.engine.pack.names_v4 import expected_v4, ignored_v4, whole_experts
from dsv41chat.engine.pack.quant_config import fp8_block, survey
from dsv41chat.engine.pack.source import WeightSource
from dsv41chat.engine.plan import LayerPlan, build_plan
from dsv41chat.engine.trunk_v4 import LayerV4, TrunkV4
from dsv41chat.engine.trunk_v41 import Layer, TrunkV41

# On the CPU, matrices are decoded once while that stays small; beyond it they stay packed as on a GPU.
_DECODE_LIMIT_BYTES = 4 * 2**30
_EDGE_BYTES = 64 * 2**10
# A fingerprint reads files up to this size whole, as long as they are so many bytes together: a quarter of a second at the most.
_WHOLE_BYTES = 64 * 2**20
_WHOLE_TOTAL = 256 * 2**20


@dataclass(frozen=True)
class Pack:
    """A checked pack of which no weight has been read. index: tensors by release name, whatever names the files use.

    formats: how many matrices have which format. notes: what was ignored or is odd, in words.
    """

    folder: Path
    config: V41Config | V4Config
    plan: tuple[LayerPlan, ...]
    index: PackIndex
    expected: dict[str, Expected]
    fingerprint: str
    formats: dict[str, int]
    notes: tuple[str, ...]
    found: DrafterFound

    @property
    def tables(self) -> dict[str, Expected]:
        """The expected Engram tables in slot order."""
        return {name: want for name, want in self.expected.items() if want.kind == "table"}

    @property
    def table_specs(self) -> list[TableSpec]:
        """What the row reader is given, in slot order."""
        return [table_spec(self.index.tensors, name, want) for name, want in self.tables.items()]

    @property
    def table_bytes(self) -> int:
        return self._bytes(self.tables)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the text trunk on disk, tables not counted."""
        return self._bytes({name: want for name, want in self.expected.items() if want.kind != "table"})

    def _bytes(self, expected: dict[str, Expected]) -> int:
        return sum(self.index.tensors[n].nbytes for n in names_in_use(self.index.tensors, expected))

    @property
    def drafter(self) -> str | None:
        """The kind of drafter that the pack has complete: dspark, mtp or None."""
        return self.found.plan.kind if self.found.plan else None

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafter on disk."""
        return self.found.nbytes(self.index.tensors)


def open_pack(folder: str | Path, *, unfinished: bool = False) -> Pack:
    """Read config and headers of a build in any format and run the strict gate. Raises PackError; reads no tensor data.

    unfinished: a folder that is being written is looked at all the same; for its writer.
    """
    folder = Path(folder)
    if not unfinished:
        _refuse_unfinished(folder)
    outer = with_real_heads(read_config_json(folder))
    family = family_of(outer)
    config = parse_v4(outer) if family == "v4" else parse_v41(outer)
    index = open_index(folder)
    index = replace(index, tensors=release_tensors(index.tensors))
    if family == "v4":
        config = replace(config, whole_experts=whole_experts(index.tensors, config))
    plan = build_plan(config)
    expected = expected_v4(config, plan) if family == "v4" else expected_v41(config, plan)
    index = with_tables(index, expected)
    ignored = ignored_v4(config, plan) if family == "v4" else ()
    notes = check_names(index.tensors, expected, config.num_hidden_layers, fp8_block(outer), ignored)
    formats, odd = survey(index.tensors, expected, outer)
    found = find_drafter(index.tensors, config)
    notes = (*index.notes, *notes, *odd, *((found.fault,) if found.fault else ()), *found.notes)
    return Pack(folder, config, plan, index, expected, pack_fingerprint(folder, index, family, outer), formats, notes, found)


def _refuse_unfinished(folder: Path) -> None:
    path = folder / UNFINISHED_NAME
    if not path.is_file():
        return
    if '"experts"' in path.read_text(encoding="utf-8"):
        raise PackIncomplete(f"{folder.name} is a half-pruned build", f"finish it: dsv41chat models prune SRC {folder} --experts N --resume")
    raise PackIncomplete(f"{folder.name} is a half-converted build", f"finish it: dsv41chat models convert SRC {folder} --recipe R --resume")


def pack_fingerprint(folder: Path, index: PackIndex, family: str, outer: dict) -> str:
    """sha256 over what the pack is: config, tokenizer, per weight file its name, size and bytes. Not its place or date.

    Files up to 64 MiB count whole (the embedded pack does: any changed byte is another build, with states and figures of its own), up to
    256 MiB of them in the order of their names. Larger files count by header and the first and last 64 KiB of their data, so that a
    build of hundreds of GB opens at once: damage inside them is found by `models verify --full`, not by the fingerprint.
    """
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    files, whole = [], 0
    for path in index.files:
        size, h = path.stat().st_size, hashlib.sha256()
        if size <= _WHOLE_BYTES and whole + size <= _WHOLE_TOTAL:
            whole += size
            files.append([path.name, size, digest(path)])
            continue
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
    routes: str = STOCK,
    cache_dir: Path | None = None,
    engram_settings: EngramSettings | None = None,
    facts: MutableMapping[str, str] | None = None,
    recheck: bool = False,
    os_layer: PosixLayer | None = None,
    progress: Callable[[Loading], None] = lambda event: None,
    cancel: Callable[[], bool] = lambda: False,
) -> TrunkV41 | TrunkV4:
    """Materialise the trunk, layer by layer. cancel is asked between layers; raises Cancelled or PackError.

    cache_quant, linear_input_fp8: the roundings of the V4.1 family. qat_sim: that of the V4 family.
    engram False leaves the tables out: only tests and goldens ask for that. packed None decides by device and size.
    routes: auto, stock or the name of one, `kernels.routes`; raises RouteUnavailable for one that is demanded and cannot be had.
    engram_settings, os_layer: as `EngramReader.open` takes them. facts: measured verdicts, of the tables' reads and of the routes.
    recheck: compare the routes with stock again, whatever is known.
    """
    c = pack.config
    source = weight_source(pack, pack.expected, dtype=dtype, packed=packed, round_inputs=linear_input_fp8)
    hasher = tables = None
    progress(Loading("map", 0, len(pack.tables), "rows"))
    if c.engram and engram:
        hasher = NgramHasher(c.engram, load_token_map(pack.folder, c.vocab_size, cache_dir), c.image_token_id)

        def copied(done: int, total: int) -> None:
            progress(Loading("tables", done, total, "bytes"))
            if cancel():
                raise Cancelled("loading was cancelled")

        tables = EngramReader.open(pack.table_specs, engram_settings, facts, os_layer=os_layer, progress=copied)

    def finish(part: object, done: int) -> None:
        mx.eval(arrays_of(part))
        mx.clear_cache()
        if cancel():
            raise Cancelled("loading was cancelled")
        if done < len(pack.plan):
            progress(Loading("weights", done, len(pack.plan), "layers"))

    try:
        trunk = _assemble(pack, source, cache_quant, qat_sim, hasher, tables, finish)
        rounds = {"cache_quant": cache_quant, "linear_input_fp8": linear_input_fp8, "qat_sim": qat_sim}
        options = {"dtype": trunk.dtype, "packed": source.packed, **rounds}
        known = None if facts is None or recheck else Verdicts(facts, pack.fingerprint, "trunk", options)
        trunk.routes = install(trunk, trunk, routes, verdicts=known)
        return trunk
    except BaseException:
        if tables is not None:
            tables.close()
        raise


def outline_trunk(pack: Pack, *, dtype: mx.Dtype | None = None, packed: bool | None = None) -> TrunkV41 | TrunkV4:
    """The trunk as `build_trunk` would make it, without its values and tables: nothing is read and nothing is allocated."""
    source = weight_source(pack, pack.expected, dtype=dtype, packed=packed, empty=True)
    return _assemble(pack, source, True, False, None, None, lambda part, done: None)


def weight_source(
    pack: Pack, expected: dict[str, Expected], *, dtype: mx.Dtype | None = None, packed: bool | None = None, round_inputs: bool = False,
    empty: bool = False,
) -> WeightSource:  # fmt: skip
    """Where the tensors of `expected`, the trunk's or a drafter's, are read from."""
    keeps = stays_packed(pack) if packed is None else packed
    return WeightSource(pack.index.tensors, expected, dtype or default_dtype(pack), keeps, round_inputs and pack.config.family == "v41", empty)


def _assemble(
    pack: Pack, source: WeightSource, cache_quant: bool, qat_sim: bool, hasher: NgramHasher | None, tables: EngramReader | None,
    finish: Callable[[object, int], None],
) -> TrunkV41 | TrunkV4:  # fmt: skip
    """finish: called with each part as soon as it is complete, and the number of layers done."""
    c = pack.config
    embed, norm = source.lookup("embed.weight"), source.float32("norm.weight")
    # The V4.1 head computes in float32, the V4 head in the model's dtype.
    head = source.linear("head.weight", rounds=False, dtype=mx.float32 if c.family == "v41" else None)
    finish((embed, head, norm), 0)
    layers = []
    for plan in pack.plan:
        layers.append(LayerV4.load(c, source, plan, qat_sim) if c.family == "v4" else Layer.load(c, source, plan, cache_quant))
        finish(layers[-1], len(layers))
    taps = pack.found.plan.taps if pack.found.plan else ()
    if c.family == "v4":
        return TrunkV4(c, pack.plan, embed, HyperHead.load(c, source, "hc_head"), norm, head, layers, source.dtype, taps)
    return TrunkV41(c, pack.plan, embed, head, norm, layers, hasher, tables, source.dtype, taps)


def build_drafter(
    pack: Pack, trunk: TrunkV41 | TrunkV4, *, rounded: bool, linear_input_fp8: bool = False, packed: bool | None = None,
    facts: MutableMapping[str, str] | None = None,
) -> DraftModel | None:  # fmt: skip
    """Materialise the pack's drafter on its trunk; None when it has none. rounded: whether the trunk rounds its window rows."""
    if pack.found.plan is None:
        return None
    source = weight_source(pack, pack.found.plan.expected, dtype=trunk.dtype, packed=packed, round_inputs=linear_input_fp8)
    model = load_draft_model(pack.found.plan, trunk, source, rounded)
    mx.eval(arrays_of(model))
    options = {"dtype": trunk.dtype, "rounded": rounded, "linear_input_fp8": linear_input_fp8, "packed": source.packed}
    extend(trunk.routes, model, trunk, None if facts is None else Verdicts(facts, pack.fingerprint, "drafter", options))
    return model


def arrays_of(module: object) -> list[mx.array]:
    """Every array below a module; modules are plain dataclasses, alone or in sequences. Views of them (`_...`) are none of their own, and
    what computes them (`routes`, `replay`) is none of it."""
    if isinstance(module, mx.array):
        return [module]
    named = getattr(module, "__dict__", {})
    own = [value for name, value in named.items() if not name.startswith("_") and name not in ("routes", "replay")]
    children = module if isinstance(module, (list, tuple)) else own
    return [a for child in children for a in arrays_of(child)]

"""The strict gate between a folder and a trunk: none missing, none unknown, every shape right, before any data is read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from dsv41chat.engine.engram.table import TableRef, TableSpec, find_table, row_format
from dsv41chat.engine.errors import PackDamaged, PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.elsewhere import TABLES_FOLDER
from dsv41chat.engine.pack.formats import identify_slices, slices_of
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import FLOATS, LEAVES, parts_of, stem_of, where
from dsv41chat.engine.pack.names import Expected

# What the text trunk does not use. Draft tensors have a gate of their own: drafter.py.
SKIPPED_PREFIXES = ("vision.", "aligner.", "image_")
DRAFT_PREFIX = "mtp."
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.*)$")
_TABLE_LEAVES = ("weight", "scale", "scales", "biases")
_SHOWN = 8


def check_names(
    tensors: Mapping[str, TensorRef], expected: Mapping[str, Expected], layers: int, block: int | None, ignored: Collection[str] = ()
) -> list[str]:
    """tensors: by release name. ignored: names that may be there and are not used. block: the config's fp8 block edge.

    Returns notes about skipped families. Raises PackIncomplete, PackDamaged or PackUnsupported.
    """
    known, missing = set(), []
    for name, want in expected.items():
        names = _names_of(tensors, name, want)
        known |= names
        if not want.optional and not _holds_values(tensors, name, names):
            missing.append(name)
    skipped: Counter[str] = Counter()
    unexpected = []
    for name in tensors.keys() - known:
        parts = name.split(".")
        past = parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) >= layers
        if name.startswith(DRAFT_PREFIX):
            continue
        if name in ignored or name.startswith(SKIPPED_PREFIXES) or past or name.endswith("rotary_emb.inv_freq"):
            skipped[parts[0]] += 1
        else:
            unexpected.append(name)
    _refuse_missing_engram(missing, expected)
    if missing or unexpected:
        found = ("missing", missing), ("unexpected", unexpected)
        words = [f"{len(names)} tensors {what}: {shorten(names, expected)}" for what, names in found if names]
        raise PackIncomplete("; ".join(words), "the build does not match its config.json; copy or convert it again")
    for name, want in expected.items():
        if not want.optional or name in tensors:
            check_tensor(tensors, name, want, block)
    return [f"{count} tensors of {family} are not used by the text trunk" for family, count in sorted(skipped.items())]


def check_tensor(tensors: Mapping[str, TensorRef], name: str, want: Expected, block: int | None) -> None:
    """One expected tensor or matrix against its headers. Raises PackError that names it."""
    if want.kind in ("linear", "lookup"):
        found = identify_slices(tensors, name, want.shape, block)
        if want.kind == "lookup" and (len(found) > 1 or "trellis" in found[0].parts):
            raise PackUnsupported(f"{name} is {found[0].label}; a table of which rows are read cannot be stored so")
        return
    if want.kind == "table":
        row_format(table_spec(tensors, name, want))
        return
    ref = tensors[name]
    dtypes = ("I32", "I64") if want.kind == "ids" else FLOATS
    if ref.dtype not in dtypes:
        raise PackUnsupported(f"{name} has dtype {ref.dtype}; it is read as {', '.join(dtypes)} {where(ref)}")
    if ref.shape != want.shape:
        raise PackDamaged(f"{name} is {list(ref.shape)}, the config expects {list(want.shape)} {where(ref)}")
    if want.kind == "float" and stem_of(name) + "scales" in tensors:
        raise PackUnsupported(f"{name} is quantised; it is read as {', '.join(FLOATS)} {where(ref)}")


def table_spec(tensors: Mapping[str, TensorRef], name: str, want: Expected) -> TableSpec:
    """The Engram table whose rows are `name`, for the row reader. Raises PackError for a region that is absent.

    MLX conversions that keep the release's bytes write them with the tag U8.
    """
    refs = {stem_of(name) + leaf: tensors[stem_of(name) + leaf] for leaf in _TABLE_LEAVES if stem_of(name) + leaf in tensors}
    native = stem_of(name) + "scale" in refs
    tags = {"weight": "F8_E4M3", "scale": "F8_E8M0"}
    tag = lambda n, t: tags[n.rsplit(".", 1)[1]] if native and t.dtype == "U8" else t.dtype
    layer = int(name.split(".")[1])
    return find_table({n: TableRef(t.file, t.offset, tag(n, t), t.shape) for n, t in refs.items()}, layer, want.shape[1], want.shape[0])


def is_there(tensors: Mapping[str, TensorRef], name: str, want: Expected) -> bool:
    """Whether the tensor, or the matrix in any format, has its values here."""
    return _holds_values(tensors, name, _names_of(tensors, name, want))


def _holds_values(tensors: Mapping[str, TensorRef], name: str, names: set[str]) -> bool:
    """Whether one of the names that `name` may be stored as is here and more than a companion. Most often it is `name` itself."""
    return (name in names and name in tensors) or any(n in tensors for n in names - _companions(name))


def names_in_use(tensors: Mapping[str, TensorRef], expected: Mapping[str, Expected]) -> set[str]:
    """Every tensor of the pack that the expected ones consist of."""
    return {n for name, want in expected.items() for n in _names_of(tensors, name, want) if n in tensors}


def shorten(names: Iterable[str], expected: Mapping[str, Expected] = {}) -> str:  # noqa: B006 - never written to
    """The first names in words; experts of one matrix are put together."""
    groups: dict[str, list[int]] = defaultdict(list)
    for name in names:
        match = _EXPERT.match(name)
        groups[f"{match[1]}.*.{match[3]}" if match else name] += [int(match[2])] if match else []
    shown = []
    for key, experts in sorted(groups.items())[:_SHOWN]:
        total = sum(1 for n in expected if (m := _EXPERT.match(n)) and f"{m[1]}.*.{m[3]}" == key) if len(experts) > 1 else 0
        if len(experts) == 1:
            shown.append(key.replace("*", str(experts[0])))
        elif experts and len(experts) == total:
            shown.append(f"{key.replace('.*.', '.')} (all {total} experts)")
        elif experts:
            some = ",".join(map(str, sorted(experts)[:_SHOWN])) + (",..." if len(experts) > _SHOWN else "")
            shown.append(key.replace("*", f"{{{some}}}"))
        else:
            shown.append(key)
    return ", ".join(shown) + (", ..." if len(groups) > _SHOWN else "")


def _names_of(tensors: Mapping[str, TensorRef], name: str, want: Expected) -> set[str]:
    """What `name` may be stored as, in this pack."""
    stem = stem_of(name)
    if want.kind == "table":
        return {stem + leaf for leaf in _TABLE_LEAVES}
    if want.kind not in ("linear", "lookup"):
        return {name}
    slices = slices_of(tensors, name) if name not in tensors and stem + "trellis" not in tensors else []
    return {stem + leaf for leaf in LEAVES}.union(*({stem_of(part) + leaf for leaf in parts_of(tensors, part)} for part in slices))


def _companions(name: str) -> set[str]:
    """Parts that do not stand for the matrix by themselves."""
    return {stem_of(name) + leaf for leaf in LEAVES if leaf not in ("weight", "trellis")}


def _refuse_missing_engram(missing: list[str], expected: Mapping[str, Expected]) -> None:
    engram = [n for n in expected if ".engram." in n]
    if engram and set(engram) <= set(missing):
        layers = ", ".join(sorted({n.split(".")[1] for n in engram}, key=int))
        raise PackIncomplete(
            f"{len(engram)} tensors missing: config.json announces Engram in layers {layers}, and none of its tensors is here",
            "this build was converted without Engram and would compute another model; take one that has it",
        )
    tables = [n for n in missing if expected[n].kind == "table"]
    if tables and len(tables) == len(missing):
        raise PackIncomplete(
            f"{len(tables)} tensors missing: {shorten(tables)}: this build leaves its Engram tables to the release",
            f"put their shards of the release, or a link to the folder that holds them, into the build's folder as {TABLES_FOLDER!r}",
        )

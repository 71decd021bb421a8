"""Engram tables that a build leaves to the release: two shards as large as everything else, which conversions need not repeat.

The user puts them, or a link to a folder that holds them, into the build's folder under one name. Source: spec EXL3, section 9.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dsv41chat.engine.errors import PackDamaged
from dsv41chat.engine.pack.dialects import release_name
from dsv41chat.engine.pack.index import PackIndex, TensorRef, read_header
from dsv41chat.engine.pack.matrix import stem_of
from dsv41chat.engine.pack.names import Expected

TABLES_FOLDER = "engram"


def with_tables(index: PackIndex, expected: Mapping[str, Expected]) -> PackIndex:
    """The index with the tables that only the sub-folder has; unchanged when none is missing or there is no such folder.

    index: by release names. Raises PackDamaged for a table that is there twice.
    """
    missing = [stem_of(name) for name, want in expected.items() if want.kind == "table" and name not in index.tensors]
    folder = index.folder / TABLES_FOLDER
    if not missing or not folder.is_dir():
        return index
    found: dict[str, TensorRef] = {}
    files = []
    for path in sorted(folder.glob("*.safetensors")):
        mine = {name: ref for original, ref in read_header(path).items() if (name := release_name(original)).startswith(tuple(missing))}
        for name in mine.keys() & found.keys():
            raise PackDamaged(f"{name} is in {found[name].file.name} and in {path.name} of {folder}", "leave one of them there")
        found |= mine
        files += [path] if mine else []
    if not found:
        return index
    note = f"the Engram tables come from {TABLES_FOLDER}/{' and '.join(path.name for path in files)}"
    return replace(index, tensors=index.tensors | found, files=(*index.files, *files), notes=(*index.notes, note))

"""A drafter for a build that was converted without one: hard links to every file of the trunk, and the draft stages of a release beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsv41chat.engine.convert.convert import Conversion, is_finished, link_file, sync_folder, write_group, write_json
from dsv41chat.engine.convert.layout import plan_groups
from dsv41chat.engine.convert.recipes import Choice
from dsv41chat.engine.errors import PackIncomplete, PackUnsupported
from dsv41chat.engine.pack.build import Pack, open_pack
from dsv41chat.engine.pack.index import INDEX_NAME, UNFINISHED_NAME, read_header

_DRAFT_KEYS = ("num_nextn_predict_layers",)
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "hc_mult", "head_dim", "moe_intermediate_size")


@dataclass(frozen=True)
class Bank:
    """trunk: a build without drafter; conversion: of the release's draft stages into the same folder."""

    trunk: Pack
    conversion: Conversion

    @property
    def bytes_out(self) -> int:
        return self.conversion.bytes_out


def plan_bank(trunk: str | Path, release: str | Path, target: str | Path, *, drafter: str = "exact") -> Bank:
    """drafter: `exact` (experts as mxfp4 words, the rest decoded to bfloat16, every value kept) or `q8`.

    Raises PackError when the two builds do not belong together or the release has no drafter.
    """
    base, source, target = open_pack(trunk), open_pack(release), Path(target)
    if base.found.plan is not None:
        raise PackUnsupported(f"{base.folder.name} has a drafter already", "nothing needs to be done")
    if source.found.plan is None:
        fault = f": {source.found.fault}" if source.found.fault else ""
        raise PackIncomplete(f"{source.folder.name} has no usable drafter{fault}", "give the release")
    wrong = [name for name in _SIZES if getattr(base.config, name) != getattr(source.config, name)]
    if base.config.family != source.config.family or wrong:
        names = f"{base.folder.name} and {source.folder.name}"
        raise PackUnsupported(f"{names} are different models: {', '.join(wrong) or 'the family'} differs", "give the release of this very model")
    if target.resolve() in (base.folder.resolve(), source.folder.resolve()):
        raise PackUnsupported(f"{target} is one of the sources", "give another folder")
    choice = Choice.of("native", None, drafter, source.config.num_hidden_layers)
    groups = [group for group in plan_groups(source, choice) if group.tag.startswith("mtp-")]
    taken = [group.file for group in groups if (base.folder / group.file).exists()]
    if taken:
        raise PackUnsupported(f"{base.folder.name} has a file {taken[0]} of its own")
    return Bank(base, Conversion(source, target, choice, groups))


def write_bank(
    bank: Bank, *, progress: Callable[[str, int, int], None] = lambda group, done, total: None, cancel: Callable[[], bool] = lambda: False
) -> None:
    """Write the folder. A second call goes on with one that was stopped. Raises Cancelled, or PackUnsupported for a folder in use."""
    conversion, trunk = bank.conversion, bank.trunk
    target, mark = conversion.target, {"trunk": trunk.folder.resolve().name, "trunk_fingerprint": trunk.fingerprint, **conversion.mark}
    state = target / UNFINISHED_NAME
    if target.exists() and any(target.iterdir()) and (not state.is_file() or json.loads(state.read_text(encoding="utf-8")) != mark):
        raise PackUnsupported(f"{target} is not empty", "give an empty or a new folder")
    target.mkdir(parents=True, exist_ok=True)
    write_json(state, mark)
    for path in sorted(trunk.folder.iterdir()):
        if path.is_file() and path.name not in ("config.json", INDEX_NAME) and not (target / path.name).exists():
            link_file(path, target / path.name)
    total, done = bank.bytes_out, 0
    for group in conversion.groups:
        if not is_finished(target, group, conversion.mark):
            write_group(conversion, group, lambda n, done=done, group=group: progress(group.tag, done + n, total), cancel)
        done += sum(t.nbytes for t in group.tensors)
    _write_config(bank)
    state.unlink()
    sync_folder(target)


def _write_config(bank: Bank) -> None:
    conversion, trunk, target = bank.conversion, bank.trunk, bank.conversion.target
    outer = json.loads((trunk.folder / "config.json").read_text(encoding="utf-8"))
    given = json.loads((conversion.pack.folder / "config.json").read_text(encoding="utf-8"))
    holder, source = outer.get("text_config", outer), given.get("text_config", given)
    holder |= {key: value for key, value in source.items() if key.startswith("dspark_") or key in _DRAFT_KEYS}
    if isinstance(outer.get("quantization"), dict):
        modules = {path: entry for group in conversion.groups for path, entry in group.modules.items()}
        place = outer["quantization"]["modules"] if isinstance(outer["quantization"].get("modules"), dict) else outer["quantization"]
        place |= modules
    manifests = {group.file: json.loads((target / group.manifest).read_text(encoding="utf-8")) for group in conversion.groups}
    files = [{"file": name, "bytes": found["bytes"], "sha256": found["sha256"]} for name, found in manifests.items()]
    outer["mtp_provenance"] = {**conversion.mark, "files": files}
    write_json(target / "config.json", outer)
    index = trunk.folder / INDEX_NAME
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # Draft tensors that the trunk could not use would hide the new ones.
        weight_map = {name: file for name, file in weight_map.items() if not name.startswith("mtp.")}
    else:
        weight_map = {name: path.name for path in trunk.index.files for name in read_header(path)}
    weight_map |= {t.name: group.file for group in conversion.groups for t in group.tensors}
    write_json(target / INDEX_NAME, {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))})

"""Pruning of routed experts: a build with fewer of them per layer, of the same bytes otherwise. Nothing is quantised again.

Experts and quantisation groups are different axes, so leaving experts out of a stored tensor gives the bytes that quantising without them
would have given. Shards without an expert of a pruned layer (Engram tables above all) are hard links to the source's files.
V4 layers with a token table keep all their experts, as its entries are expert numbers; draft blocks keep theirs.
A folder that is being written holds `conversion.json` and can be loaded by nobody; the same source, text, number and version give the same
bytes, however often the run was killed. Source: spec: checkpoints, section 6.2.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41chat import __version__
from dsv41chat.engine.convert.calibrate import CalibrationText, Tally, calibrate, forget
from dsv41chat.engine.convert.convert import claim_folder, copy_small_files, file_digest, link_file, settle_file, sync_folder, write_json
from dsv41chat.engine.convert.layout import CHUNK_BYTES
from dsv41chat.engine.errors import Cancelled, DoesNotFit, PackUnsupported
from dsv41chat.engine.layerwise import LayerWalk
from dsv41chat.engine.pack.build import Pack, open_pack
from dsv41chat.engine.pack.dialects import release_name
from dsv41chat.engine.pack.elsewhere import TABLES_FOLDER
from dsv41chat.engine.pack.index import INDEX_NAME, UNFINISHED_NAME, TensorRef, open_index

_ONE = re.compile(r"^layers\.(\d+)\.ffn\.experts\.(\d+)\.")
_ALL = re.compile(r"^layers\.(\d+)\.ffn\.(?:experts\.(?:w[123]\.\w+|gate_up_proj)|gate\.(?:weight|bias|bias_vl))$")
_NUMBER = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Pruning:
    """What will be done; nothing is touched yet. keep: experts per pruned layer, out of pack.config.n_routed_experts."""

    pack: Pack
    target: Path
    keep: int
    text: CalibrationText
    options: dict[str, Any]

    @property
    def layers(self) -> list[int]:
        """Trunk layers whose experts are pruned."""
        return [plan.index for plan in self.pack.plan if not plan.hashed]

    @property
    def removes(self) -> bool:
        """Whether any expert goes; otherwise nothing is calibrated and every shard is linked."""
        return self.keep < self.pack.config.n_routed_experts

    @property
    def mark(self) -> dict[str, Any]:
        """What a half-written folder says about itself, and the provenance of a finished one."""
        return {
            "source": self.pack.folder.resolve().name, "source_fingerprint": self.pack.fingerprint, "experts": self.keep,
            "of": self.pack.config.n_routed_experts, "text": self.text.name, "text_sha256": self.text.sha256, "tokens": self.text.tokens,
            "windows": len(self.text.windows), "options": self.options, "program": f"dsv41chat {__version__}",
        }  # fmt: skip


@dataclass(frozen=True)
class Pruned:
    """kept: expert numbers per layer, ascending. agreement: the share of kept experts on which the halves of the text agree, mean over the
    layers. unused: (layer, expert) pairs to which the whole text sent no token. linked, written: shards."""

    kept: dict[int, list[int]]
    agreement: float
    unused: list[tuple[int, int]]
    linked: list[str]
    written: list[str]


def plan_prune(
    source: str | Path, target: str | Path, experts: int | float, text: Callable[[Pack], CalibrationText], **options: Any
) -> Pruning:
    """experts: how many to keep per layer, or as a float below 1 which share. text: reads the calibration text for the pack's tokenizer.

    options: cache_quant, linear_input_fp8 or qat_sim of the calibration. Raises PackError; writes nothing.
    """
    pack, target = open_pack(source), Path(target)
    if target.resolve() == pack.folder.resolve():
        raise PackUnsupported(f"{target} is the source itself", "give another folder")
    c = pack.config
    keep = experts if isinstance(experts, int) else round(c.n_routed_experts * experts)
    if not c.num_experts_per_tok <= keep <= c.n_routed_experts:
        words = f"{keep} experts per layer: {pack.folder.resolve().name} has {c.n_routed_experts} and uses {c.num_experts_per_tok} for every token"
        raise PackUnsupported(words, f"--experts {c.num_experts_per_tok} to {c.n_routed_experts}")
    if c.family == "v4" and c.num_hash_layers == c.num_hidden_layers:
        raise PackUnsupported(f"all layers of {pack.folder.resolve().name} choose experts by token table; none can be left out")
    return Pruning(pack, target, keep, text(pack), options)


def prune_pack(
    pruning: Pruning, *, resume: bool = False, progress: Callable[[str, int, int], None] = lambda part, done, total: None,
    cancel: Callable[[], bool] = lambda: False,
) -> Pruned:  # fmt: skip
    """Calibrate, then write. resume: go on with a folder that holds a part of it. progress: part (`calibrating` counts layers, a shard's
    name bytes), done, in all.

    Raises PackUnsupported for a folder in use by something else, DoesNotFit for a full disk, Cancelled.
    """
    pack, target, mark = pruning.pack, pruning.target, pruning.mark
    _prepare(pruning, resume)
    tallies: dict[int, Tally] = {}
    if pruning.removes:
        report = lambda done, total: progress("calibrating", done, total)
        tallies = calibrate(LayerWalk(pack, **pruning.options), pruning.text, pruning.layers, target, mark, progress=report, cancel=cancel)
    kept = {layer: tallies[layer].kept(pruning.keep) for layer in pruning.layers if pruning.removes}
    jobs = _jobs(pack, kept)
    total = sum(job.nbytes for job in jobs.values() if job.changed)
    _demand_room(target, sum(job.nbytes for name, job in jobs.items() if job.changed and not _is_finished(target, name, mark)))
    done = 0
    for name, job in jobs.items():
        if not job.changed:
            if not (target / name).exists():
                link_file(pack.folder / name, target / name)
                _copy_manifest(pack.folder, target, name)
        elif not _is_finished(target, name, mark):
            _write_shard(target, name, job, mark, lambda n, name=name, done=done: progress(name, done + n, total), cancel)
        done += job.nbytes if job.changed else 0
    tables = _link_tables(pack, target)
    result = _result(pruning, tallies, kept, jobs, tables)
    _write_rest(pruning, jobs, result)
    open_pack(target, unfinished=True)
    forget(target)
    (target / UNFINISHED_NAME).unlink()
    sync_folder(target)
    return result


@dataclass(frozen=True)
class _Part:
    """One tensor of a rewritten shard: its new name and header entry, and the source ranges whose bytes follow one another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorRef
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.ranges)


@dataclass(frozen=True)
class _Shard:
    parts: tuple[_Part, ...]
    changed: bool

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def _jobs(pack: Pack, kept: Mapping[int, list[int]]) -> dict[str, _Shard]:
    """Every shard by name. kept: of the layers that lose experts."""
    shards: dict[str, list[_Part | None]] = {}
    changed: set[str] = set()
    for ref in sorted(open_index(pack.folder).tensors.values(), key=lambda r: (r.file.name, r.offset)):
        part = _part(ref, kept)
        if part is None or part.name != ref.name or part.shape != ref.shape:
            changed.add(ref.file.name)
        shards.setdefault(ref.file.name, []).append(part)
    return {name: _Shard(tuple(p for p in parts if p is not None), name in changed) for name, parts in shards.items()}


def _part(ref: TensorRef, kept: Mapping[int, list[int]]) -> _Part | None:
    """What stays of a tensor; None for one of an expert that is left out."""
    name, whole = release_name(ref.name), _Part(ref.name, ref.dtype, ref.shape, ref, ((0, ref.nbytes),))
    if (one := _ONE.match(name)) and int(one[1]) in kept:
        chosen, expert = kept[int(one[1])], int(one[2])
        if expert not in chosen:
            return None
        return _Part(_NUMBER.sub(str(chosen.index(expert)), ref.name, 1), ref.dtype, ref.shape, ref, ((0, ref.nbytes),))
    if (every := _ALL.match(name)) and int(every[1]) in kept:
        chosen, size = kept[int(every[1])], ref.nbytes // ref.shape[0]
        return _Part(ref.name, ref.dtype, (len(chosen), *ref.shape[1:]), ref, tuple((e * size, size) for e in chosen))
    return whole


def _prepare(pruning: Pruning, resume: bool) -> None:
    claim_folder(pruning.target, pruning.mark, resume, "pruning", "source, text, number of experts or version")
    write_json(pruning.target / UNFINISHED_NAME, pruning.mark)


def _demand_room(target: Path, missing: int) -> None:
    free = shutil.disk_usage(target).free
    if missing > free:
        words = f"{missing / 1e9:.1f} GB are still to be written, {target} has {free / 1e9:.1f} GB free"
        raise DoesNotFit(words, hint="free disk space, then --resume")


def _manifest(name: str) -> str:
    return f"{name.removesuffix('.safetensors')}.manifest.json"


def _copy_manifest(source: Path, target: Path, name: str) -> None:
    """The digest that a conversion left beside a shard still holds for a link to it."""
    if (source / _manifest(name)).is_file():
        shutil.copyfile(source / _manifest(name), target / _manifest(name))


def _link_tables(pack: Pack, target: Path) -> list[str]:
    """Tables that lie in a sub-folder of the source lie in one of the result."""
    names = []
    for path in pack.index.files:
        if path.parent.name == TABLES_FOLDER and path.parent.parent == pack.folder:
            names.append(f"{TABLES_FOLDER}/{path.name}")
            (target / TABLES_FOLDER).mkdir(exist_ok=True)
            if not (target / names[-1]).exists():
                link_file(path, target / names[-1])
    return names


def _is_finished(target: Path, name: str, mark: dict[str, Any]) -> bool:
    manifest, shard = target / _manifest(name), target / name
    if not manifest.is_file() or not shard.is_file():
        return False
    found = json.loads(manifest.read_text(encoding="utf-8"))
    return found.get("pruning") == mark and found["bytes"] == shard.stat().st_size


def _write_shard(target: Path, name: str, job: _Shard, mark: dict[str, Any], progress: Callable[[int], None], cancel: Callable[[], bool]) -> None:
    entries, at = {}, 0
    for part in job.parts:
        entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [at, at + part.nbytes]}
        at += part.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    draft, written = (target / name).with_suffix(".tmp"), 0
    with open(draft, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for part in job.parts:
            for data in _bytes_of(part):
                if cancel():
                    raise Cancelled("pruning was stopped; --resume goes on")
                out.write(data)
                written += len(data)
                progress(written)
    settle_file(draft, target / name)
    manifest = {"pruning": mark, "files": {name: [part.name for part in job.parts]}, "sha256": file_digest(target / name)}
    write_json(target / _manifest(name), manifest | {"bytes": 8 + len(text) + at})


def _bytes_of(part: _Part):
    with open(part.source.file, "rb", buffering=0) as f:
        for start, size in part.ranges:
            f.seek(part.source.offset + start)
            while size:
                data = f.read(min(CHUNK_BYTES, size))
                if not data:
                    raise OSError(f"{part.source.file} ends inside {part.source.name}")
                yield data
                size -= len(data)


def _result(
    pruning: Pruning, tallies: Mapping[int, Tally], kept: dict[int, list[int]], jobs: Mapping[str, _Shard], tables: list[str]
) -> Pruned:  # fmt: skip
    halves = [[set(tally.kept(pruning.keep, half)) for half in (0, 1)] for tally in tallies.values()]
    agreement = sum(len(a & b) for a, b in halves) / (pruning.keep * len(halves)) if halves else 1.0
    unused = [(layer, int(e)) for layer, tally in tallies.items() for e in (tally.counts.sum(0) == 0).nonzero()[0]]
    names = lambda changed: [name for name, job in jobs.items() if job.changed == changed]
    return Pruned(kept, agreement, unused, names(False) + tables, names(True))


def _write_rest(pruning: Pruning, jobs: Mapping[str, _Shard], result: Pruned) -> None:
    source, target = pruning.pack.folder, pruning.target
    copy_small_files(source, target)
    outer = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for holder in (outer, outer.get("text_config")):
        if isinstance(holder, dict):
            holder["n_routed_experts"] = pruning.keep
    for key in ("quantization", "quantization_config"):
        _renumber(outer.get(key), result.kept)
    kept = {str(layer): experts for layer, experts in result.kept.items()}
    outer["reap"] = pruning.mark | {"split_half_agreement": round(result.agreement, 4), "never_used": len(result.unused), "kept": kept}
    write_json(target / "config.json", outer)
    if (source / INDEX_NAME).is_file():
        index = json.loads((source / INDEX_NAME).read_text(encoding="utf-8"))
        index["weight_map"] = dict(sorted((part.name, name) for name, job in jobs.items() for part in job.parts))
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] = sum(job.nbytes for job in jobs.values())
        write_json(target / INDEX_NAME, index)


def _renumber(block: Any, kept: Mapping[int, list[int]]) -> None:
    """Entries of a quantisation block for single experts get the new numbers, or go."""
    if not isinstance(block, dict):
        return
    for path, entry in list(block.items()):
        if (one := _ONE.match(release_name(f"{path}.weight"))) and int(one[1]) in kept:
            del block[path]
            chosen = kept[int(one[1])]
            if int(one[2]) in chosen:
                block[_NUMBER.sub(str(chosen.index(int(one[2]))), path, 1)] = entry
        elif isinstance(entry, dict):
            _renumber(entry, kept)



"""Conversion of a build: streamed group by group, resumable after a kill, checked against its source.

A folder that is being written holds `conversion.json` and can be loaded by nobody. Every finished shard has a manifest; the last pass writes
index, config and tokenizer files and takes that mark away. The same source, recipe and version give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv41chat import __version__
from dsv41chat.engine.convert.layout import Group, Quantise, plan_groups
from dsv41chat.engine.convert.recipes import Choice
from dsv41chat.engine.errors import Cancelled, DoesNotFit, PackDamaged, PackUnsupported
from dsv41chat.engine.pack.build import Pack, open_pack
from dsv41chat.engine.pack.dialects import release_tensors
from dsv41chat.engine.pack.formats import identify
from dsv41chat.engine.pack.index import INDEX_NAME, UNFINISHED_NAME, read_header

# What a conversion holds at a time: a few blocks of float32 rows and their packed form, and the interpreter with its libraries.
MEMORY_BYTES = 1 << 30
_KEPT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "engram_token_map.json", "special_tokens_map.json")
_CHECKED = 3


@dataclass(frozen=True)
class Conversion:
    """source, target and what will be written; nothing is touched yet. bytes_out: of all shards."""

    pack: Pack
    target: Path
    choice: Choice
    groups: list[Group]

    @property
    def bytes_out(self) -> int:
        return sum(len(g.header()) + sum(t.nbytes for t in g.tensors) for g in self.groups)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all tensors by the parameters of the source's text trunk and drafter; table rows count as parameters."""
        expected = dict(self.pack.expected) | (self.pack.found.plan.expected if self.pack.found.plan and self.choice.drafter != "drop" else {})
        count = sum(int(np.prod(want.shape, dtype=np.int64)) for want in expected.values() if want.kind != "ids")
        return 8 * sum(t.nbytes for g in self.groups if g.tag != "vision" for t in g.tensors) / count

    @property
    def mark(self) -> dict:
        """What a half-written folder says about itself, and the provenance of a finished one."""
        return {
            "source": self.pack.folder.resolve().name, "source_fingerprint": self.pack.fingerprint, "recipe": self.choice.recipe.name,
            "engram": self.choice.table, "drafter": self.choice.drafter, "program": f"dsv41chat {__version__}",
        }  # fmt: skip


def plan_conversion(source: str | Path, target: str | Path, recipe: str, *, table: str | None = None, drafter: str = "keep") -> Conversion:
    """Read the headers of `source` and lay out the result. Raises PackError; writes nothing."""
    pack, target = open_pack(source), Path(target)
    if target.resolve() == pack.folder.resolve():
        raise PackUnsupported(f"{target} is the source itself", "give another folder")
    choice = Choice.of(recipe, table, drafter, pack.config.num_hidden_layers)
    return Conversion(pack, target, choice, plan_groups(pack, choice))


def convert_pack(
    conversion: Conversion,
    *,
    resume: bool = False,
    progress: Callable[[str, int, int], None] = lambda group, done, total: None,
    cancel: Callable[[], bool] = lambda: False,
) -> None:
    """Write the result. resume: go on with a folder that holds a part of it. progress: group, bytes done, bytes in all.

    Raises PackUnsupported for a folder in use by something else, DoesNotFit for a full disk, Cancelled, PackDamaged when a check fails.
    """
    target, mark = conversion.target, conversion.mark
    _prepare(conversion, resume)
    total = sum(t.nbytes for g in conversion.groups for t in g.tensors)
    done = 0
    for group in conversion.groups:
        size = sum(t.nbytes for t in group.tensors)
        if not is_finished(target, group, mark):
            write_group(conversion, group, lambda n, done=done, group=group: progress(group.tag, done + n, total), cancel)
        done += size
        progress(group.tag, done, total)
    _write_rest(conversion)
    (target / UNFINISHED_NAME).unlink()
    sync_folder(target)


def claim_folder(target: Path, mark: dict, resume: bool, what: str, differing: str) -> None:
    """Make the folder, or find it begun with the same mark. what: it is becoming, differing: what the mark stands for, in words.

    Raises PackUnsupported for a folder that holds something else, or a part while `resume` is not asked for.
    """
    path = target / UNFINISHED_NAME
    if target.exists() and any(target.iterdir()):
        if not path.is_file():
            raise PackUnsupported(f"{target} is not empty and no {what} began there", "give an empty or a new folder")
        if not resume:
            raise PackUnsupported(f"{target} holds a part of a {what}", "--resume goes on with it")
        if json.loads(path.read_text(encoding="utf-8")) != mark:
            raise PackUnsupported(f"{target} was begun from another {differing}", "give another folder")
    target.mkdir(parents=True, exist_ok=True)


def _prepare(conversion: Conversion, resume: bool) -> None:
    target, path = conversion.target, conversion.target / UNFINISHED_NAME
    claim_folder(target, conversion.mark, resume, "conversion", "source, recipe or version")
    missing = sum(t.nbytes for g in conversion.groups if not is_finished(target, g, conversion.mark) for t in g.tensors)
    free = shutil.disk_usage(target).free
    if missing > free:
        words = f"{missing / 1e9:.1f} GB are still to be written, {target} has {free / 1e9:.1f} GB free"
        raise DoesNotFit(words, hint="free disk space, then --resume")
    write_json(path, conversion.mark)


def is_finished(target: Path, group: Group, mark: dict) -> bool:
    """Whether `target` holds this group's shard with a manifest of the same conversion."""
    manifest, shard = target / group.manifest, target / group.file
    if not manifest.is_file() or not shard.is_file():
        return False
    found = json.loads(manifest.read_text(encoding="utf-8"))
    return found["conversion"] == mark and found["bytes"] == shard.stat().st_size


def write_group(conversion: Conversion, group: Group, progress: Callable[[int], None], cancel: Callable[[], bool]) -> None:
    """Write one shard under a passing name, check it against the source, then its manifest. Raises Cancelled or PackDamaged."""
    header, shard = group.header(), conversion.target / group.file
    starts, at = {}, len(header)
    for t in group.tensors:
        starts[t.name] = at
        at += t.nbytes
    draft = shard.with_suffix(".tmp")
    written = 0
    with open(draft, "wb") as f:
        f.write(header)
        f.truncate(at)
        for job in group.jobs:
            for piece in job.pieces():
                if cancel():
                    raise Cancelled("the conversion was stopped; --resume goes on")
                f.seek(starts[piece.tensor] + piece.offset)
                f.write(piece.data)
                written += len(piece.data)
                progress(written)
        f.flush()
        os.fsync(f.fileno())
    if written != at - len(header):
        raise PackDamaged(f"{group.file}: {written:,} bytes were made for {at - len(header):,}", "report this; the source may have changed")
    os.replace(draft, shard)
    _check(conversion, group)
    manifest = {
        "conversion": conversion.mark, "files": {group.file: [t.name for t in group.tensors]}, "modules": group.modules,
        "sha256": file_digest(shard), "bytes": at,
    }  # fmt: skip
    write_json(conversion.target / group.manifest, manifest)


def _check(conversion: Conversion, group: Group) -> None:
    """Three matrices of the written shard against the source. Affine values may be off by half a step and its bfloat16 rounding."""
    jobs = [job for job in group.jobs if isinstance(job, Quantise)]
    if not jobs:
        return
    refs = release_tensors(read_header(conversion.target / group.file))
    rng = np.random.default_rng(len(jobs))
    for job in [jobs[i] for i in rng.choice(len(jobs), min(_CHECKED, len(jobs)), replace=False)]:
        e = int(rng.integers(len(job.parts)))
        source = job.parts[e]
        name = f"{job.path}.weight" if ".experts." not in job.path else f"{job.path.rsplit('.', 1)[0]}.{e}.{job.path.rsplit('.', 1)[1]}.weight"
        rows = min(128, source.shape[0])
        if ".engram.embed" in job.path:
            continue
        got, want = identify(refs, name, source.shape).values(0, rows), source.values(0, rows)
        if job.rule.kind == "affine":
            spread = want.reshape(rows, -1, job.rule.group)
            step = (spread.max(-1) - spread.min(-1)) / (2**job.rule.bits - 1)
            allowed = np.repeat(step, job.rule.group, 1) * 1.1 + 2**-7 * np.abs(want).max()
        else:
            allowed = np.zeros_like(want) if job.rule.kind == "native" else 2**-8 * np.abs(want)
        if not (np.abs(got - want) <= allowed).all():
            raise PackDamaged(f"{name} of {group.file} does not match its source", "report this; the folder is not usable")


def _write_rest(conversion: Conversion) -> None:
    pack, target = conversion.pack, conversion.target
    copy_small_files(pack.folder, target)
    outer = json.loads((pack.folder / "config.json").read_text(encoding="utf-8"))
    modules = {path: entry for group in conversion.groups for path, entry in group.modules.items()}
    dropped = outer.pop("quantization_config", None)
    outer.pop("quantization", None)
    if any(t.name.endswith(".trellis") for g in conversion.groups for t in g.tensors):
        outer["quantization_config"] = dropped
    if modules:
        outer["quantization"] = {"group_size": 64, "bits": 8, "mode": "affine", **modules}
    outer["conversion"] = conversion.mark | {"bits_per_weight": round(conversion.bits_per_weight, 4)}
    write_json(target / "config.json", outer)
    weight_map = {t.name: group.file for group in conversion.groups for t in group.tensors}
    total = sum(t.nbytes for g in conversion.groups for t in g.tensors)
    write_json(target / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_json(path: Path, value: object) -> None:
    """Write and rename, so that a reader never sees a part of it."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(draft, path)


def settle_file(draft: Path, path: Path) -> None:
    """A finished draft takes its name, once it is on the disk."""
    with open(draft, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(draft, path)


def link_file(source: Path, target: Path) -> None:
    """A hard link to the file itself, not to a link that stands for it; a copy where the file system has none between the two."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        draft = target.with_name(target.name + ".tmp")
        shutil.copyfile(source, draft)
        settle_file(draft, target)


def copy_small_files(source: Path, target: Path) -> None:
    """Tokenizer, defaults and licences, as copies."""
    for path in (*(source / name for name in _KEPT_FILES), *sorted(source.glob("LICENSE*"))):
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def file_digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames and removals in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

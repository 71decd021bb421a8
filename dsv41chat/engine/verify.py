"""`models verify`: is a folder what its config says, and are its bytes the ones that were published?

The plain check reads headers and small files. The full one reads everything: checksums against whatever digests lie with the files, and the
places where bytes can be wrong without a checksum. It notes each finished file, so that a second run goes on where the first one stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.engram.token_map import load_token_map
from dsv41chat.engine.errors import Cancelled, PackDamaged, PackIncomplete
from dsv41chat.engine.pack.build import Pack, open_pack
from dsv41chat.engine.pack.formats import identify_slices
from dsv41chat.engine.pack.index import INDEX_NAME, read_header
from dsv41chat.engine.pack.matrix import raw
from dsv41chat.engine.pack.release import scale_bytes

_BLOCK_BYTES = 8 << 20
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_LISTS = ("SHA256SUMS", "sha256sums.txt", "checksums.sha256")


@dataclass(frozen=True)
class Found:
    """One check that holds. name: headers, shards, tokenizer, ...; what: what was seen, in words.

    checked: False for a note on what could not be checked, which is neither a fault nor a proof.
    """

    name: str
    what: str
    checked: bool = True


def verify_plain(folder: str | Path, *, cache_dir: Path | None = None) -> Iterator[Found]:
    """Config, names, shapes, dtypes, sizes, small files. Raises PackError at the first fault, naming it."""
    folder = Path(folder)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")]):
        with open(path, "rb") as f:
            if f.read(24).startswith(b"version https://git-lfs"):
                raise PackDamaged(f"{path.name} is a Git LFS pointer, not the file", "fetch the real files with git lfs pull")
    pack = open_pack(folder)
    formats = ", ".join(f"{count:,} {label}" for label, count in pack.formats.items())
    yield Found("headers", f"{len(pack.index.tensors):,} tensors as config.json expects them; matrices: {formats}")
    total = sum(_shard(path) for path in pack.index.files)
    claimed = _claimed_size(folder)
    held = sum(ref.nbytes for path in pack.index.files for ref in read_header(path).values())
    if claimed not in (None, held) and not pack.index.notes:
        raise PackDamaged(f"{INDEX_NAME} says {claimed:,} bytes of tensors, the shards hold {held:,}", "copy the index and the shards again")
    yield Found("shards", f"{len(pack.index.files)} files, {total:,} bytes, each as long as its header says")
    yield from _tokenizer(pack, cache_dir)


def _shard(path: Path) -> int:
    """Size of a shard whose tensors fill it without a gap. Raises PackDamaged."""
    refs = sorted(read_header(path).values(), key=lambda ref: ref.offset)
    size = path.stat().st_size
    if refs:
        at = refs[0].offset
        for ref in refs:
            if ref.offset != at:
                words = f"{path.name}: {ref.name} starts at byte {ref.offset:,}, the tensor before it ends at {at:,}"
                raise PackDamaged(words, "download the file again")
            at += ref.nbytes
        if at != size:
            raise PackDamaged(f"{path.name} has {size:,} bytes, its header describes {at:,}", "download the file again")
    return size


def _claimed_size(folder: Path) -> int | None:
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    size = json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
    return int(size) if isinstance(size, (int, float)) else None


def _tokenizer(pack: Pack, cache_dir: Path | None) -> Iterator[Found]:
    path = pack.folder / "tokenizer.json"
    if not path.is_file():
        raise PackIncomplete(f"{pack.folder.resolve().name} has no tokenizer.json, so it cannot chat.", "copy tokenizer.json into the build's folder")
    tokenizer = ChatTokenizer.from_file(path)
    if tokenizer.vocab_size > pack.config.vocab_size:
        raise PackDamaged(f"{path} has {tokenizer.vocab_size:,} ids, the weights {pack.config.vocab_size:,}", "copy the tokenizer of this very build")
    yield Found("tokenizer", f"{tokenizer.vocab_size:,} ids")
    if pack.config.engram:
        found = load_token_map(pack.folder, pack.config.vocab_size, cache_dir)
        distinct = len(set(found.tolist()))
        if distinct != pack.config.engram.compressed_vocab_size:
            raise PackDamaged(
                f"the token map has {distinct:,} compressed ids, config.json says {pack.config.engram.compressed_vocab_size:,}",
                "tokenizer.json and config.json are not of the same build",
            )
        yield Found("token map", f"{distinct:,} compressed ids")


def verify_full(
    folder: str | Path,
    *,
    done: MutableMapping[str, str],
    progress: Callable[[str, int, int], None] = lambda name, read, total: None,
    cancel: Callable[[], bool] = lambda: False,
) -> Iterator[Found]:
    """Read every byte of the shards. done: digests of files that an earlier run finished, by file and date; added to.

    Checks sha256 where a digest is known (a conversion's manifests, SHA256SUMS, a hub client's metadata), scales for NaN and codebook
    markers. Files of which no digest is known are a note. progress: file, bytes read of all files, bytes in all. Raises PackError or Cancelled.
    """
    pack = open_pack(folder)
    known = {folder: _known_digests(folder) for folder in {path.parent for path in pack.index.files}}
    total, read, compared = sum(path.stat().st_size for path in pack.index.files), 0, 0
    for path in pack.index.files:
        stat = path.stat()
        # A copy that keeps the date may differ all the same, so the file itself is part of the key.
        key = f"verify.{pack.fingerprint[:16]}-{stat.st_dev}-{stat.st_ino}.{path.name}.{stat.st_size}.{stat.st_mtime_ns}"
        if key not in done:
            done[key] = _sha256(path, lambda n, path=path, read=read: progress(path.name, read + n, total), cancel)
        read += stat.st_size
        progress(path.name, read, total)
        if (published := known[path.parent].get(path.name)) is not None:
            compared += 1
            if done[key] != published:
                raise PackDamaged(f"{path.name} has the sha256 {done[key]}, published is {published}", "download the file again")
    if compared:
        yield Found("checksums", f"{compared} files have the published sha256")
    if rest := len(pack.index.files) - compared:
        yield Found("checksums", f"not compared: of {rest} of {len(pack.index.files)} files no sha256 is known (SHA256SUMS in the folder)", False)
    yield Found("bytes", f"{_scan(pack, cancel):,} matrices without a NaN scale or a foreign codebook")


def _sha256(path: Path, progress: Callable[[int], None], cancel: Callable[[], bool]) -> str:
    h, read = hashlib.sha256(), 0
    with open(path, "rb") as f:
        while block := f.read(_BLOCK_BYTES):
            if cancel():
                raise Cancelled("verification was stopped; the files that were finished are not read again")
            h.update(block)
            read += len(block)
            progress(read)
    return h.hexdigest()


def _known_digests(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in folder.glob(".cache/huggingface/download/*.metadata"):
        lines = path.read_text(encoding="utf-8", errors="replace").split()
        # A hub client keeps the commit and the server's tag, which is the sha256 of files in large-file storage.
        if len(lines) > 1 and _SHA256.match(lines[1]):
            found[path.name.removesuffix(".metadata")] = lines[1]
    for name in _LISTS:
        if (folder / name).is_file():
            for line in (folder / name).read_text(encoding="utf-8").splitlines():
                digest, _, file = line.partition(" ")
                if _SHA256.match(digest.lower()):
                    found[os.path.basename(file.strip().lstrip("*"))] = digest.lower()
    for path in folder.glob("model-*.manifest.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found |= {file: manifest["sha256"] for file in manifest["files"]}
    return found


def _scan(pack: Pack, cancel: Callable[[], bool]) -> int:
    """Look at scales and markers of every matrix; table scales in blocks of rows. Returns how many matrices were seen."""
    expected = dict(pack.expected) | (pack.found.plan.expected if pack.found.plan else {})
    seen = 0
    for name, want in expected.items():
        if cancel():
            raise Cancelled("verification was stopped")
        if want.kind not in ("linear", "lookup", "table"):
            continue
        for matrix in identify_slices(pack.index.tensors, name, want.shape):
            seen += 1
            if (scale := matrix.parts.get("scale")) is not None:
                step = max(1, _BLOCK_BYTES // max(1, scale.nbytes // scale.shape[0]))
                for a in range(0, scale.shape[0], step):
                    scale_bytes(scale, a, a + step)
            elif matrix.layout is not None and matrix.label.startswith(("mxfp", "nvfp")):
                scales, bad = raw(matrix.parts["scales"]), 127 if matrix.label == "nvfp4" else 255
                if ((scales & bad) == bad).any():
                    raise PackDamaged(f"{matrix.parts['scales'].name} holds a NaN scale", "download the file again")
            elif "trellis" in matrix.parts:
                matrix.check_markers()
    return seen


"""What a conversion writes: per group of layers one shard, all sizes known from headers before a byte is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dsv41chat.engine.convert.recipes import Choice, Rule
from dsv41chat.engine.pack.build import Pack
from dsv41chat.engine.pack.formats import identify_slices
from dsv41chat.engine.pack.gate import SKIPPED_PREFIXES
from dsv41chat.engine.pack.index import ITEM_BYTES, TensorRef
from dsv41chat.engine.pack.matrix import Matrix, parts_of, stem_of
from dsv41chat.engine.pack.names import Expected

CHUNK_BYTES = 16 << 20
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w\d)\.weight$")


@dataclass(frozen=True)
class OutTensor:
    """name, safetensors tag and shape of one tensor of the result."""

    name: str
    tag: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.tag]


@dataclass(frozen=True)
class Piece:
    """Bytes for `tensor`, at `offset` within it."""

    tensor: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Copy:
    """A tensor that keeps its bytes."""

    out: OutTensor
    source: TensorRef

    @property
    def tensors(self) -> tuple[OutTensor, ...]:
        return (self.out,)

    def pieces(self) -> Iterator[Piece]:
        with open(self.source.file, "rb", buffering=0) as f:
            done = 0
            while done < self.source.nbytes:
                f.seek(self.source.offset + done)
                data = f.read(min(CHUNK_BYTES, self.source.nbytes - done))
                if not data:
                    raise OSError(f"{self.source.file} ends inside {self.source.name}")
                yield Piece(self.out.name, done, data)
                done += len(data)


@dataclass(frozen=True)
class Quantise:
    """A matrix, or the experts of one layer side by side, under one rule. path: without the leaf; lead: leading axes of the result."""

    path: str
    parts: tuple[Matrix, ...]
    rule: Rule
    lead: tuple[int, ...]

    @property
    def module(self) -> dict[str, int | str] | None:
        """The entry of config.json, None for values that are not quantised."""
        if self.rule.kind == "affine":
            return {"group_size": self.rule.group, "bits": self.rule.bits, "mode": "affine"}
        layout = self.parts[0].layout if self.rule.kind == "native" else None
        return None if layout is None else {"group_size": layout.group, "bits": layout.bits, "mode": layout.mode}

    @property
    def tensors(self) -> tuple[OutTensor, ...]:
        rows, columns = self.parts[0].shape
        if self.rule.kind == "affine":
            shapes = {"weight": ("U32", columns * self.rule.bits // 32)} | {n: ("BF16", columns // self.rule.group) for n in ("scales", "biases")}
        elif self.rule.kind == "native":
            shapes = {key: (spec.tag, spec.shape[1]) for key, spec in self.parts[0].layout.words}
        else:
            shapes = {"weight": ("BF16", columns)}
        lead = self.lead or (rows,)
        return tuple(OutTensor(f"{self.path}.{leaf}", tag, (*lead, width)) for leaf, (tag, width) in shapes.items())

    def pieces(self) -> Iterator[Piece]:
        """Expert by expert and row block by row block, so that memory does not grow with the matrix."""
        strides = {t.name: t.nbytes // (len(self.parts) * self.parts[0].shape[0]) for t in self.tensors}
        for e, matrix in enumerate(self.parts):
            rows, columns = matrix.shape
            step = rows if self.rule.kind == "native" else max(128, CHUNK_BYTES // (4 * columns) // 128 * 128)
            for a in range(0, rows, step):
                for leaf, data in self._block(matrix, a, min(rows, a + step)).items():
                    name = f"{self.path}.{leaf}"
                    yield Piece(name, (e * rows + a) * strides[name], data)

    def _block(self, matrix: Matrix, a: int, b: int) -> dict[str, bytes]:
        if self.rule.kind == "native":
            return {key: words.tobytes() for key, words in matrix.words().items()}
        with mx.stream(mx.cpu):
            values = mx.array(matrix.values(a, b)).astype(mx.bfloat16)
            if self.rule.kind == "float":
                return {"weight": np.array(values.view(mx.uint16)).tobytes()}
            weight, scales, biases = mx.quantize(values, group_size=self.rule.group, bits=self.rule.bits)
            return {
                "weight": np.array(weight).tobytes(),
                "scales": np.array(scales.view(mx.uint16)).tobytes(),
                "biases": np.array(biases.view(mx.uint16)).tobytes(),
            }


@dataclass(frozen=True)
class Group:
    """tag: such as `layers-07`; jobs: in the order of their tensors in the file."""

    tag: str
    jobs: tuple[Copy | Quantise, ...]

    @property
    def file(self) -> str:
        return f"model-{self.tag}.safetensors"

    @property
    def manifest(self) -> str:
        return f"model-{self.tag}.manifest.json"

    @property
    def tensors(self) -> list[OutTensor]:
        return [t for job in self.jobs for t in job.tensors]

    @property
    def modules(self) -> dict[str, dict]:
        return {job.path: job.module for job in self.jobs if isinstance(job, Quantise) and job.module}

    def header(self) -> bytes:
        """The 8-byte length and the JSON, padded so that data starts aligned."""
        entries, at = {}, 0
        for t in self.tensors:
            entries[t.name] = {"dtype": t.tag, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
            at += t.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_groups(pack: Pack, choice: Choice) -> list[Group]:
    """Every group in writing order: top, layers, their tables, draft stages, what is passed through."""
    tensors = pack.index.tensors
    expected: dict[str, Expected] = dict(pack.expected)
    if pack.found.plan is not None and choice.drafter != "drop":
        expected |= pack.found.plan.expected
    jobs: dict[str, list[Copy | Quantise]] = {}
    stacks: dict[tuple[str, str], list[str]] = {}
    for name, want in expected.items():
        if match := _EXPERT.match(name):
            stacks.setdefault((match[1], match[3]), []).append(name)
        elif not want.optional or name in tensors:
            jobs.setdefault(_tag(name, want.kind), []).extend(_jobs(pack, choice, name, want))
    for (prefix, which), names in stacks.items():
        jobs[_tag(names[0], "linear")].extend(_stacked(tensors, choice, f"{prefix}.{which}", names, expected))
    for name, ref in tensors.items():
        if name.startswith(SKIPPED_PREFIXES):
            jobs.setdefault("vision", []).append(Copy(OutTensor(name, ref.dtype, ref.shape), ref))
    return [Group(tag, tuple(found)) for tag, found in sorted(jobs.items(), key=lambda item: _order(item[0]))]


def _tag(name: str, kind: str) -> str:
    family, number, *_ = (*name.split("."), "")
    if family == "layers":
        return f"layers-{int(number):02d}" + ("-engram" if kind == "table" else "")
    return f"mtp-{number}" if family == "mtp" else "top"


def _order(tag: str) -> tuple[int, str]:
    return ("top", "layers", "mtp", "vision").index(tag.split("-")[0]), tag


def _jobs(pack: Pack, choice: Choice, name: str, want: Expected) -> list[Copy | Quantise]:
    tensors = pack.index.tensors
    if want.kind in ("float", "ids"):
        return [Copy(OutTensor(name, tensors[name].dtype, tensors[name].shape), tensors[name])]
    parts = identify_slices(tensors, name, want.shape)
    rule = choice.rule(name, want.kind, want.shape[1])
    lead = ()
    if name.endswith(".attn.wo_a.weight"):
        lead = (pack.config.o_groups, want.shape[0] // pack.config.o_groups)
    # Values that the recipe leaves alone keep their dtype; a trellis has no MLX layout and stays one; table rows are read as they are.
    keeps = rule.kind == "native" and (want.kind == "table" or any(part.layout is None for part in parts))
    plain = rule.kind == "float" and all("weight" in part.parts and part.parts["weight"].dtype in ("BF16", "F16", "F32") for part in parts)
    if keeps or plain:
        return [_copied(ref, stem, leaf, lead if plain else ()) for stem, leaf, ref in _named_parts(tensors, name, parts)]
    return [Quantise(stem_of(name)[:-1], tuple(parts), rule, lead)]


def _named_parts(tensors: dict[str, TensorRef], name: str, parts: list[Matrix]) -> Iterator[tuple[str, str, TensorRef]]:
    for i in range(len(parts)):
        stem = stem_of(name) if len(parts) == 1 else f"{stem_of(name)}slice.{i}."
        yield from ((stem, leaf, ref) for leaf, ref in parts_of(tensors, stem + "weight").items())


def _copied(ref: TensorRef, stem: str, leaf: str, lead: tuple[int, ...]) -> Copy:
    return Copy(OutTensor(stem + leaf, ref.dtype, (*lead, *ref.shape[1:]) if lead else ref.shape), ref)


def _stacked(tensors, choice: Choice, path: str, names: list[str], expected) -> list[Copy | Quantise]:
    parts = [identify_slices(tensors, name, expected[name].shape)[0] for name in names]
    rows, columns = expected[names[0]].shape
    rule = choice.rule(names[0], "linear", columns)
    if rule.kind == "native" and any(part.layout is None or part.layout != parts[0].layout for part in parts):
        if all("weight" in part.parts and part.parts["weight"].dtype in ("BF16", "F16", "F32") for part in parts):
            return [Quantise(path, tuple(parts), Rule("float"), (len(parts), rows))]
        return [_copied(ref, stem_of(name), leaf, ()) for name in names for leaf, ref in parts_of(tensors, name).items()]
    return [Quantise(path, tuple(parts), rule, (len(parts), rows))]

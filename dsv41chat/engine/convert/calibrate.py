"""How much each routed expert does on a text: the saliency by which `models prune` decides.

Saliency of an expert = mean over the tokens routed to it of |routing weight * its output|, in float32; the weight is the one applied, after
normalisation and factor, and the selection bias plays no part. The text is cut into windows of their own; even and odd windows are
tallied apart, and how far the two halves agree on what to keep says how much the choice can be trusted. Source: spec: checkpoints, 6.2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.chat.encode import Message, RenderOptions, encode_prompt
from dsv41chat.engine.chat.markers import BOS
from dsv41chat.engine.chat.tokenizer import ChatTokenizer
from dsv41chat.engine.convert.convert import settle_file, write_json
from dsv41chat.engine.errors import Cancelled, PackDamaged, PackIncomplete
from dsv41chat.engine.layerwise import LayerWalk, Stream

DEFAULT_TEXT = Path(__file__).with_name("calibration.jsonl")
WINDOW_TOKENS, MOST_TOKENS = 2048, 65536
_STATE, _STREAMS = "calibration.json", "calibration-{border}-{window}.safetensors"


@dataclass(frozen=True)
class CalibrationText:
    """name, sha256: of the file; windows: token ids, each window a text of its own."""

    name: str
    sha256: str
    windows: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(len(window) for window in self.windows)

    @classmethod
    def read(cls, path: Path, tokenizer: ChatTokenizer, family: str, most: int = MOST_TOKENS, window: int = WINDOW_TOKENS) -> CalibrationText:
        """path: plain text, or JSON lines {"messages": [{"role", "content"}, ...]}, put as the chat puts them. At least two windows,
        shorter ones when the text is short. Raises PackIncomplete for a text of less than 64 tokens, PackDamaged for unreadable lines."""
        ids, digest = text_ids(path, tokenizer, family)
        ids = ids[:most]
        if len(ids) < 64:
            raise PackIncomplete(f"{path.name} has {len(ids)} tokens, too few to calibrate with", "give a text of some thousand tokens")
        size = min(window - 1, -(-len(ids) // 2))
        first = tokenizer.marker(BOS)
        windows = tuple((first, *ids[a : a + size]) for a in range(0, len(ids), size))
        return cls(path.name, digest, windows)


def text_ids(path: Path, tokenizer: ChatTokenizer, family: str) -> tuple[list[int], str]:
    """(ids without a leading BOS, sha256 of the file) of plain text, or of JSON lines with messages. Raises PackDamaged."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
        ids = _conversations(text, tokenizer, family) if path.suffix == ".jsonl" else tokenizer.encode_text(text)
    except (ValueError, KeyError, TypeError) as error:
        raise PackDamaged(f"{path.name} cannot be read as a text: {error}", "UTF-8 text, or JSON lines with messages") from error
    return ids, hashlib.sha256(data).hexdigest()


def _conversations(text: str, tokenizer: ChatTokenizer, family: str) -> list[int]:
    """All conversations as one chat without thinking; its opening and generation header are left out."""
    messages = [Message(m["role"], m["content"]) for line in text.splitlines() if line.strip() for m in json.loads(line)["messages"]]
    prompt = encode_prompt(tokenizer, family, messages, RenderOptions(thinking=False))
    return list(prompt.ids[1 : prompt.header_start])


@dataclass
class Tally:
    """sums float64 [2, E] of norms, counts int64 [2, E] of tokens, for the two halves of the text."""

    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def empty(cls, experts: int) -> Tally:
        return cls(np.zeros((2, experts)), np.zeros((2, experts), np.int64))

    def add(self, half: int, ids: np.ndarray, norms: np.ndarray) -> None:
        """ids, norms [n, picks]."""
        experts = self.sums.shape[1]
        self.sums[half] += np.bincount(ids.ravel(), norms.ravel().astype(np.float64), experts)
        self.counts[half] += np.bincount(ids.ravel(), minlength=experts)

    def sink(self, half: int) -> Callable[[mx.array, mx.array], None]:
        """For `Watched`: adds to one half."""
        return lambda ids, norms: self.add(half, np.array(ids), np.array(norms))

    def saliency(self, half: int | None = None) -> np.ndarray:
        """float64 [E] of one half or of both; -1 for an expert to which nothing was routed."""
        parts = slice(None) if half is None else slice(half, half + 1)
        sums, counts = self.sums[parts].sum(0), self.counts[parts].sum(0)
        return np.where(counts > 0, sums / np.maximum(counts, 1), -1.0)

    def kept(self, keep: int, half: int | None = None) -> list[int]:
        """The `keep` most salient experts, ascending; the lower number wins a tie."""
        return sorted(np.argsort(-self.saliency(half), kind="stable")[:keep].tolist())


@dataclass
class Watched:
    """A MoE that reports what each expert adds: sink(expert ids [n, picks], norms float32 [n, picks])."""

    moe: Any
    sink: Callable[[mx.array, mx.array], None]

    def __call__(self, x: mx.array, about: mx.array | None) -> mx.array:
        ids, weight = self.moe.choose(x, about)
        parts = self.moe.parts(x, ids, weight)
        self.sink(ids, mx.sqrt(mx.sum(parts * parts, axis=-1)))
        return self.moe.combined(x, parts)


def calibrate(
    walk: LayerWalk, text: CalibrationText, layers: list[int], folder: Path, identity: dict[str, Any], *,
    progress: Callable[[int, int], None] = lambda done, total: None, cancel: Callable[[], bool] = lambda: False,
) -> dict[int, Tally]:  # fmt: skip
    """Tallies of the given layers. State lies in `folder` after every layer: a run that was killed goes on from there, to the same numbers.

    identity: what the state belongs to; state of anything else is not used. progress: layers done, of how many. Raises Cancelled.
    """
    state = _load(folder, identity)
    tallies = {int(layer): Tally(np.array(found["sums"]), np.array(found["counts"])) for layer, found in state["tallies"].items()}
    last = max(layers, default=-1)
    for border in range(state["border"], last + 1):
        layer = walk.layer(border)
        tally = Tally.empty(layer.moe.gate.weight.shape[0]) if border in layers else None
        moe = layer.moe
        for number, window in enumerate(text.windows):
            if cancel():
                raise Cancelled("calibration was stopped; --resume goes on with its last finished layer")
            if tally is not None:
                layer.moe = Watched(moe, tally.sink(number % 2))
            stream = Stream.load(folder / _STREAMS.format(border=border, window=number)) if border else walk.begin(window)
            passed = walk.run(layer, window, stream)
            if border < last:
                _write(folder / _STREAMS.format(border=border + 1, window=number), passed.stream.save)
        if tally is not None:
            tallies[border] = tally
        found = {layer: {"sums": t.sums.tolist(), "counts": t.counts.tolist()} for layer, t in tallies.items()}
        write_json(folder / _STATE, {"identity": identity, "border": border + 1, "tallies": found})
        for number in range(len(text.windows)):
            (folder / _STREAMS.format(border=border, window=number)).unlink(missing_ok=True)
        progress(border + 1, last + 1)
    return tallies


def forget(folder: Path) -> None:
    """Delete the state of a calibration."""
    for path in (*folder.glob(_STREAMS.format(border="*", window="*")), folder / _STATE):
        path.unlink(missing_ok=True)


def _load(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    path = folder / _STATE
    if path.is_file():
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["identity"] == identity:
            return state
    return {"identity": identity, "border": 0, "tallies": {}}


def _write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Under a passing name first: a state file is whole or not there."""
    draft = path.with_name(path.name + ".tmp")
    fill(draft)
    settle_file(draft, path)

"""How far one build's layers are from another's: the computing part of `eval ladder`.

Forced: a layer of the variant is given the reference's streams, pools and selections, so what differs is made in this layer. Free: the
variant carries its own from the start, so what differs has been carried along. Both builds are read layer by layer, one layer of one of
them at a time; what the layers hand on lies in files between two steps, so a step that was interrupted is simply run again.
Source: spec: checkpoints, section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dsv41chat.engine.errors import PackUnsupported
from dsv41chat.engine.layerwise import LayerWalk, Passed, Stream

_SAME = ("family", "vocab_size", "hidden_size", "num_hidden_layers", "hc_mult", "head_dim", "sliding_window", "index_topk", "compress_ratios")
_HEAD_ROWS = 64


def distance(reference: mx.array, other: mx.array) -> dict[str, float]:
    """Over tokens (the first axis): mean and largest relative L2 distance, mean cosine. Equal arrays give exactly 0, 0 and 1."""
    a, b = (np.array(x.astype(mx.float32)).astype(np.float64).reshape(x.shape[0], -1) for x in (reference, other))
    size, size_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    relative = np.linalg.norm(b - a, axis=1) / np.maximum(size, np.finfo(np.float64).tiny)
    unit = lambda x, n: x / np.maximum(n, np.finfo(np.float64).tiny)[:, None]
    # Half the squared distance of the unit vectors is 1 - cosine, and exactly 0 for equal ones.
    cosine = 1 - ((unit(a, size) - unit(b, size_b)) ** 2).sum(1) / 2
    return {"rel": float(relative.mean()), "max": float(relative.max()), "cos": float(cosine.mean())}


def selection(reference: Stream, other: Stream) -> float | None:
    """Share of the reference's picked entries that the other picked too; None where no selection is handed on."""
    same = total = 0
    for a, b in zip(reference.picked, other.picked):
        if a is None or b is None:
            continue
        for (index, present), (index_b, present_b) in zip(zip(*map(np.array, a)), zip(*map(np.array, b))):
            mine = set(index[present].tolist())
            same, total = same + len(mine & set(index_b[present_b].tolist())), total + len(mine)
    return same / total if total else None


def compare(reference: Passed, other: Passed) -> dict[str, Any]:
    """One text after one layer. mix: of the coefficients handed on (V4.1); made: of the entries and index keys that the layer appended,
    the worst of them; picked: of the selection in use."""
    found: dict[str, Any] = distance(reference.stream.h, other.stream.h)
    found["mix"] = None if reference.stream.pre is None else distance(reference.stream.pre, other.stream.pre)["rel"]
    made = [distance(rows, other.made[name])["rel"] for name, rows in reference.made.items() if rows.shape[0]]
    return found | {"made": max(made) if made else None, "picked": selection(reference.stream, other.stream)}


def differs(found: dict[str, Any]) -> bool:
    """Whether anything at all that a layer hands on is another."""
    return bool(found["rel"] or found["mix"] or found["made"] or found["picked"] not in (None, 1.0))


def demand_same_model(reference: LayerWalk, variant: LayerWalk) -> None:
    """Raises PackUnsupported when the builds are not of one model; formats and numbers of experts may differ."""
    a, b = reference.pack, variant.pack
    wrong = [name for name in _SAME if getattr(a.config, name) != getattr(b.config, name)]
    if wrong:
        names = f"{b.folder.resolve().name} and {a.folder.resolve().name}"
        raise PackUnsupported(f"{names} are different models: {', '.join(wrong)}", "give --against the build that this one was made from")


class Ladder:
    """steps: the embedding, one per layer, the head. texts: token ids; each is a text of its own.

    write(name, fill): a file that is whole or not there, as `Run.write`; folder: where it lands. Nothing else is kept between steps.
    """

    def __init__(
        self, reference: LayerWalk, variant: LayerWalk, texts: Sequence[Sequence[int]], folder: Path,
        write: Callable[[str, Callable[[Path], None]], Path],
    ):  # fmt: skip
        demand_same_model(reference, variant)
        self.reference, self.variant, self.texts, self.folder, self.write = reference, variant, texts, folder, write

    @property
    def steps(self) -> int:
        return self.reference.layers + 2

    def step(self, number: int) -> dict[str, Any]:
        """Run one step and leave the streams for the next. -> {"part", "forced", "free"}, means over the texts by tokens."""
        if number == 0:
            return self._embed()
        if number <= self.reference.layers:
            return self._layer(number - 1)
        return self._head()

    def clear(self, number: int) -> None:
        """Delete what step `number` read; it is done and noted."""
        for path in self.folder.glob(f"*-{number - 1}-*.safetensors"):
            path.unlink(missing_ok=True)

    def _keep(self, who: str, step: int, text: int, stream: Stream) -> None:
        self.write(_name(who, step, text), stream.save)

    def _load(self, who: str, step: int, text: int) -> Stream:
        return Stream.load(self.folder / _name(who, step, text))

    def _embed(self) -> dict[str, Any]:
        found = []
        for t, ids in enumerate(self.texts):
            mine, other = self.reference.begin(ids), self.variant.begin(ids)
            self._keep("reference", 0, t, mine)
            self._keep("variant", 0, t, other)
            found.append(compare(Passed(mine, {}), Passed(other, {})))
            mx.clear_cache()
        return {"part": "embedding", "forced": self._mean(found), "free": self._mean(found)}

    def _layer(self, index: int) -> dict[str, Any]:
        right, forced, free = [], [], []
        layer = self.reference.layer(index)
        for t, ids in enumerate(self.texts):
            passed = self.reference.run(layer, ids, self._load("reference", index, t))
            self._keep("reference", index + 1, t, passed.stream)
            right.append(passed.made)
        layer = None
        mx.clear_cache()
        layer = self.variant.layer(index)
        for t, ids in enumerate(self.texts):
            want = Passed(self._load("reference", index + 1, t), right[t])
            forced.append(compare(want, self.variant.run(layer, ids, self._load("reference", index, t))))
            own = self.variant.run(layer, ids, self._load("variant", index, t))
            self._keep("variant", index + 1, t, own.stream)
            free.append(compare(want, own))
        layer = None
        mx.clear_cache()
        return {"part": f"layer {index}", "forced": self._mean(forced), "free": self._mean(free)}

    def _head(self) -> dict[str, Any]:
        heads, last, forced, free = (self.reference.head(), self.variant.head()), self.reference.layers, [], []
        for t in range(len(self.texts)):
            mine, own = self._load("reference", last, t), self._load("variant", last, t)
            parts: tuple[list, list] = [], []
            for a in range(0, mine.h.shape[0], _HEAD_ROWS):
                rows = slice(a, a + _HEAD_ROWS)
                want = heads[0](mine, rows)
                parts[0].append(_logits(want, heads[1](mine, rows)))
                parts[1].append(_logits(want, heads[1](own, rows)))
            for out, found in ((forced, parts[0]), (free, parts[1])):
                out.append(_weighted(found, [part["n"] for part in found]))
        return {"part": "head", "forced": self._mean(forced), "free": self._mean(free)}

    def _mean(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        return _weighted(found, [len(ids) for ids in self.texts])


def _name(who: str, step: int, text: int) -> str:
    return f"{who}-{step}-{text}.safetensors"


def _logits(reference: mx.array, other: mx.array) -> dict[str, Any]:
    """kl: mean of KL(reference || other) in nats; top1: share of rows with the same best token."""
    a, b = (np.array(x).astype(np.float64) for x in (reference, other))
    log = lambda z: z - z.max(1, keepdims=True) - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
    p, q = log(a), log(b)
    kl, same = (np.exp(p) * (p - q)).sum(1), a.argmax(1) == b.argmax(1)
    return distance(reference, other) | {"kl": float(kl.mean()), "top1": float(same.mean()), "n": len(a)}


def _weighted(found: list[dict[str, Any]], tokens: list[int]) -> dict[str, Any]:
    """Means by tokens; the largest of `max`; None stays None."""
    out: dict[str, Any] = {}
    for name in found[0]:
        values = [(part[name], n) for part, n in zip(found, tokens) if part[name] is not None]
        if name == "max":
            out[name] = max(value for value, _ in values)
        elif name != "n":
            out[name] = sum(value * n for value, n in values) / sum(n for _, n in values) if values else None
    return out

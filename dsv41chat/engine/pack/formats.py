"""The one place that asks which format a matrix has: `identify(tensors, name, shape)`."""

from __future__ import annotations

from collections.abc import Mapping

from dsv41chat.engine.errors import PackIncomplete
from dsv41chat.engine.pack import exl3, mlx_quant, release
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import Matrix, demand, parts_of, stem_of

_MOST_SLICES = 64


def identify(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, int], block: int | None = None) -> Matrix:
    """The matrix whose weight is called `name`; shape [out, in]; block: fp8 block edge of the config, None to accept what is there.

    Raises PackIncomplete for an absent part, PackDamaged or PackUnsupported for parts that do not fit.
    """
    parts = parts_of(tensors, name)
    if "trellis" in parts:
        return exl3.recognise(parts, name, shape)
    if "scales" in parts:
        return mlx_quant.recognise(parts, name, shape)
    if "biases" in parts or ("weight" in parts and parts["weight"].dtype == "U32"):
        demand(parts, name, "scales", (), ())
    if "weight" not in parts:
        beside = ", ".join(stem_of(name) + leaf for leaf in parts)
        raise PackIncomplete(f"{name} is missing" + (f"; {beside} belongs to it" if beside else ""), "copy or convert the build again")
    return release.recognise(parts, name, shape, block)


def slices_of(tensors: Mapping[str, TensorRef], name: str) -> list[str]:
    """Weight names of the row slices `P.slice.0`, `P.slice.1`, ... of a matrix that is stored in slices; empty when it is not."""
    names = [f"{stem_of(name)}slice.{i}.weight" for i in range(_MOST_SLICES)]
    return [part for part in names if parts_of(tensors, part)]


def identify_slices(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, int], block: int | None = None) -> list[Matrix]:
    """The slices of `name` in order, or the matrix itself as the only one. Raises PackError as `identify` does."""
    whole = name in tensors or stem_of(name) + "trellis" in tensors
    names = [] if whole else slices_of(tensors, name)
    if not names:
        return [identify(tensors, name, shape, block)]
    absent = next((i for i, part in enumerate(names) if part != f"{stem_of(name)}slice.{i}.weight"), None)
    if absent is not None or shape[0] % len(names):
        what = f"slice {absent} is missing" if absent is not None else f"{len(names)} slices do not make up its {shape[0]} rows"
        raise PackIncomplete(f"{stem_of(name)}slice: {what}", "the build is incomplete; copy it again")
    return [identify(tensors, part, (shape[0] // len(names), shape[1]), block) for part in names]

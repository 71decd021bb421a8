"""What config.json says about quantisation, compared with the shapes. Shapes decide; a disagreement becomes a note."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dsv41chat.engine.pack.dialects import release_name
from dsv41chat.engine.pack.formats import identify_slices
from dsv41chat.engine.pack.index import TensorRef
from dsv41chat.engine.pack.matrix import stem_of
from dsv41chat.engine.pack.mlx_quant import MlxMatrix
from dsv41chat.engine.pack.names import Expected

_EXPERT = re.compile(r"\.experts\.\d+\.")


def fp8_block(outer: Mapping[str, Any]) -> int | None:
    """Edge of the square fp8 blocks of whatever part keeps release bytes; None when the config does not say."""
    quant = outer.get("quantization_config") or {}
    for block in (quant, quant.get("original_quantization_config") or {}, quant.get("non_routed_quantization") or {}):
        size = block.get("weight_block_size")
        if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
            return int(size[0])
    return None


def survey(tensors: Mapping[str, TensorRef], expected: Mapping[str, Expected], outer: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """(how many matrices have which format, notes about what config.json says otherwise)."""
    said, labels, wrong = _Said(outer), Counter(), []
    for name, want in expected.items():
        if want.kind not in ("linear", "lookup"):
            continue
        for matrix in identify_slices(tensors, name, want.shape):
            labels[matrix.label] += 1
            path = _EXPERT.sub(".experts.", stem_of(name)[:-1])
            if isinstance(matrix, MlxMatrix) and (claim := said.of(path)) not in (None, (matrix.bits, matrix.group, matrix.mode)):
                wrong.append(f"{path}: {_words(claim)} in config.json, {matrix.label} by its shapes")
    wrong = sorted(set(wrong))
    notes = [f"config.json is wrong about {len(wrong)} modules and the shapes decide, such as {wrong[0]}"] if wrong else []
    if said.any and not any(label.startswith(("affine", "mxfp", "nvfp")) for label in labels):
        notes.append("config.json has a quantization block, but no matrix is quantised so")
    return dict(labels.most_common()), notes


class _Said:
    """The `quantization` block by release path: an entry per module, else the default of its kind. Both known styles are read."""

    def __init__(self, outer: Mapping[str, Any]):
        block = outer.get("quantization")
        block = block if isinstance(block, dict) else {}
        self.any = bool(block)
        entries = block["modules"] if isinstance(block.get("modules"), dict) else {k: v for k, v in block.items() if isinstance(v, (dict, bool))}
        self._modules = {stem_of(release_name(f"{path}.weight"))[:-1]: entry for path, entry in entries.items()}
        self._default = block if "bits" in block else None
        self._experts = {**block, "bits": block["expert_bits"]} if isinstance(block.get("expert_bits"), int) else self._default

    def of(self, path: str) -> tuple[int, int, str] | str | None:
        """(bits, group, mode) as claimed for a quantised module, "no quantisation", or None without a claim."""
        entry = self._modules.get(path, True)
        if entry is False:
            return "no quantisation"
        default = self._experts if ".experts." in path and ".shared_experts." not in path else self._default
        source = {**(default or {}), **entry} if isinstance(entry, dict) else default
        if not source or "bits" not in source:
            return None
        mode = source.get("mode", "affine")
        return int(source["bits"]), int(source.get("group_size", {"nvfp4": 16, "affine": 64}.get(mode, 32))), mode


def _words(claim: tuple[int, int, str] | str) -> str:
    return claim if isinstance(claim, str) else f"{claim[2]} {claim[0]} g{claim[1]}"

"""The row check sees every kind of matrix that a pack can bring."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dsv41chat.engine import rowcheck
from dsv41chat.engine.nn.exl3 import Exl3ExpertLinear, Exl3GroupedLinear, Exl3Linear
from dsv41chat.engine.nn.linear import Linear
from dsv41chat.engine.pack.build import build_trunk, open_pack
from tests.engine.pack.test_formats import CASES, make


@pytest.mark.parametrize("family", ["v41", "v4"])
@pytest.mark.parametrize("case", ["mixed", "exl3-full"])
def test_every_matrix_of_a_pack_is_probed(case, family, tmp_path):
    pack, _ = make(tmp_path, family, CASES[case][family], stacked="exl3" not in case)
    trunk = build_trunk(open_pack(pack), dtype=mx.float32, packed=True)
    verdicts = rowcheck.probe(trunk, 3)
    assert len({v.op for v in verdicts}) == len(verdicts) and not any(v.tokenwise for v in verdicts), "this back end is row-exact"
    probed = {type(site.value) for site in rowcheck.places(trunk)}
    want = {Exl3Linear, Exl3GroupedLinear, Exl3ExpertLinear} if case == "exl3-full" else {Linear}
    assert want <= probed, probed
    assert rowcheck.install(trunk, [rowcheck.Verdict(v.op, (2, 3)) for v in verdicts]) > 20
    assert rowcheck.install(trunk, verdicts) == 0

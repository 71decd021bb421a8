"""In every format a row has the same bits whichever rows share its call, and drafted text is plain text, on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine import SamplingParams, open_engine
from dsv41chat.engine.chat.encode import EncodedPrompt
from dsv41chat.engine.convert.convert import convert_pack, plan_conversion
from dsv41chat.engine.events import Done
from dsv41chat.engine.pack.build import build_trunk, open_pack
from dsv41chat.nano import embedded_pack
from tests.engine.pack import packs as p
from tests.engine.pack.test_formats import CASES, make
from tests.v41 import pieces, run

FORMATS = [("release", "v41"), ("release", "v4"), ("mixed", "v41"), ("mixed", "v4"), ("native", "v4"), ("exl3-experts", "v41"), ("exl3-full", "v4")]


CASES_OF_DTYPES = [(*pair, mx.float32) for pair in FORMATS] + [("mixed", "v41", mx.bfloat16), ("exl3-full", "v4", mx.bfloat16)]


@pytest.mark.parametrize("case, family, dtype", CASES_OF_DTYPES)
def test_rows_do_not_depend_on_their_company(case, family, dtype, tmp_path):
    """One shot, in pieces, and token by token past the window and two groups of 12; fp8 and fp4 matrices as words."""
    pack, _ = make(tmp_path, family, CASES[case][family], stacked=case in ("mixed", "native"))
    trunk = build_trunk(open_pack(pack), dtype=dtype, packed=True)
    want = run(trunk, p.IDS)
    for cuts in ([*range(27), len(p.IDS)], pieces(len(p.IDS), 7)):
        got = run(trunk, p.IDS, cuts)
        assert got.tobytes() == want.tobytes(), (cuts, np.abs(got - want).max())


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """The embedded model at 4 and 8 bits, its drafter at 8."""
    folder = tmp_path_factory.mktemp("smaller") / "nano-4_8"
    convert_pack(plan_conversion(embedded_pack(), folder, "mixed-4_8", table="6", drafter="q8"))
    return folder


def answer(engine, draft, temperature: float) -> Done:
    prompt = EncodedPrompt(tuple(int(i) for i in np.random.default_rng(4).integers(20, 4000, 30)), "content", 0, 0)
    sampling = SamplingParams(temperature=temperature, seed=3)
    events = list(engine.new_session().generate(prompt, sampling, max_tokens=12, draft=draft, cancel=lambda: False))
    return events[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_text_of_a_quantised_build_is_its_plain_text(smaller, temperature):
    engine = open_engine(smaller)
    plain = answer(engine, "off", temperature)
    assert len(plain.ids) > 1
    for depth in (2, "auto"):
        assert answer(engine, depth, temperature).ids == plain.ids
    engine.close()

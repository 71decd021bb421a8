"""`--draft` on the command line with the embedded model: one answer at every depth, and figures that say how it came about."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("shared_weights")
DEPTHS = ["off", "0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("text", ["What does the word harbor mean?"])
def test_one_answer_at_every_depth(program, text):
    words = ["--json", "--temperature", "0.8", "--seed", "7", "--effort", "off", "--max-tokens", "24"]
    found = {draft: program(*words, "--draft", draft, text, real=True).object for draft in (*DEPTHS, "auto")}
    assert len({o["ids_hash"] for o in found.values()}) == 1
    by_depth = {draft: o["draft"]["by_depth"] for draft, o in found.items()}
    assert by_depth["off"] == by_depth["0"] == []
    for k in range(1, 6):
        counts, figures = by_depth[str(k)], found[str(k)]["draft"]
        assert len(counts) == k and figures["mode"] == str(k) and figures["rounds"] < 24
        assert sum(accepted for _, accepted in counts) == figures["accepted"] <= figures["proposed"]
        assert 0 < figures["accepted"] and figures["accepted"] + figures["rounds"] == found[str(k)]["usage"]["completion_tokens"]
    assert len({str(counts) for counts in by_depth.values()}) >= 6, "each depth has figures of its own"
    assert found["auto"]["draft"]["mode"] == "auto" and found["auto"]["draft"]["proposed"] and by_depth["auto"]

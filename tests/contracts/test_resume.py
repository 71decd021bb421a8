"""A conversation that goes on in another process answers as one that never stopped, and reads only what is new."""

from __future__ import annotations

from tests.programs import turn

FIRST = "Sinkhorn iterations normalise rows and columns by turns. " * 3
SECOND = "How often?"


def test_turn_two_in_a_new_process_resumes_exactly(tmp_path):
    kept, cold = tmp_path / "kept", tmp_path / "cold"
    greedy = ("--temperature", "0", "--effort", "off")
    first = turn(kept, FIRST, *greedy, more=False)
    second = turn(kept, SECOND, *greedy)
    assert first.usage["cached_tokens"] == 0
    # All but the pending id of the answer; new are that id, the end of the answer, the message and its markers.
    assert second.usage["cached_tokens"] == first.usage["context_used"] - 1
    assert second.usage["prefilled_tokens"] <= len(SECOND) + 8
    assert second.json["timing"]["resume_s"] > 0
    for got, text, more in ((first, FIRST, False), (second, SECOND, True)):
        want = turn(cold, text, *greedy, "--no-cache", more=more)
        assert want.json["ids_hash"] == got.json["ids_hash"] and want.usage["cached_tokens"] == 0
    assert not (cold / "cache" / "prompt_cache").exists()

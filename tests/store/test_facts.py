"""The engine's small mapping: kept between runs, never in the way."""

from __future__ import annotations

import pytest

from dsv41chat.store import Store


def test_is_a_mapping_of_texts_that_stays(store, open_store):
    facts = store.facts
    facts["b"] = "2"
    facts["a"] = '{"漢": 1}'
    facts["a"] = "1"
    assert dict(open_store().facts) == {"a": "1", "b": "2"} and list(facts) == ["a", "b"] and len(facts) == 2
    del facts["b"]
    assert "b" not in facts and facts.get("b", "x") == "x"
    with pytest.raises(KeyError):
        facts["b"]
    with pytest.raises(KeyError):
        del facts["b"]
    with pytest.raises(TypeError):
        facts["n"] = 1
    with pytest.raises(TypeError):
        facts[1] = "n"


def test_what_cannot_be_written_is_kept_for_the_run(store, open_store):
    store.facts["old"] = "stored"
    facts = open_store(readonly=True).facts
    facts["new"] = "mine"
    facts["old"] = "changed"
    assert dict(facts) == {"new": "mine", "old": "changed"}
    del facts["old"]
    assert dict(facts) == {"new": "mine"} and "old" not in facts
    assert dict(store.facts) == {"old": "stored"}


def test_a_failed_write_does_not_hide_a_later_one(store):
    with store.db.read() as db:
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    store.facts["k"] = "x" * 100_000
    assert store.facts["k"] == "x" * 100_000
    with store.db.read() as db:
        db.execute("PRAGMA max_page_count = 1000000")
        assert not db.execute("SELECT * FROM facts").fetchall()
    store.facts["k"] = "y"
    assert store.facts["k"] == "y"


def test_a_closed_store_ends_no_turn():
    store = Store.memory()
    facts = store.facts
    facts["k"] = "v"
    store.close()
    assert facts.get("k") is None
    facts["k"] = "w"
    assert facts["k"] == "w"

"""Search: which words the index answers, when the text is read instead, order and pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dsv41chat.store import search as rules
from dsv41chat.store.search import excerpt, folded, is_cjk, match_query


@pytest.fixture
def say(store):
    """Stores texts in one conversation and returns a function from a query to the numbers of the texts found, newest first."""
    conversation = store.new_conversation("talk")

    def say_(*texts):
        ids = [store.add_message(conversation.id, None, "user", text).id for text in texts]
        return lambda query, **options: [ids.index(hit.message_id) for hit in store.search(query, **options).hits]

    say_.conversation = conversation
    return say_


@pytest.mark.parametrize(
    ("query", "match"),
    [
        ("tables", '"tables"*'),
        ("two tables", '"two" "tables"*'),
        ("two ta", '"two" "ta"'),
        ("tables ", '"tables"'),
        ("tables?", '"tables?"'),
        ("foo-ba", '"foo-ba"'),
        ("foo-bar", '"foo-bar"*'),
        ('say "hi"', '"say" """hi"""'),
        ("NOT OR", '"NOT" "OR"'),
        ("naïve", '"naïve"*'),
        ("++", None),
        ("c ++", None),
        ("   ", None),
        ("漢字", None),
        ("two 漢", None),
        ("ひらがな", None),
        ("한글", None),
        ("ﾊﾝｶｸ", None),
        ("привет", '"привет"*'),
        ("x" * 70, '"' + "x" * 70 + '"*'),
    ],
)
def test_what_the_index_is_asked(query, match):
    assert match_query(query) == match


def test_cjk():
    assert all(map(is_cjk, "漢々〇あアㄅ한ｱ𠀀㐀")) and not any(map(is_cjk, "aé€я🙂…“"))


def test_words_prefixes_and_order(say):
    find = say("engram tables", "Two TABLES of engrams", "a tab", "naïve café", "nothing")
    assert find("tables") == [1, 0]
    assert find("engram") == [1, 0], "the last word may go on"
    assert find("engram tables") == [0], "any other word must be whole"
    assert find("engrams tables") == [1]
    assert find("tab") == [2, 1, 0]
    assert find("tab ") == [2], "a space ends the word"
    assert find("cafe naive") == find("CAFÉ") == [3]
    assert find("") == find("  ") == []


def test_short_words_are_no_prefixes(store, say):
    find = say("to be", "total")
    assert find("to") == [0]
    assert store.search("to").scanned is False


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("漢", [1, 0]),
        ("漢字", [1, 0]),
        ("字を 漢", [0]),
        ("です", [0]),
        ("두 개", [2]),
        ("개의", [2]),
        ("table漢", [1]),
        ("无", []),
    ],
)
def test_cjk_is_found_anywhere_in_the_text(store, say, query, found):
    find = say("漢字を使います。これはテストです", "Table漢字", "테이블이 두 개의 이유")
    assert find(query) == found
    assert store.search(query).scanned


def test_parts_of_words_and_signs_are_found_by_reading(store, say):
    find = say("hyperconnection", "a && b", "C++ code", "Straße")
    assert find("connect") == [0] and find("&&") == [1] and find("c++") == [2]
    assert find("raß") == [3]
    calls = []
    assert store.search("perconn", on_scan=lambda: calls.append(1)).scanned and calls == [1]
    assert not store.search("hyper", on_scan=lambda: calls.append(2)).scanned and calls == [1]
    assert store.search("absent").hits == () and store.search("absent").scanned


def test_quotes_and_operators_of_the_index_are_text(say):
    find = say('he said "hi" AND left', "NEAR(miss)", "col:umn -dash ^caret {brace}", "it's")
    assert find('"hi"') == [0] and find("hi AND left") == [0]
    assert find("NEAR(miss)") == [1] and find("col:umn") == [2] and find("-dash") == [2] and find("^caret {brace}") == [2]
    assert find("it's") == [3] and find("'") == [3] and find('"') == [0] and find("*") == []


def test_pages(store, say):
    find = say(*(f"common word {number}" for number in range(75)))
    seen, before, sizes = [], None, []
    while True:
        page = store.search("common", before=before)
        sizes.append(len(page.hits))
        seen += [hit.seq for hit in page.hits]
        before = page.next
        if before is None:
            break
    assert sizes == [30, 30, 15] and seen == sorted(seen, reverse=True) and len(set(seen)) == 75
    assert find("common", limit=3) == [74, 73, 72]
    end = page.hits[-1].created, page.hits[-1].seq
    assert store.search("common", before=end).hits == () and not store.search("common", before=end).scanned


def test_pages_of_a_scan(store, say, monkeypatch):
    monkeypatch.setattr(rules, "SLICE_ROWS", 4)
    say(*(f"漢字 {number}" if number % 3 == 0 else "other" for number in range(60)))
    first = store.search("漢字", limit=7)
    second = store.search("漢字", limit=7, before=first.next)
    third = store.search("漢字", limit=7, before=second.next)
    assert [len(page.hits) for page in (first, second, third)] == [7, 7, 6] and third.next is None
    numbers = [int(hit.excerpt.split()[1]) for page in (first, second, third) for hit in page.hits]
    assert numbers == list(range(57, -1, -3))


@pytest.mark.parametrize(("word", "scanned"), [("common", False), ("omm", True)])
def test_an_imported_message_comes_where_its_time_is(store, clock, monkeypatch, word, scanned):
    monkeypatch.setattr(rules, "SLICE_ROWS", 3)
    new = store.new_conversation("new")
    texts = ["common a", "common b", "common c", "common d"]
    first = store.add_message(new.id, None, "user", texts[0])
    stored = [replace(first, id=f"old{n}", text=text, created=first.created - 100 + n) for n, text in enumerate(("common x", "common y"))]
    for text in texts[1:]:
        store.add_message(new.id, None, "user", text)
    clock.pass_seconds(5)
    old = store.add_tree(stored, title="old")
    at = store.search(word, limit=2)
    assert at.scanned is scanned
    assert [hit.excerpt for hit in at.hits] == ["common d", "common c"], "the imported ones hide no newer one; of one time, the later to arrive"
    rest, found = at.next, []
    while rest is not None:
        page = store.search(word, limit=2, before=rest)
        found += [hit.excerpt for hit in page.hits]
        rest = page.next
    assert found == ["common b", "common a", "common y", "common x"]
    assert [hit.excerpt for hit in store.search(word, conversation_id=old.id).hits] == ["common y", "common x"]
    assert store.conversations_with(word) == [new.id, old.id]


def test_a_scan_can_be_cancelled_and_gone_on_with(store, say, monkeypatch):
    monkeypatch.setattr(rules, "SLICE_ROWS", 10)
    say(*(f"漢字 {number}" for number in range(40)))
    asked = []

    def cancel():
        asked.append(1)
        return len(asked) > 2

    page = store.search("漢", limit=1000, cancel=cancel)
    assert page.cancelled and len(page.hits) == 20
    rest = store.search("漢", limit=1000, before=page.next)
    assert not rest.cancelled and len(rest.hits) == 20
    assert not {hit.seq for hit in page.hits} & {hit.seq for hit in rest.hits}


def test_hits_say_where_they_are(store, clock):
    first, second = store.new_conversation("First"), store.new_conversation("Second")
    question = store.add_message(first.id, None, "user", "line one\nthe Engram\ttables are here\nline three")
    answer = store.add_message(first.id, question.id, "assistant", "also tables")
    store.add_message(second.id, None, "user", "tables elsewhere")
    hits = store.search("tables", conversation_id=first.id).hits
    assert [(hit.message_id, hit.title, hit.role) for hit in hits] == [(answer.id, "First", "assistant"), (question.id, "First", "user")]
    assert hits[1].excerpt == "the Engram tables are here" and hits[1].excerpt[hits[1].start : hits[1].end] == "tables"
    assert hits[1].created == clock()
    assert len(store.search("tables").hits) == 3
    assert [hit.message_id for hit in store.search("ables", conversation_id=first.id).hits] == [answer.id, question.id]


def test_all_branches_are_searched_and_running_answers_are_not(store, say):
    conversation = say.conversation
    question = store.add_message(conversation.id, None, "user", "q")
    store.add_message(conversation.id, question.id, "assistant", "branchword one")
    store.add_message(conversation.id, question.id, "assistant", "branchword two")
    assert len(store.search("branchword").hits) == 2
    writer = store.begin_answer(conversation.id, question.id, None, None, None)
    writer.update("branchword three")
    writer.checkpoint()
    assert len(store.search("branchword").hits) == len(store.search("ranchword").hits) == 2
    writer.finish("stopped", text="branchword four")
    assert store.search("branchword four").hits and not store.search("branchword three").hits


def test_the_index_stays_true_through_changes(store, say):
    rng = random.Random(5)
    words = ["alpha", "beta", "gamma", "delta"]
    conversation = say.conversation
    texts: dict[str, str] = {}
    for _ in range(120):
        if texts and rng.random() < 0.3:
            victim = rng.choice(sorted(texts))
            store.delete_branch(victim)
            del texts[victim]
        else:
            text = " ".join(rng.choices(words, k=3))
            if rng.random() < 0.5:
                key = store.add_message(conversation.id, None, "user", text).id
            else:
                with store.begin_answer(conversation.id, None, None, None, None) as writer:
                    writer.update("epsilon")
                    writer.checkpoint()
                    key = writer.finish("complete", text=text).id
            texts[key] = text
    for word in [*words, "epsilon"]:
        expected = {key for key, text in texts.items() if word in text}
        assert {hit.message_id for hit in store.search(word, limit=1000).hits} == expected
    with store.db.write() as db:
        db.execute("INSERT INTO messages_fts(messages_fts) VALUES ('integrity-check')")


def test_excerpts():
    text = "x" * 1000 + " needle " + "y" * 1000
    line, start, end = excerpt(text, ["needle"])
    assert line[start:end] == "needle" and len(line) == rules.EXCERPT_CHARS
    assert excerpt("Ünïcode Wörds", ["words"]) == ("Ünïcode Wörds", 8, 13)
    assert excerpt("a\x1b[31m\u202ered", ["red"])[0] == "a [31m red"
    assert excerpt("first\nsecond", ["absent"]) == ("first", 0, 0)
    assert excerpt("", ["x"]) == ("", 0, 0)
    line, start, end = excerpt("n" * 500, ["n" * 500])
    assert 0 <= start <= end <= len(line) <= rules.EXCERPT_CHARS


def test_folding_keeps_places():
    text = "Straße İstanbul ﬁne ｆｕｌｌ ΣΑΣ é e\u0301 🙂 한글 ㈱"
    assert len(folded(text)) == len(text) and folded("ÉÀ") == "ea"

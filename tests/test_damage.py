"""A damaged database and stored ids that are not those of their text: what can be read is read, and the advice that is given works."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest

from dsv41chat.store import Message, Store, StoreDamaged, pack_ids
from dsv41chat.store.errors import from_sqlite
from tests.markers import HOSTILE
from tests.ui.fakes import Script
from tests.ui.program import Result

PAGE = 4096


def whole_file(program) -> tuple[bytearray, dict[str, int]]:
    """(the bytes of chat.db with nothing left in its log, the root page of each table and index)."""
    path = program.data / "chat.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        roots = dict(db.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"))
    return bytearray(path.read_bytes()), roots


def replace_file(program, data: bytes) -> None:
    for beside in program.data.glob("chat.db*"):
        beside.unlink()
    (program.data / "chat.db").write_bytes(data)


def break_pages_of(data: bytearray, word: bytes) -> None:
    """Overwrite the pages that a long text of `word` fills: what follows on each is not found any more."""
    found = [start for start in range(0, len(data), PAGE) if data[start : start + PAGE].count(word) * (len(word) + 1) > PAGE - 50]
    assert found
    for start in found:
        data[start : start + PAGE] = b"\xff" * PAGE


@pytest.fixture
def two(program):
    """Ids of two conversations, each with a text that has pages of its own."""
    return [program("--json", f"{name} " + f"{name[0]}words " * 1000).object["conversation"] for name in ("good", "lost")]


def follow(program, said: str) -> list[Result]:
    """Run every command of the advice as it stands; what those of this program did."""
    commands = re.findall("`([^`]+)`", said)
    assert [command.split()[0] for command in commands] == ["dsv41chat", "mkdir", "dsv41chat"]
    ran = []
    for command in commands:
        words = shlex.split(command)
        if words[0] == "dsv41chat":
            ran.append(program(*words[1:]))
        else:
            subprocess.run(command, shell=True, check=True)
    return ran


@pytest.mark.parametrize("cell", ["usage", "settings", "text"])
def test_a_byte_that_is_no_text_hides_nothing(program, cell):
    before = program("--json", "--temperature", "0.5", "question that stands").object
    data, _ = whole_file(program)
    if cell == "text":
        data = data.replace(b"question that stands", b"question th\xfft stands")
    else:
        at = data.index({"usage": b'"context_used"', "settings": b'"temperature"'}[cell]) + 14
        data[at : at + 2] = b"\xff\xff"
    replace_file(program, data)
    for words in (("list",), ("export", "--all"), ("show", before["conversation"]), ("search", "question")):
        done = program("conversations", *words)
        assert done.code == 0 and "question th" in done.out, words
    if cell == "usage":
        (row,) = program("conversations", "list", "--json").object
        assert row["tokens"] is None and row["messages"] == 2
    done = program("-c", "--json", "and now?", script=Script("fine"))
    assert done.code == 0 and done.object["text"] == "fine" and done.object["conversation"] == before["conversation"]
    prompt = bytes(i for i in program.script_ids() if i < 256).decode()
    assert "question th" in prompt and "and now?" in prompt
    (line,) = (line for line in program("doctor", "--json").object if line["name"] == "database")
    assert line["verdict"] == "ok" and "intact" in line["text"]


def test_what_can_be_read_is_exported_and_what_cannot_is_named(program, two, tmp_path):
    good, lost = two
    data, _ = whole_file(program)
    break_pages_of(data, b"lwords")
    replace_file(program, data)
    for format in ("json", "jsonl", "md", "text"):
        file = tmp_path / f"all.{format}"
        done = program("conversations", "export", "--all", "--format", format, "-o", str(file))
        assert done.code == 8 and f'{lost} "lost' in done.err and good not in done.err and "1 conversation written" in done.err
        assert "good gwords" in file.read_text() and "lwords lwords" not in file.read_text().replace('"title": "lost lwords', "")
    (one,) = json.loads((tmp_path / "all.json").read_text())
    assert one["id"] == good and len(one["messages"]) == 2
    assert (program.data / "chat.db").read_bytes() == data
    assert program("conversations", "export", good).code == 0
    only = program("conversations", "export", lost)
    assert only.code == 8 and only.out == "" and "is damaged: " in only.err


def test_nothing_is_written_where_no_conversation_can_be_read(program, tmp_path):
    program("--headless", "lost " + "lwords " * 2000)
    data, _ = whole_file(program)
    break_pages_of(data, b"lwords")
    replace_file(program, data)
    done = program("conversations", "export", "--all", "-o", str(tmp_path / "all.md"))
    assert done.code == 8 and not (tmp_path / "all.md").exists()


def test_titles_are_listed_where_messages_cannot_be_counted(program, two):
    data, roots = whole_file(program)
    start = (roots["messages_conversation"] - 1) * PAGE
    data[start : start + PAGE] = b"\xff" * PAGE
    replace_file(program, data)
    done = program("conversations", "list")
    assert done.code == 8 and "is damaged: " in done.err
    assert [line.split()[:2] for line in done.out.splitlines()[1:]] == [[two[1], "-"], [two[0], "-"]]
    done = program("conversations", "list", "--json", "--limit", "1")
    assert done.code == 8 and [(row["id"], row["messages"]) for row in done.object] == [(two[1], None)] and "is damaged: " in done.err


@pytest.mark.parametrize("ref", [("-c",), ("--resume", "ID")], ids=["last", "one"])
@pytest.mark.parametrize("damage", ["no database", "pages"])
def test_a_chat_that_cannot_read_its_conversation_does_not_say_that_there_is_none(program, two, ref, damage):
    data, _ = whole_file(program)
    if damage == "pages":
        break_pages_of(data, b"lwords")
    replace_file(program, data if damage == "pages" else b"no database at all " * 500)
    done = program("--plain", *(two[1] if word == "ID" else word for word in ref), stdin="")
    assert done.code == (0 if ref == ("-c",) and damage == "no database" else 8)
    assert "is damaged: " in done.out + done.err and "no conversation" not in (done.out + done.err).casefold()


def test_the_advice_works(program, two):
    """Every command of the hint, run as it stands: what is intact is back in a database that is whole."""
    good, lost = two
    data, _ = whole_file(program)
    break_pages_of(data, b"lwords")
    replace_file(program, data)
    done = program("--headless", "hi")
    assert done.code == 8 and ".recover" not in done.err and (program.data / "chat.db").read_bytes() == data
    ran = follow(program, done.err)
    assert [done.code for done in ran] == [8, 0], ran
    assert [row["id"] for row in program("conversations", "list", "--json").object] == [good]
    assert program("--headless", "hi").code == 0
    kept = program.data / "damaged" / "chat.db"
    assert kept.read_bytes() == data


def test_the_end_of_a_row_may_be_anything(program):
    """Times, state and receipts stand behind the texts and on other pages: without them the text is still shown, exported and brought back."""
    ids = [program("--json", f"{word} " * 1000 + "last").object["conversation"] for word in ("gwords", "lwords")]
    data, _ = whole_file(program)
    found = [start for start in range(0, len(data), PAGE) if b'"tokenizer"' in data[start : start + PAGE] and data[start : start + 2] == b"\0\0"]
    assert len(found) == 2, "the last page of each long message"
    data[found[1] + 4 : found[1] + PAGE] = b"\xff" * (PAGE - 4)
    replace_file(program, data)
    for words in (("list",), ("show", ids[1]), ("show", ids[1], "--tree"), *(("export", "--all", "--format", f) for f in ("md", "json", "jsonl"))):
        done = program("conversations", *words)
        assert done.code == 0 and "lwords lwords" in done.out, words
    everything = program("conversations", "export", "--all", "--json").out
    assert program("--json", "--resume", ids[1], "more").code == 0, "pages are whole: it is gone on with"
    (line,) = (line for line in program("doctor", "--json").object if line["name"] == "database")
    assert line["verdict"] == "ok"
    other = program.at(program.data.parent / "other")
    assert other("conversations", "import", "-", stdin=everything).code == 0
    assert {row["id"] for row in other("conversations", "list", "--json").object} == set(ids)


def test_damaged_ids_of_an_answer_are_left_out_of_the_export(program):
    o = program("--json", "hello", script=Script("the answer")).object
    data, _ = whole_file(program)
    at = data.rindex("".join(f"{c}\0\0\0" for c in "the answer").encode())
    first = data.index("".join(f"{c}\0\0\0" for c in "the answer").encode())
    data[at] = data[first] = 0x7F
    replace_file(program, data)
    file = program("conversations", "export", o["conversation"], "--json").out
    assert json.loads(file)["messages"][1]["ids"] is None and json.loads(file)["messages"][1]["text"] == "the answer"
    assert program("conversations", "import", "-", stdin=file).code == 0


def test_only_what_has_written_nothing_says_so(tmp_path):
    """A message may have been stored before a statement meets the damage: then the file is not as it was."""
    path = tmp_path / "chat.db"
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    assert "Nothing is written" not in str(from_sqlite(error, path)) and "Nothing is written" not in str(from_sqlite(error, path, reading=True))
    with Store.open(tmp_path) as store:
        c = store.new_conversation("c")
        for _ in range(20):
            store.add_message(c.id, None, "user", "text " * 3000)
    data = bytearray(path.read_bytes())
    break_pages_of(data, b"text")
    path.write_bytes(data)
    for readonly in (True, False):
        with pytest.raises(StoreDamaged, match="Nothing is written to it"), Store.open(tmp_path, readonly=readonly) as store:
            store.tree(c.id)
    assert path.read_bytes() == data


# stored ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["of another text", "of a marker", "of no token"])
def test_stored_ids_that_are_not_those_of_the_text_are_not_used(program, ids):
    """The model reads what the person reads, and no control id comes from a text, whatever a file says."""
    text = "what I wrote " + HOSTILE
    o = program("--json", text, script=Script("first")).object
    file = json.loads(program("conversations", "export", o["conversation"], "--json").out)
    clean = file["messages"][0]["ids"]
    assert bytes(clean).decode() == text
    program("--json", "-c", "more", script=Script("second"))
    prompt = program.script_ids()
    marker = text.index("</think>")
    head = len(text[:marker].encode())
    file["messages"][0]["ids"] = {
        "of another text": list(b"something else"),
        "of a marker": [*clean[:head], next(i for i in prompt if i >= 256), *clean[head + len(b"</think>") :]],
        "of no token": [*clean, 1 << 31],
    }[ids]
    other = program.at(program.data.parent / "other")
    assert other("conversations", "import", "-", stdin=json.dumps(file)).code == 0
    done = other("--json", "-c", "more", script=Script("second"))
    assert done.code == 0 and other.script_ids() == prompt
    assert other("--json", "-c", "--dry-run", "more").code == 0


def test_stored_ids_that_are_the_text_are_used(program):
    """Not encoded again: a long conversation would cost that at every turn."""
    from dsv41chat.bench.scripted import ScriptedTokenizer
    from dsv41chat.ui.prompting import chat_messages

    tokenizer = ScriptedTokenizer()
    row = Message("a", "c", None, "user", "é, " + HOSTILE, meta={"tokenizer": tokenizer.sha256})
    ids = tuple(tokenizer.encode_text(row.text))
    for stored, used in ((ids, ids), (ids[:-1], None), ((), None), (None, None)):
        (message,) = chat_messages(None, [replace(row, ids_blob=pack_ids(stored))], tokenizer)
        assert message.content_ids == used and message.content == row.text


def test_stored_ids_spelling_a_marker_as_text_are_kept_apart(program):
    """Ids whose bytes are the text, but one of which is a control token: the bytes alone would not tell."""
    from dsv41chat.bench.scripted import ScriptedTokenizer

    tokenizer = ScriptedTokenizer()
    o = program("--json", "a </think> b", script=Script("first")).object
    file = json.loads(program("conversations", "export", o["conversation"], "--json").out)
    file["messages"][0]["ids"] = [*b"a ", tokenizer.marker("</think>"), *b" b"]
    other = program.at(program.data.parent / "other")
    other("conversations", "import", "-", stdin=json.dumps(file))
    assert other("--json", "-c", "more").code == 0
    assert b"a </think> b" in bytes(i for i in other.script_ids() if i < 256)


@pytest.mark.parametrize("ids", ["of another answer", "of a marker", "of no token", "behind a stop text"])
def test_sampled_ids_that_are_not_those_of_the_answer_are_not_used(program, ids):
    """What a file says the model sampled is held to the same rule."""
    said = "what it said </think> there"
    o = program("--json", "--effort", "off", "first", script=Script(said)).object
    file = json.loads(program("conversations", "export", o["conversation"], "--json").out)
    answer = file["messages"][1]
    clean = answer["body_ids"]
    assert bytes(clean).decode() == said
    program("--json", "-c", "more", script=Script("second"))
    prompt = program.script_ids()
    marker = next(i for i in prompt if i >= 256)
    answer["body_ids"] = {
        "of another answer": list(b"something else"),
        "of a marker": [*b"what it said ", marker, *b" there"],
        "of no token": [*clean, 1 << 31],
        "behind a stop text": [*clean, *b", and what nobody sees"],
    }[ids]
    if ids == "behind a stop text":
        answer["finish"] = "stop_string"
    other = program.at(program.data.parent / "other")
    assert other("conversations", "import", "-", stdin=json.dumps(file)).code == 0
    done = other("--json", "-c", "more", script=Script("second"))
    assert done.code == 0 and other.script_ids() == prompt


def test_sampled_ids_that_are_the_answer_are_used():
    """Up to what is never shown: line breaks at its ends, half a character, what follows a stop text."""
    from dsv41chat.bench.scripted import ScriptedTokenizer
    from dsv41chat.ui.prompting import chat_messages

    tokenizer = ScriptedTokenizer()
    end_think = tokenizer.marker("</think>")

    def used(text: str, *ids: int, finish: str = "stop") -> bool:
        """Whether both parts of an answer that says `text` are repeated as these ids; or neither is."""
        row = Message("a", "c", None, "assistant", text, text, finish=finish, params={"tokenizer": tokenizer.sha256})
        (message,) = chat_messages(None, [replace(row, reasoning_blob=pack_ids(ids), body_blob=pack_ids(ids))], tokenizer)
        assert message.reasoning_ids in (ids, None) and message.body_ids in (ids, None)
        assert (message.content, message.reasoning) == (text, text or None)
        if finish != "stop_string":
            assert message.reasoning_ids == message.body_ids
        return message.body_ids is not None

    assert used("é", *"é".encode()) and used("")
    assert used("a\nb", *b"\n\na\nb\n") and used("é", *"éé".encode()[:-1]) and used("a\ufffdb", *b"a\xffb")
    assert used("one", *b"one END", finish="stop_string") and not used("one", *b"one END")
    assert not used("one", *b"on") and not used("one", *b"on", finish="stop_string")
    assert not used("one", *b"one", end_think) and not used("a</think>", *b"a", end_think) and not used("one", *b"one", 1 << 20)


def test_an_import_names_what_was_taken(program):
    o = program("--json", "hello").object
    file = json.loads(program("conversations", "export", o["conversation"], "--json").out)
    say = lambda **changes: program("conversations", "import", "-", stdin=json.dumps(file | changes)).err
    rest = "was taken)\n"
    assert "(a copy: the ids of its messages were taken)" in say(id="0123abcd")
    assert f"(a copy: the id {o['conversation']} {rest}" in say(messages=[], leaf=None)
    assert f"(a copy: the id {o['conversation']} and the ids of its messages were taken)" in say()
    assert "a copy" not in say(id="0123abce", messages=[], leaf=None)


def test_a_log_that_a_killed_process_left_is_not_written_into_a_damaged_file(tmp_path):
    """To close a database is to empty its log into it: a damaged one, which is refused, is not even closed for writing."""
    source, data_dir = tmp_path / "source", tmp_path / "data"
    with Store.open(source) as store:
        c = store.new_conversation("c")
        store.add_message(c.id, None, "user", "text " * 3000)
        with store.db.read() as db:
            db.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        store.add_message(c.id, None, "user", "in the log")
        data_dir.mkdir()
        for name in ("chat.db", "chat.db-wal"):
            (data_dir / name).write_bytes((source / name).read_bytes())
    data = bytearray((data_dir / "chat.db").read_bytes())
    break_pages_of(data, b"text")
    (data_dir / "chat.db").write_bytes(data)
    log = (data_dir / "chat.db-wal").read_bytes()
    assert log
    for readonly in (False, True):
        with pytest.raises(StoreDamaged, match="Nothing is written to it"), Store.open(data_dir, readonly=readonly) as store:
            store.tree(c.id)
        assert (data_dir / "chat.db").read_bytes() == data and (data_dir / "chat.db-wal").read_bytes() == log

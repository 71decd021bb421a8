"""The disk is full or the database is locked, for real: SQLite says so, not a stand-in (spec: app, section 4.8)."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsv41chat.settings import load_settings
from dsv41chat.store import Store, StoreFull, db
from dsv41chat.ui.screens import chat_trouble
from dsv41chat.ui.screens.dialogs import AskScreen
from dsv41chat.ui.turn_events import AppStart
from tests.ui.fakes import Script
from tests.ui.program import ROOT
from tests.ui.test_plain import chat as line_mode
from tests.ui.tui import chat_of, drawn, ended, make_app, say, screen_text, shows, until

LONG = "".join(f"word{n} " for n in range(700))


@pytest.fixture
def filled(monkeypatch) -> Callable:
    """filled(file, pages): from now on the database may grow by so many pages and no further, as on a disk that fills up."""

    def fill(file, pages: int) -> None:
        with sqlite3.connect(file) as reader:
            now = reader.execute("PRAGMA page_count").fetchone()[0]
        monkeypatch.setitem(db.DURABLE, "max_page_count", str(now + pages))
        own = db.Connections._open_memory

        def open_memory(self) -> None:
            # Memory is not full with it.
            self._pragmas = {}
            own(self)

        monkeypatch.setattr(db.Connections, "_open_memory", open_memory)

    return fill


@pytest.fixture
def nearly_full(tmp_path, filled) -> None:
    """The database of `begun` exists and may grow by four pages."""
    with Store.open(tmp_path / "data") as store:
        store.new_conversation("there")
    filled(tmp_path / "data" / "chat.db", 4)


@asynccontextmanager
async def begun(tmp_path, answer: str = "answer", **options):
    """An application with a database, in which "first" was said; gives the pilot, the application and its chat screen. options: of Store.open."""
    store = Store.open(tmp_path / "data", **options)
    app = make_app(tmp_path, Script(answer=answer), store=store)
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await say(pilot, app, "first")
        yield pilot, app, chat_of(app)
    app.store.close()
    store.close()


def words_on(app) -> str:
    """The screen's text without its line breaks."""
    return " ".join(screen_text(app).split())


def test_a_full_disk_in_scripted_mode(program, filled):
    kept = program("--json", "--effort", "off", "first").object["conversation"]
    filled(program.data / "chat.db", 2)
    result = program("--stream-json", "--effort", "off", "-c", "second", script=Script(answer=LONG))
    last = result.events[-1]
    assert (result.code, last["type"], last["code"], last["exit_code"]) == (8, "error", "store", 8) and "disk is full" in last["message"]
    assert last["partial"]["text"] == LONG, "nothing that was said is lost"
    with Store.open(program.data, readonly=True) as store:
        assert [m.text for m in store.tree(kept)][:3] == ["first", "Hello from the fake engine.", "second"]


@pytest.mark.parametrize("words", [["-c"], []])
def test_what_a_full_disk_did_not_keep_is_not_offered(program, monkeypatch, words):
    """Neither a conversation whose message was refused nor a new one that got none."""
    program("--json", "first")

    def full(*_args, **_options):
        raise StoreFull("the disk is full", "free some space")

    monkeypatch.setattr(Store, "add_message", full)
    result = program("--headless", *words, "second")
    assert result.code == 8 and "disk is full" in result.err and "resume with" not in result.err and "kept" not in result.err
    plain = line_mode(program.data / "other", ["second"])
    assert plain.run() == 0 and "disk is full" in plain.out.getvalue() and plain.controller.last_conversation_id is None


async def test_a_full_disk_on_the_screen(tmp_path, nearly_full):
    async with begun(tmp_path, "short") as (pilot, app, chat):
        app.host.engine.script.answer, app.host.engine.script.delay_s = LONG, 0.0002
        chat.composer.insert("second")
        chat.composer.submit()
        await until(lambda: chat.pump.running and chat.status.answer)
        chat.composer.insert("queued meanwhile")
        chat.composer.submit()
        await until(lambda: not chat.pump.running)
        await until(lambda: "not saved" in screen_text(app).splitlines()[0])
        await until(lambda: "disk is full" in words_on(app))
        assert chat.transcript.entries[-2].text == LONG
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "short", "second", LONG] and app.store.path is None
        app.host.engine.script.answer = "in memory"
        await shows(app, "queued meanwhile")
        assert [item.text for item in app.store.queued(chat.conversation.id)] == ["queued meanwhile"]
        chat._finish = chat._failure = None
        chat.action_send_queued()
        await ended(chat)
        assert app.store.message(chat.leaf_id).text == "in memory"
        chat.run_command(f"/export json {tmp_path / 'kept.json'}")
        await until(lambda: (tmp_path / "kept.json").exists() and "word699" in (tmp_path / "kept.json").read_text())
        db.DURABLE.pop("max_page_count")
        chat.action_save_again()
        await until(lambda: app.store.path is not None and chat.conversation is not None)
        await until(lambda: chat.leaf_id is not None and app.store.message(chat.leaf_id).text == "in memory")
        # In the conversation that it came from, once.
        assert {row.title for row in app.store.list_conversations()} == {"there", "first"} and len(app.store.list_conversations()) == 2
        assert [m.text for m in app.store.tree(chat.conversation.id)] == ["first", "short", "second", LONG, "queued meanwhile", "in memory"]
        assert app.store.queued(chat.conversation.id) == []


async def test_an_answer_that_ended_by_itself_on_a_full_disk_keeps_its_end_and_its_figures(tmp_path, nearly_full):
    async with begun(tmp_path, "short") as (pilot, app, chat):
        app.host.engine.script.answer, app.host.engine.script.finish = LONG, "length"
        await say(pilot, app, "second")
        await until(lambda: app.store.path is None)
        await shows(app, "length limit", "Not saved")
        answer = app.store.message(chat.leaf_id)
        assert chat.transcript.entries[-2].message.id == answer.id and "tok/s" in chat.transcript.entries[-2].receipt
        db.DURABLE.pop("max_page_count")
        chat.action_save_again()
        await until(lambda: app.store.path is not None)
        stored = app.store.message(answer.id)
        for one in (answer, stored):
            assert (one.text, one.state, one.finish) == (LONG, "complete", "length")
            assert one.usage["completion_tokens"] == len(one.ids) > len(LONG) and one.timing["decode_tok_s"] and one.build_name == "nano"
        assert stored.body_ids == answer.body_ids and stored.ids_hash == answer.ids_hash


async def test_an_answer_stopped_on_a_full_disk_was_stopped(tmp_path, nearly_full):
    async with begun(tmp_path, "short") as (pilot, app, chat):
        script, reached, stopped = app.host.engine.script, threading.Event(), threading.Event()
        # Stopped at this length exactly: more than the file has room for.
        script.answer, script.each = LONG, lambda number: number == 3000 and (reached.set(), stopped.wait(60))
        chat.composer.insert("second")
        chat.composer.submit()
        await until(reached.is_set)
        await pilot.press("escape")
        await until(lambda: chat.status.stopping)
        stopped.set()
        await until(lambda: not chat.pump.running and app.store.path is None)
        message = app.store.message(chat.leaf_id)
        assert (message.state, message.finish) == ("stopped", "cancelled")
        assert "stopped by you" in chat.transcript.entries[-2].receipt and "error" not in chat.transcript.entries[-2].receipt
        db.DURABLE.pop("max_page_count")
        chat.action_save_again()
        await until(lambda: app.store.path is not None and chat.conversation is not None)
        await shows(app, "stopped by you")


async def locked(tmp_path, app, pilot) -> sqlite3.Connection:
    """The connection of another process that holds the database while the second message is sent."""
    other = sqlite3.connect(tmp_path / "data" / "chat.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await say(pilot, app, "second")
    await until(lambda: "not saved" in screen_text(app).splitlines()[0])
    return other


async def test_a_locked_database_on_the_screen(tmp_path):
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        other = await locked(tmp_path, app, pilot)
        await until(lambda: "locked by another process" in words_on(app) and chat.composer.text == "second")
        chat._finish = chat._failure = None
        await pilot.press("enter")
        await ended(chat)
        other.execute("ROLLBACK")
        other.close()
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "answer", "second", "answer"]
        key = chat.conversation.id
        chat.composer.insert("half typed")
        chat.action_save_again()
        await until(lambda: app.store.path is not None and chat.conversation is not None)
        assert [(row.id, row.messages) for row in app.store.list_conversations()] == [(key, 4)]
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "answer", "second", "answer"]
        await until(lambda: getattr(app.store.draft(key), "text", "") == "half typed")
        assert chat.composer.text == "half typed" and app.store.draft(None) is None
        await say(pilot, app, "")
        assert [m.text for m in app.store.tree(key)] == ["first", "answer", "second", "answer", "half typed", "answer"]


@pytest.fixture
def impatient(monkeypatch) -> None:
    """The disk is tried again at once."""
    monkeypatch.setattr(chat_trouble, "AGAIN_S", 0.05)
    monkeypatch.setattr(chat_trouble, "AGAIN_MOST_S", 0.1)
    monkeypatch.setattr(chat_trouble, "REST_S", 0.05)


def tries(chat, monkeypatch) -> list:
    """Grows with every try of the disk, also with one that is put off."""
    seen, own = [], chat._try_disk
    monkeypatch.setattr(chat, "_try_disk", lambda after_s: (seen.append(after_s), own(after_s)))
    return seen


def toasts(app) -> list[str]:
    return [toast.message for toast in app._notifications]


SAVED = "Saved: the database can be written again."


async def test_a_database_that_is_free_again_is_written_again_unasked(tmp_path, impatient, monkeypatch):
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        for number in range(12):
            await say(pilot, app, f"before {number}")
        tried = tries(chat, monkeypatch)
        other = await locked(tmp_path, app, pilot)
        key = chat.conversation.id
        await say(pilot, app, "")
        await pilot.press("ctrl+n")
        await until(lambda: chat.conversation is None)
        await say(pilot, app, "a new one")
        chat._open_soon(key)
        await until(lambda: chat.conversation is not None and chat.conversation.id == key)
        chat.composer.reset("half typed")
        chat.composer.move_cursor((0, 4))
        chat.transcript.focus()
        chat.transcript.home()
        await drawn(app)
        place, entries = chat.transcript.place(), list(chat.transcript.entries)
        before = len(tried)
        await until(lambda: len(tried) > before + 1)
        assert app.store.path is None and SAVED not in toasts(app) and not any("Still" in text for text in toasts(app))
        other.execute("ROLLBACK")
        other.close()
        await until(lambda: app.store.path is not None)
        await until(lambda: "not saved" not in screen_text(app).splitlines()[0])
        await drawn(app)
        assert toasts(app).count(SAVED) == 1
        assert all(one is two for one, two in zip(chat.transcript.entries, entries, strict=True)) and chat.transcript.place() == place
        assert (chat.composer.text, chat.composer.cursor_location, chat.focused) == ("half typed", (0, 4), chat.transcript)
        assert chat.conversation.id == key and app.store.lock_holder(key).here
        with Store.open(tmp_path / "data", readonly=True) as disk:
            assert sorted(row.title for row in disk.list_conversations()) == ["a new one", "first"]
            assert [m.text for m in disk.tree(key)][-2:] == ["second", "answer"] and disk.draft(key).text == "half typed"
        await say(pilot, app, "")
        assert [m.text for m in app.store.path_to(chat.leaf_id)][-2:] == ["half typed", "answer"]
        other = sqlite3.connect(tmp_path / "data" / "chat.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.5, other.close).start()
        app.store.rename(key, "waits for its turn like any other")


async def test_the_disk_is_not_tried_behind_a_page_or_an_answer(tmp_path, impatient, monkeypatch):
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        tried = tries(chat, monkeypatch)
        other = await locked(tmp_path, app, pilot)
        go_on = threading.Event()
        app.host.engine.script.each = lambda number: go_on.wait(60)
        await pilot.press("enter")
        await until(lambda: chat.pump.running)
        other.execute("ROLLBACK")
        other.close()
        before = len(tried)
        await until(lambda: len(tried) > before + 1)
        assert app.store.path is None
        chat.action_rename()
        await until(lambda: app.screen is not chat)
        go_on.set()
        await ended(chat)
        before = len(tried)
        await until(lambda: len(tried) > before + 1)
        assert app.store.path is None
        await pilot.press("escape")
        await until(lambda: app.store.path is not None)
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "answer", "second", "answer"]


async def test_a_disk_too_full_for_what_is_being_written_is_no_disk_that_can_be_written(tmp_path, impatient, monkeypatch, nearly_full):
    async with begun(tmp_path, "short") as (pilot, app, chat):
        tried, much = tries(chat, monkeypatch), "much " * 6000
        app.host.engine.context_limit = 100_000  # of a build that is loaded
        await say(pilot, app, much)
        assert app.store.path is None and chat.composer.expanded() == much
        before = len(tried)
        await until(lambda: len(tried) > before + 2)
        assert app.store.path is None and SAVED not in toasts(app)
        db.DURABLE.pop("max_page_count")
        await until(lambda: app.store.path is not None)
        await say(pilot, app, "")
        assert [m.text for m in app.store.path_to(chat.leaf_id)] == ["first", "short", much, "short"]


async def test_what_could_not_be_opened_at_the_start_is_opened_later(tmp_path, impatient, monkeypatch):
    """But not made anew where there is nothing: the disk of the folder may be away."""
    app = make_app(tmp_path, Script(), AppStart(unsaved="it is locked"))
    async with app.run_test(size=(100, 30)) as pilot:
        chat = chat_of(app)
        tried = tries(chat, monkeypatch)
        await say(pilot, app, "hello")
        before = len(tried)
        await until(lambda: len(tried) > before + 1)
        assert app.store.path is None and not (tmp_path / "data" / "chat.db").exists()
        Store.open(tmp_path / "data").close()
        await until(lambda: app.store.path is not None)
        assert [m.text for m in app.store.tree(chat.conversation.id)][:1] == ["hello"]


async def test_the_list_says_where_the_conversations_are_that_it_cannot_show(tmp_path):
    line = "All others are on the disk"
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        await pilot.press("ctrl+o")
        assert line not in await shows(app, "Conversations  (1)")
        await pilot.press("escape")
        app.store.new_conversation("another one")
        other = await locked(tmp_path, app, pilot)
        await pilot.press("ctrl+o")
        await shows(app, "Conversations  (1)", line)
        await pilot.press("escape")
        other.close()
        chat.action_save_again()
        await pilot.press("ctrl+o")
        assert line not in await shows(app, "Conversations  (2)")


async def test_a_first_message_that_a_full_disk_refused_waits_for_enter(tmp_path, filled):
    """And a second try of it on the same disk goes on in memory."""
    Store.open(tmp_path / "data").close()
    filled(tmp_path / "data" / "chat.db", 1)
    store = Store.open(tmp_path / "data")
    app, much = make_app(tmp_path, Script(answer="answer", context_limit=100_000), store=store), "much " * 6000
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await say(pilot, app, much)
        assert chat_of(app).composer.expanded() == much
        await until(lambda: "The message is back in the composer: Enter sends it." in words_on(app))
        await say(pilot, app, "")
        assert [m.text for m in app.store.path_to(chat_of(app).leaf_id)] == [much, "answer"] and app.store.path is None
    store.close()


@pytest.mark.parametrize("how", ["unasked", "in the dialog"])
async def test_quitting_tries_the_disk_once_more_and_asks_before_anything_is_lost(tmp_path, how):
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        other = await locked(tmp_path, app, pilot)
        await until(lambda: chat.composer.text == "second")
        chat._finish = chat._failure = None
        await pilot.press("enter")
        await ended(chat)
        await pilot.press("ctrl+q")
        await until(lambda: isinstance(app.screen, AskScreen))
        await shows(app, "This conversation is not saved")
        assert not app.leaving
        asked = app.screen
        await pilot.press("1")
        await until(lambda: isinstance(app.screen, AskScreen) and app.screen is not asked)
        await shows(app, "Still not saved.", "This conversation is not saved", "Save again")
        if how == "unasked":
            await pilot.press("2")
            await until(lambda: app.screen is chat)
        other.execute("ROLLBACK")
        other.close()
        await pilot.press("ctrl+q" if how == "unasked" else "1")
        await until(lambda: app.leaving)
    with Store.open(tmp_path / "data", readonly=True) as disk:
        assert [m.text for m in disk.path_to(disk.last_conversation().leaf_id)] == ["first", "answer", "second", "answer"]


async def test_quitting_saves_what_was_left_in_memory_for_a_new_conversation(tmp_path):
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        other = await locked(tmp_path, app, pilot)
        key = chat.conversation.id
        await say(pilot, app, "")
        await pilot.press("ctrl+n")
        await until(lambda: chat.conversation is None)
        await pilot.press("ctrl+q")
        await shows(app, "This conversation is not saved")
        await pilot.press("escape")
        await until(lambda: app.screen is chat)
        await say(pilot, app, "another one")
        await pilot.press("ctrl+n")
        other.execute("ROLLBACK")
        other.close()
        await pilot.press("ctrl+q")
        await until(lambda: app.leaving)
    with Store.open(tmp_path / "data", readonly=True) as disk:
        assert [m.text for m in disk.tree(key)] == ["first", "answer", "second", "answer"]
        assert sorted(row.title for row in disk.list_conversations()) == ["another one", "first"]


def test_a_locked_database_in_scripted_mode(program, monkeypatch):
    program("--json", "--effort", "off", "first")
    monkeypatch.setitem(Store.open.__func__.__kwdefaults__, "busy_s", 0.2)
    other = sqlite3.connect(program.data / "chat.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    result = program("--json", "-c", "second")
    assert "resume with" not in program("--headless", "-c", "second").err
    other.close()
    assert (result.code, result.object["code"]) == (8, "store") and "locked" in result.object["message"] and result.object["hint"]
    assert program("--json", "-c", "second").code == 0


def test_a_log_makes_private_folders(tmp_path):
    """The log is the first to need the folder of --data-dir."""
    from dsv41chat.logs import start_logging, stop_logging

    assert start_logging(tmp_path / "data" / "log", "info") is None
    stop_logging()
    assert {folder.stat().st_mode & 0o777 for folder in (tmp_path / "data", tmp_path / "data" / "log")} == {0o700}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_cannot_grow_is_silent(tmp_path, capfd):
    from dsv41chat.logs import start_logging, stop_logging

    (tmp_path / "full.log").symlink_to("/dev/full")
    assert start_logging(tmp_path, "info", tmp_path / "full.log") is None
    logging.getLogger("dsv41chat.test").error("a line")
    stop_logging()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_disk_of_two_megabytes(tmp_path):
    """A file system of its own, filled by one answer after another until it is full: exit 8, and what was stored before is there."""
    data = tmp_path / "data"
    data.mkdir()
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=2000k", "none", str(data)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    script = shlex.quote(json.dumps({"answer": LONG}))
    program = f"{shlex.quote(sys.executable)} -m tests.ui.fake_headless {script} --data-dir '{data}' --effort off"
    lines = [
        f"mount -t tmpfs -o size=2000k none '{data}'",
        f"for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do {program} --json question$n || break; done",
        f"{program} --json one-more; echo $?",
        f"{shlex.quote(sys.executable)} -m dsv41chat --data-dir '{data}' conversations list --limit 100 --json",
    ]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    *answers, more, code, listed = done.stdout.strip().splitlines()
    assert len(answers) < 30 and json.loads(answers[-1])["code"] == "store", "it became full"
    assert code == "8" and json.loads(more)["exit_code"] == 8 and "Traceback" not in done.stderr
    whole = [json.loads(line)["conversation"] for line in answers[:-1]]
    assert whole and set(whole) <= {row["id"] for row in json.loads(listed)}, done.stderr


async def test_what_could_not_be_opened_at_the_start_is_not_lost_without_a_question(tmp_path):
    """Quitting tries the disk once more, and asks where it still refuses."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "chat.db"
    path.write_bytes(b"no database at all " * 500)
    app = make_app(tmp_path, Script(), AppStart(unsaved="it is damaged"))
    async with app.run_test(size=(100, 30)) as pilot:
        await say(pilot, app, "hello")
        await pilot.press("ctrl+q")
        await until(lambda: isinstance(app.screen, AskScreen))
        await shows(app, "This conversation is not saved: it is damaged")
        assert path.read_bytes() == b"no database at all " * 500
        await pilot.press("escape")
        path.unlink()
        await pilot.press("ctrl+q")
        await until(lambda: app._exit)
    with Store.open(tmp_path / "data", readonly=True) as store:
        assert [row.messages for row in store.list_conversations()] == [2]


async def test_an_option_that_could_not_be_stored_is_not_changed(tmp_path):
    """Neither where the conversation keeps it nor where the command line gave it."""
    async with begun(tmp_path, busy_s=0.2) as (pilot, app, chat):
        app.apply_settings(load_settings(config=tmp_path / "config.toml", data_dir=tmp_path / "data", environ={}, turn={"temperature": 0.5}))
        other = sqlite3.connect(tmp_path / "data" / "chat.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        chat.run_command("/set temperature 0")
        await until(lambda: any(text.startswith("temperature was not changed: ") and "locked" in text for text in toasts(app)))
        assert chat.option_values()["temperature"] == (0.5, "flag")
        other.close()
        chat.run_command("/set temperature 0")
        await until(lambda: any(text.startswith("temperature: 0") for text in toasts(app)))
        assert chat.option_values()["temperature"] == (0.0, "conversation")

"""The file itself: modes, rights, locks, a full disk, damage, other versions of the tables, many openers at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from dsv41chat.store import (
    Store,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    StoreUnreadable,
    errors,
    files,
    migrations,
)
from dsv41chat.store.prompt_cache_room import open_existing
from tests.rights import ordinary_rights

ROOT = Path(__file__).parents[2]


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def sealed(tmp_path):
    """A folder that may be read and not be written, once `seal` is called."""
    folder = tmp_path / "sealed"

    def seal():
        for path in folder.iterdir():
            os.chmod(path, 0o444)
        os.chmod(folder, 0o555)

    yield folder, seal
    os.chmod(folder, 0o755)


def fill(store):
    conversation = store.new_conversation("kept")
    store.add_message(conversation.id, None, "user", "findable words")
    return conversation


# -- modes


def test_files_are_0600_and_folders_0700_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        data = tmp_path / "new" / "data"
        with Store.open(data) as store:
            fill(store)
            assert {path.name for path in data.iterdir()} == {"chat.db", "chat.db-wal", "chat.db-shm"}
            assert {mode(path) for path in data.iterdir()} == {0o600}
            assert mode(data) == mode(data.parent) == 0o700
        os.umask(0o777)
        with Store.open(tmp_path / "other") as store:
            fill(store)
            assert mode(tmp_path / "other") == 0o700 and mode(tmp_path / "other" / "chat.db") == 0o600
    finally:
        os.umask(old)


def test_a_file_with_another_mode_is_tightened_and_a_folder_left_alone(data_dir):
    data_dir.mkdir(mode=0o755)
    os.chmod(data_dir, 0o755)
    (data_dir / "chat.db").touch()
    os.chmod(data_dir / "chat.db", 0o644)
    with Store.open(data_dir) as store:
        fill(store)
        assert {mode(path) for path in data_dir.iterdir()} == {0o600} and mode(data_dir) == 0o755


def test_private_writes_are_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.write_private(target, b"one")
    assert target.read_bytes() == b"one" and mode(target) == 0o600
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StoreFull, match="No space left"):
        files.write_private(target, b"two")
    assert target.read_bytes() == b"one" and list(tmp_path.iterdir()) == [target]


# -- rights


def test_reading_where_there_is_nothing_creates_nothing(data_dir):
    with Store.open(data_dir, readonly=True) as store:
        assert store.list_conversations() == [] and store.last_conversation() is None
        with pytest.raises(StoreReadOnly):
            store.new_conversation()
    assert not data_dir.exists()


def test_a_reader_changes_nothing(store, open_store):
    conversation = fill(store)
    reader = open_store(readonly=True)
    for change in (
        lambda: reader.new_conversation(),
        lambda: reader.add_message(conversation.id, None, "user", "x"),
        lambda: reader.delete(conversation.id),
        lambda: reader.save_draft(conversation.id, "x"),
        lambda: reader.begin_answer(conversation.id, None, None, None, None),
        lambda: reader.builds.touch("nano"),
    ):
        with pytest.raises(StoreReadOnly, match="reading only") as caught:
            change()
        assert caught.value.code == "store" and caught.value.hint
    store.add_message(conversation.id, None, "user", "later words")
    assert reader.search("later").hits, "a reader sees what is written meanwhile"


def test_reading_in_a_folder_that_cannot_be_written(sealed):
    folder, seal = sealed
    with Store.open(folder) as store:
        conversation = fill(store)
    seal()
    with ordinary_rights():
        with pytest.raises(StoreReadOnly) as caught:
            Store.open(folder)
        assert "--readonly" in caught.value.hint or "--data-dir" in caught.value.hint
        with Store.open(folder, readonly=True) as reader:
            assert reader.conversation("kept").id == conversation.id
            assert reader.search("findable").hits and reader.search("indabl").hits
            results = []
            thread = threading.Thread(target=lambda: results.append(reader.list_conversations()))
            thread.start()
            thread.join()
            assert len(results[0]) == 1
    assert [path.name for path in folder.iterdir()] == ["chat.db"]


def test_reading_unmerged_changes_in_a_folder_that_cannot_be_written(sealed, tmp_path):
    """Copied while in use, or left by a killed process: the log beside the file belongs to it."""
    folder, seal = sealed
    folder.mkdir()
    with Store.open(tmp_path / "source") as store:
        fill(store)
        for name in ("chat.db", "chat.db-wal"):
            shutil.copyfile(tmp_path / "source" / name, folder / name)
    assert (folder / "chat.db-wal").stat().st_size > 0
    seal()
    temporary = set(Path(tempfile.gettempdir()).glob("dsv41chat-*"))
    with ordinary_rights(), Store.open(folder, readonly=True) as reader:
        assert reader.conversation("kept") and reader.search("findable").hits
    assert set(Path(tempfile.gettempdir()).glob("dsv41chat-*")) == temporary


def test_an_unreadable_file_and_a_file_as_folder(sealed, tmp_path):
    folder, _ = sealed
    with Store.open(folder) as store:
        fill(store)
    os.chmod(folder / "chat.db", 0)
    with ordinary_rights(), pytest.raises(StoreUnreadable, match="chat.db cannot be read"):
        Store.open(folder, readonly=True)
    with ordinary_rights(), pytest.raises(StoreReadOnly, match="chat.db cannot be written"):
        Store.open(folder)
    os.chmod(folder, 0)
    with ordinary_rights(), pytest.raises(StoreUnreadable, match="chat.db cannot be read: Permission denied") as caught:
        Store.open(folder, readonly=True)
    assert "rights" in caught.value.hint
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        for readonly in (False, True):
            with pytest.raises(StoreError, match="/file is not a folder$"):
                Store.open(place, readonly=readonly)
        with pytest.raises(StoreError, match="/file is not a folder$"):
            open_existing(place, None)


@pytest.mark.parametrize("reading", [True, False])
def test_an_error_of_the_drive_is_worded_by_what_was_tried(store, reading):
    fill(store)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ if reading else sqlite3.SQLITE_IOERR_WRITE
    with pytest.raises(StoreError, match=f"chat.db cannot be {'read' if reading else 'written'}: disk I/O error"):
        with store.db.read() if reading else store.db.write():
            raise error


# -- other processes


def test_a_database_locked_by_another_process(store, open_store, data_dir):
    conversation = fill(store)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE'); print('held', flush=True); input()",
            str(data_dir / "chat.db"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreBusy, match="locked by another process") as caught:
            store.add_message(conversation.id, None, "user", "x")
        assert caught.value.code == "store" and caught.value.hint
        assert store.search("findable").hits, "reading goes on"
        assert open_store().list_conversations() and open_store(readonly=True).list_conversations()
        store.facts["kept"] = "for this run"
    finally:
        holder.communicate("\n")
    assert store.add_message(conversation.id, None, "user", "x").text == "x"


def test_a_writer_waits_for_its_turn(store, open_store):
    conversation = fill(store)
    patient = open_store(busy_s=30)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with store.db.write():
            entered.set()
            leave.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(120)
    threading.Timer(0.3, leave.set).start()
    assert patient.add_message(conversation.id, None, "user", "patience").text == "patience"
    thread.join()


def test_many_processes_open_a_new_database_at_once(data_dir):
    program = (
        "import sys; from pathlib import Path; from dsv41chat.store import Store\n"
        "sys.stdin.readline()\n"
        "with Store.open(Path(sys.argv[1]), busy_s=60) as store: store.add_message(store.new_conversation().id, None, 'user', 'hello')\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(data_dir)], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    errors_ = [child.communicate("\n")[1] for child in children]
    assert [child.returncode for child in children] == [0] * 4, errors_
    with Store.open(data_dir) as store:
        assert len(store.list_conversations("hello")) == 4


# -- a full disk


def test_a_full_disk_is_named_and_loses_nothing(store):
    conversation = fill(store)
    with store.db.read() as db:
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(StoreFull, match="disk is full") as caught:
        store.add_message(conversation.id, None, "user", "x" * 200_000)
    assert caught.value.code == "store" and "space" in caught.value.hint
    assert [m.text for m in store.tree(conversation.id)] == ["findable words"]
    with store.db.read() as db:
        assert not db.conn.in_transaction
        db.execute("PRAGMA max_page_count = 1000000")
    store.add_message(conversation.id, None, "user", "x" * 200_000)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EROFS, StoreReadOnly), (errno.EACCES, StoreReadOnly), (errno.EIO, StoreError)],
)
def test_errors_of_the_system_have_names(number, kind):
    error = errors.from_os(OSError(number, os.strerror(number)), Path("/place"))
    assert type(error) is kind and "/place" in str(error) and error.hint and error.code == "store"


# -- damage and other versions


@pytest.mark.parametrize("readonly", [False, True])
def test_what_is_no_database_is_refused_and_left_alone(data_dir, readonly):
    data_dir.mkdir()
    content = b"this is not a database, " * 400
    (data_dir / "chat.db").write_bytes(content)
    with pytest.raises(StoreDamaged, match="damaged") as caught:
        Store.open(data_dir, readonly=readonly)
    assert caught.value.code == "store" and "aside" in caught.value.hint
    assert (data_dir / "chat.db").read_bytes() == content


def test_damaged_pages_are_named(data_dir):
    with Store.open(data_dir) as store:
        conversation = store.new_conversation("c")
        for _ in range(200):
            store.add_message(conversation.id, None, "user", "text " * 300)
    path = data_dir / "chat.db"
    content = bytearray(path.read_bytes())
    content[20 * 4096 :] = b"\xff" * (len(content) - 20 * 4096)
    path.write_bytes(content)
    with pytest.raises(StoreDamaged), Store.open(data_dir) as store:
        store.tree(conversation.id)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_database_is_refused_and_left_alone(data_dir, readonly):
    with Store.open(data_dir) as store:
        fill(store)
    db = Database(data_dir / "chat.db")
    newer = Migrations("chat")
    newer(name="holograms")(lambda db: db.execute("CREATE TABLE holograms (id)"))
    newer.apply(db)
    db.close()
    with pytest.raises(StoreNewer, match="'holograms'") as caught:
        Store.open(data_dir, readonly=readonly)
    assert caught.value.code == "store" and "update" in caught.value.hint
    with contextlib.closing(sqlite3.connect(data_dir / "chat.db")) as conn:
        assert conn.execute("SELECT title FROM conversations").fetchall() == [("kept",)]


def older_database(data_dir, last_step):
    """A database of a program that knew the steps up to `last_step`, with a conversation in it."""
    data_dir.mkdir()
    db = Database(data_dir / "chat.db")
    names = [step.name for step in migrations.CHAT.pending(db)]
    migrations.CHAT.apply(db, stop_before=names[names.index(last_step) + 1])
    db.execute("INSERT INTO conversations(id, title, created, updated, used) VALUES ('abcd0000', 'old', 1, 2, 3)")
    db.execute(
        "INSERT INTO messages(id, conversation_id, role, text, state, created, updated, viewed) "
        "VALUES ('aaaa00000000', 'abcd0000', 'user', 'old words', 'complete', 1, 1, 1)"
    )
    db.execute("UPDATE conversations SET leaf_id = 'aaaa00000000'")
    db.close()


@pytest.mark.parametrize("last_step", ["search", "drafts_and_queue", "builds", "locks", "facts"])
def test_an_older_database_is_brought_up_to_date(data_dir, last_step):
    older_database(data_dir, last_step)
    with Store.open(data_dir) as store:
        assert store.path_to(store.conversation("old").leaf_id)[0].text == "old words"
        assert store.search("words").hits
        store.facts["new"] = "table"
        store.queue_push("abcd0000", "new too")
        store.lock("abcd0000")
    with Store.open(data_dir) as store:
        assert store.facts["new"] == "table"


def test_an_older_database_is_read_without_being_changed(data_dir):
    older_database(data_dir, "builds")
    before = (data_dir / "chat.db").read_bytes()
    with Store.open(data_dir, readonly=True) as store:
        assert store.search("words").hits and store.lock_holder("abcd0000") is None
    assert (data_dir / "chat.db").read_bytes() == before


def test_a_failed_step_leaves_the_older_database(data_dir, monkeypatch):
    older_database(data_dir, "builds")
    monkeypatch.setattr(migrations.CHAT, "_migrations", list(migrations.CHAT._migrations))

    def broken(db):
        db.execute("CREATE TABLE half (id)")
        db.execute("INSERT INTO nowhere VALUES (1)")

    migrations.CHAT(name="broken")(broken)
    with pytest.raises(StoreError, match="nowhere"):
        Store.open(data_dir)
    with contextlib.closing(sqlite3.connect(data_dir / "chat.db")) as conn:
        tables = {row[0] for row in conn.execute("SELECT name FROM sqlite_master")}
    assert "half" not in tables and "locks" not in tables, "all steps or none"


def test_steps_are_append_only():
    """Released steps keep their names and their order: this list only ever grows at its end."""
    names = [step.name for step in migrations.CHAT.pending(Database(memory=True))]
    assert names[:8] == ["conversations", "messages", "search", "drafts_and_queue", "builds", "locks", "facts", "messages_by_time"]


# -- use


def test_a_closed_store_says_so(open_store):
    store = open_store()
    conversation = fill(store)
    store.close()
    for use in (store.list_conversations, lambda: store.add_message(conversation.id, None, "user", "x")):
        with pytest.raises(StoreClosed, match="closed"):
            use()


def test_an_exception_rolls_the_block_back(store):
    conversation = fill(store)
    with pytest.raises(RuntimeError), store.db.write():
        store.add_message(conversation.id, None, "user", "gone")
        raise RuntimeError
    assert [m.text for m in store.tree(conversation.id)] == ["findable words"]


def test_connections_of_ended_threads_are_closed(store):
    fill(store)
    for _ in range(20):
        thread = threading.Thread(target=store.list_conversations)
        thread.start()
        thread.join()
    assert len(store.db._links) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_another_store_of_the_process_leaves_the_locks_of_the_first(tmp_path):
    """SQLite's locks belong to the process: without them the next process that closes the file removes the log that is still written to."""
    other = f"import sqlite3; c = sqlite3.connect({str(tmp_path / 'chat.db')!r}); c.execute('SELECT * FROM conversations').fetchall(); c.close()"
    with Store.open(tmp_path) as store:
        fill(store)
        Store.open(tmp_path).close()
        subprocess.run([sys.executable, "-c", other], check=True)
        held = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.islink(link)]
        assert not [name for name in held if name.startswith(str(tmp_path)) and "deleted" in name]


def test_the_store_needs_no_engine_and_no_front_end():
    program = (
        "import sys, dsv41chat.store\n"
        "bad = [n for n in sys.modules if n.split('.')[0] in ('mlx', 'textual', 'torch') or n.startswith(('dsv41chat.engine', 'dsv41chat.ui'))]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0

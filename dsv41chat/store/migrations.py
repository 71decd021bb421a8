"""The tables of chat.db as a list of named steps.

Append only: a step that was released never changes, a new need is a new step. A database that knows a step which this list
does not know was written by a newer program and is refused.
"""

from __future__ import annotations

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from dsv41chat.store.errors import StoreNewer

CHAT = Migrations("chat")


@CHAT()
def conversations(db: Database) -> None:
    """A conversation: one tree of messages, the leaf last looked at, and the settings it keeps."""
    db.execute(
        """
        CREATE TABLE conversations (
          id TEXT PRIMARY KEY,
          title TEXT NOT NULL DEFAULT '',
          named INTEGER NOT NULL DEFAULT 0,      -- 1: the title was given, not taken from the first message
          settings TEXT NOT NULL DEFAULT '{}',   -- JSON
          view TEXT NOT NULL DEFAULT '{}',       -- JSON: scroll position and folds of the screen
          leaf_id TEXT REFERENCES messages(id) ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED,
          pinned INTEGER NOT NULL DEFAULT 0,
          created REAL NOT NULL,                 -- all times: epoch seconds, UTC
          updated REAL NOT NULL,                 -- last change of its text
          used REAL NOT NULL,                    -- last time it was opened or changed
          deleted REAL                           -- NULL: alive
        )
        """
    )
    db.execute("CREATE INDEX conversations_used ON conversations(used)")


@CHAT()
def messages(db: Database) -> None:
    """A message: a node of the tree. Ids are blobs of little-endian uint32, exactly as encoded or sampled."""
    db.execute(
        """
        CREATE TABLE messages (
          seq INTEGER PRIMARY KEY,               -- order of arrival
          id TEXT NOT NULL UNIQUE,
          conversation_id TEXT NOT NULL REFERENCES conversations(id) DEFERRABLE INITIALLY DEFERRED,
          parent_id TEXT REFERENCES messages(id) DEFERRABLE INITIALLY DEFERRED,
          role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant', 'tool')),
          text TEXT NOT NULL,
          thinking TEXT NOT NULL DEFAULT '',
          ids BLOB,                              -- of a text: its encoding; of an answer: every emitted id, the stop id included
          reasoning_ids BLOB,                    -- of an answer: inside the thinking part
          body_ids BLOB,                         -- of an answer: after the thinking part, without the stop id
          ids_hash TEXT,                         -- sha256 of `ids` of an answer
          state TEXT NOT NULL CHECK (state IN ('running', 'complete', 'stopped', 'interrupted', 'error')),
          finish TEXT,
          build_name TEXT,
          build_fingerprint TEXT,
          params TEXT,                           -- JSON
          usage TEXT,                            -- JSON
          timing TEXT,                           -- JSON
          meta TEXT,                             -- JSON: whatever else the turn wants to keep
          owner TEXT,                            -- token of the process that writes a running answer
          created REAL NOT NULL,
          updated REAL NOT NULL,
          viewed REAL NOT NULL                   -- last time it was the leaf on screen
        )
        """
    )
    db.execute("CREATE INDEX messages_parent ON messages(parent_id)")
    db.execute("CREATE INDEX messages_conversation ON messages(conversation_id, seq)")
    db.execute("CREATE INDEX messages_running ON messages(owner) WHERE state = 'running'")


@CHAT()
def search(db: Database) -> None:
    """Full-text index over finished messages. A running answer is left out: each of its checkpoints would index it anew."""
    db.execute("CREATE VIEW searchable AS SELECT seq, text FROM messages WHERE state <> 'running'")
    db.execute(
        """
        CREATE VIRTUAL TABLE messages_fts USING fts5(
          text, content='searchable', content_rowid='seq', tokenize='unicode61 remove_diacritics 2', prefix='3'
        )
        """
    )
    remove = "INSERT INTO messages_fts(messages_fts, rowid, text) SELECT 'delete', old.seq, old.text WHERE old.state <> 'running';"
    add = "INSERT INTO messages_fts(rowid, text) SELECT new.seq, new.text WHERE new.state <> 'running';"
    db.execute(f"CREATE TRIGGER messages_fts_insert AFTER INSERT ON messages BEGIN {add} END")
    db.execute(f"CREATE TRIGGER messages_fts_delete AFTER DELETE ON messages BEGIN {remove} END")
    db.execute(f"CREATE TRIGGER messages_fts_update AFTER UPDATE OF text, state ON messages BEGIN {remove} {add} END")


@CHAT()
def drafts_and_queue(db: Database) -> None:
    """What was typed and not sent: one draft per conversation (one more for no conversation yet), and waiting messages."""
    db.execute(
        """
        CREATE TABLE drafts (
          conversation_id TEXT REFERENCES conversations(id) ON DELETE CASCADE,
          text TEXT NOT NULL,
          editing TEXT,                          -- the message that the draft is to replace, if any
          meta TEXT,                             -- JSON: chips of pasted text and files
          updated REAL NOT NULL
        )
        """
    )
    db.execute("CREATE UNIQUE INDEX drafts_one ON drafts(coalesce(conversation_id, ''))")
    db.execute(
        """
        CREATE TABLE queue (
          id INTEGER PRIMARY KEY AUTOINCREMENT,
          conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
          text TEXT NOT NULL,
          meta TEXT,                             -- JSON
          created REAL NOT NULL
        )
        """
    )
    db.execute("CREATE INDEX queue_conversation ON queue(conversation_id, id)")


@CHAT()
def builds(db: Database) -> None:
    """Known builds. The embedded one has no folder here: it is found through the package."""
    db.execute(
        """
        CREATE TABLE builds (
          name TEXT PRIMARY KEY,
          folder TEXT UNIQUE,
          family TEXT,
          fingerprint TEXT,
          added REAL NOT NULL,
          last_used REAL
        )
        """
    )


@CHAT()
def locks(db: Database) -> None:
    """Who is at work: a row per process that holds something, and the names that it holds."""
    db.execute(
        """
        CREATE TABLE processes (
          token TEXT PRIMARY KEY,
          pid INTEGER NOT NULL,
          host TEXT NOT NULL,
          birth TEXT NOT NULL,                   -- tells two processes with one pid apart; '' if unknown
          heartbeat REAL NOT NULL
        )
        """
    )
    db.execute(
        """
        CREATE TABLE locks (
          name TEXT PRIMARY KEY,
          token TEXT NOT NULL REFERENCES processes(token) ON DELETE CASCADE,
          acquired REAL NOT NULL
        )
        """
    )


@CHAT()
def facts(db: Database) -> None:
    """Measured verdicts of the engine, by key."""
    db.execute("CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL, updated REAL NOT NULL)")


@CHAT()
def messages_by_time(db: Database) -> None:
    """Search goes through the messages by the time they were written: imported ones arrive after newer ones."""
    db.execute("CREATE INDEX messages_created ON messages(created, seq, conversation_id)")


def check_known(db: Database, migrations: Migrations) -> None:
    """Raise StoreNewer if the database has steps that `migrations` does not know."""
    # Every step is pending on an empty database.
    known = {step.name for step in migrations.pending(Database(memory=True, execute_plugins=False))}
    unknown = [step.name for step in migrations.applied(db) if step.name not in known]
    if unknown:
        raise StoreNewer(
            f"the database was changed by a newer dsv41chat (step {unknown[0]!r}), this one must not touch it",
            "update dsv41chat, or use another --data-dir",
        )

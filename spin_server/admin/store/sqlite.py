"""The embedded store: one SQLite file, for the servers of one machine.

A write-ahead log with full synchronisation: what was acknowledged survives a killed process and a
lost power supply, and readers never wait for a writer.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spin_server.admin.store.interface import (
    Body,
    Change,
    Commit,
    Document,
    Entry,
    Ref,
    Snapshot,
    StaleError,
    StoreError,
)

_FORMAT = 1
_BUSY_SECONDS = 10.0
_SCHEMA = """
CREATE TABLE documents (
    kind TEXT NOT NULL, name TEXT NOT NULL, revision INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE TABLE commits (
    revision INTEGER PRIMARY KEY,
    at TEXT NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL,
    reason TEXT NOT NULL, request_id TEXT NOT NULL
);
CREATE TABLE changes (
    revision INTEGER NOT NULL REFERENCES commits, kind TEXT NOT NULL, name TEXT NOT NULL,
    before TEXT, after TEXT,
    PRIMARY KEY (revision, kind, name)
) WITHOUT ROWID;
CREATE TRIGGER commits_come_once BEFORE INSERT ON commits
WHEN EXISTS (SELECT 1 FROM commits WHERE revision = NEW.revision) BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;
CREATE TRIGGER changes_come_once BEFORE INSERT ON changes
WHEN EXISTS (SELECT 1 FROM changes
    WHERE revision = NEW.revision AND kind = NEW.kind AND name = NEW.name) BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;
CREATE TRIGGER commits_stay BEFORE UPDATE ON commits BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;
CREATE TRIGGER commits_remain BEFORE DELETE ON commits BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;
CREATE TRIGGER changes_stay BEFORE UPDATE ON changes BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;
CREATE TRIGGER changes_remain BEFORE DELETE ON changes BEGIN
    SELECT RAISE(ABORT, 'the log is append-only');
END;
"""
_COMMIT_COLUMNS = "revision, at, actor, action, reason, request_id"


class SqliteStore:
    """See `Store`.

    Args:
        path: of the file; made if it is absent, readable by its owner alone.

    Raises:
        StoreError: it is no store of ours, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            if path.is_file() and path.stat().st_mode & 0o077:
                path.chmod(0o600)  # somebody else made it; its log gets the same mode
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            try:
                self._open_in_turn()
            except BaseException:
                self._db.close()
                raise

    def _open_in_turn(self) -> None:
        # SQLite's own waiting does not cover two that make a store at once.
        end = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._open()
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.005)
        self._db.execute(f"PRAGMA busy_timeout = {round(_BUSY_SECONDS * 1000)}")

    def _open(self) -> None:
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        with self._transaction("IMMEDIATE"):
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found == 0 and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _statements(_SCHEMA):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_FORMAT}")
            elif found != _FORMAT:
                raise StoreError(
                    f"{self._path}: expected a store of format {_FORMAT}, got "
                    f"{f'format {found}' if found else 'a database of something else'}"
                )
        self._db.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, json.JSONDecodeError) as error:
            raise StoreError(
                f"{self._path}: expected a readable and writable store, got {error}"
            ) from error

    @contextmanager
    def _transaction(self, mode: str) -> Iterator[None]:
        self._db.execute(f"BEGIN {mode}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _newest(self) -> int:
        (revision,) = self._db.execute("SELECT COALESCE(MAX(revision), 0) FROM commits").fetchone()
        return int(revision)

    def revision(self) -> int:
        """See `Store`."""
        with self._lock, self._explained():
            return self._newest()

    def snapshot(self) -> Snapshot:
        """See `Store`."""
        with self._lock, self._explained(), self._transaction("DEFERRED"):
            rows = self._db.execute("SELECT kind, name, revision, body FROM documents").fetchall()
            return Snapshot(
                self._newest(),
                {Ref(kind, name): Document(at, json.loads(body)) for kind, name, at, body in rows},
            )

    def commit(self, base: int, changes: Sequence[Change], entry: Entry) -> int:
        """See `Store`."""
        with self._lock, self._explained(), self._transaction("IMMEDIATE"):
            if (newest := self._newest()) != base:
                raise StaleError(f"expected revision {base}, got {newest}: somebody else wrote")
            revision = base + 1
            self._db.execute(
                f"INSERT INTO commits ({_COMMIT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                (revision, entry.at, entry.actor, entry.action, entry.reason, entry.request_id),
            )
            for change in changes:
                self._write(revision, change)
        return revision

    def _write(self, revision: int, change: Change) -> None:
        before, after = _text(change.before), _text(change.after)
        self._db.execute(
            "INSERT INTO changes (revision, kind, name, before, after) VALUES (?, ?, ?, ?, ?)",
            (revision, *change.ref, before, after),
        )
        if after is None:
            self._db.execute("DELETE FROM documents WHERE kind = ? AND name = ?", change.ref)
        else:
            self._db.execute(
                "INSERT OR REPLACE INTO documents (kind, name, revision, body) VALUES (?, ?, ?, ?)",
                (*change.ref, revision, after),
            )

    def log(self, *, before: int | None, limit: int) -> list[Commit]:
        """See `Store`."""
        newest = 2**63 - 1 if before is None else before
        return self._commits("revision < ? ORDER BY revision DESC LIMIT ?", newest, limit)

    def since(self, revision: int) -> list[Commit]:
        """See `Store`."""
        return self._commits("revision > ? ORDER BY revision", revision)

    def _commits(self, which: str, *values: int) -> list[Commit]:
        with self._lock, self._explained(), self._transaction("DEFERRED"):
            rows = self._db.execute(
                f"SELECT {_COMMIT_COLUMNS} FROM commits WHERE {which}", values
            ).fetchall()
            found = self._changes([row[0] for row in rows])
        return [Commit(row[0], Entry(*row[1:]), tuple(found.get(row[0], ()))) for row in rows]

    def _changes(self, revisions: list[int]) -> dict[int, list[Change]]:
        """Read the changes of commits without a gap between them."""
        rows = self._db.execute(
            "SELECT revision, kind, name, before, after FROM changes "
            "WHERE revision BETWEEN ? AND ? ORDER BY revision, kind, name",
            (min(revisions, default=0), max(revisions, default=-1)),
        )
        found: dict[int, list[Change]] = {}
        for revision, kind, name, before, after in rows:
            change = Change(Ref(kind, name), _body(before), _body(after))
            found.setdefault(revision, []).append(change)
        return found

    def close(self) -> None:
        """See `Store`."""
        with self._lock:
            self._db.close()


def _text(body: Body | None) -> str | None:
    return None if body is None else json.dumps(body, sort_keys=True, allow_nan=False)


def _body(text: str | None) -> Body | None:
    return None if text is None else json.loads(text)


def _statements(script: str) -> Iterator[str]:
    """Split a script; a trigger holds semicolons of its own."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""

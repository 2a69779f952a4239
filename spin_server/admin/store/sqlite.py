"""The embedded store: one SQLite file, for the servers of one machine.

A write-ahead log with full synchronisation: what was acknowledged survives a killed process and a
lost power supply, and readers never wait for a writer: they have a connection of their own.
"""

import json
import os
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
# All three are one store: what goes into a log that was deleted is lost with the last connection.
_FILES = ("", "-wal", "-shm")


class SqliteStore:
    """See `Store`.

    Args:
        path: of the file; made if it is absent, readable by its owner alone.

    Raises:
        StoreError: it is no store of ours, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading, self._writing = threading.Lock(), threading.Lock()
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            if path.is_file() and path.stat().st_mode & 0o077:
                path.chmod(0o600)  # somebody else made it; its log gets the same mode
            # The file that is opened, even if another takes its place meanwhile.
            (opened,) = self._identities(_FILES[:1])
            self._writer = self._connect(0)
            try:
                self._open_in_turn()
                self._reader = self._connect(_BUSY_SECONDS)
                _newest(self._reader)  # makes the log and its index, where they are missing
                self._opened = [opened, *self._identities(_FILES[1:])]
            except BaseException:
                self._writer.close()
                raise

    def _connect(self, patience_seconds: float) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=patience_seconds, isolation_level=None, check_same_thread=False
        )

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
        self._writer.execute(f"PRAGMA busy_timeout = {round(_BUSY_SECONDS * 1000)}")

    def _open(self) -> None:
        db = self._writer
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        with _transaction(db, "IMMEDIATE"):
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _statements(_SCHEMA):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_FORMAT}")
            elif found != _FORMAT:
                raise StoreError(
                    f"{self._path}: expected a store of format {_FORMAT}, got "
                    f"{f'format {found}' if found else 'a database of something else'}"
                )
        db.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"{self._path}: expected a readable and writable store, got {error}"
            ) from error

    def _identities(self, endings: Sequence[str]) -> list[tuple[int, int] | None]:
        return [_identity(f"{self._path}{ending}") for ending in endings]

    def _require_same_files(self) -> None:
        """Refuse to go on where the path no longer leads to what was opened.

        SQLite would go on with files that have no name any more: all of it is lost in the end.
        """
        found = self._identities(_FILES)
        for ending, expected, got in zip(_FILES, self._opened, found, strict=True):
            if got != expected:
                raise StoreError(
                    f"{self._path}{ending}: expected the file that the server opened, got "
                    f"{'another file of that name' if got else 'none: it was removed'}; "
                    "restart the servers (docs/admin.md: Restore)"
                )

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._reading, self._explained(), _transaction(self._reader, "DEFERRED"):
            yield self._reader

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._writing, self._explained(), _transaction(self._writer, "IMMEDIATE"):
            yield self._writer
            self._require_same_files()  # as late as can be: what is committed is acknowledged

    def revision(self) -> int:
        """See `Store`."""
        with self._read() as db:
            self._require_same_files()
            return _newest(db)

    def snapshot(self) -> Snapshot:
        """See `Store`."""
        with self._read() as db:
            self._require_same_files()
            rows = db.execute(
                "SELECT kind, name, revision, CAST(body AS BLOB) FROM documents"
            ).fetchall()
            newest = _newest(db)
        found = {}
        for kind, name, at, text in rows:
            ref = Ref(kind, name)
            found[ref] = Document(at, self._body(text, ref))
        return Snapshot(newest, found)

    def commit(self, base: int, changes: Sequence[Change], entry: Entry) -> int:
        """See `Store`."""
        with self._write() as db:
            if (newest := _newest(db)) != base:
                raise StaleError(f"expected revision {base}, got {newest}: somebody else wrote")
            revision = base + 1
            db.execute(
                f"INSERT INTO commits ({_COMMIT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                (revision, entry.at, entry.actor, entry.action, entry.reason, entry.request_id),
            )
            for change in changes:
                _write_change(db, revision, change)
        return revision

    def probe(self) -> None:
        """See `Store`."""
        with self._write() as db:
            db.execute(f"PRAGMA user_version = {_FORMAT}")  # as it is; written all the same

    def log(self, *, before: int | None, limit: int) -> list[Commit]:
        """See `Store`."""
        newest = 2**63 - 1 if before is None else before
        return self._commits("revision < ? ORDER BY revision DESC LIMIT ?", newest, limit)

    def since(self, revision: int) -> list[Commit]:
        """See `Store`."""
        return self._commits("revision > ? ORDER BY revision", revision)

    def _commits(self, which: str, *values: int) -> list[Commit]:
        with self._read() as db:
            rows = db.execute(
                f"SELECT {_COMMIT_COLUMNS} FROM commits WHERE {which}", values
            ).fetchall()
            revisions = [row[0] for row in rows]
            # Between commits that were asked for there is no gap.
            changes = db.execute(
                "SELECT revision, kind, name, CAST(before AS BLOB), CAST(after AS BLOB) "
                "FROM changes WHERE revision BETWEEN ? AND ? ORDER BY revision, kind, name",
                (min(revisions, default=0), max(revisions, default=-1)),
            ).fetchall()
        found: dict[int, list[Change]] = {}
        for revision, kind, name, before, after in changes:
            ref = Ref(kind, name)
            change = Change(
                ref,
                None if before is None else self._body(before, ref),
                None if after is None else self._body(after, ref),
            )
            found.setdefault(revision, []).append(change)
        return [Commit(row[0], Entry(*row[1:]), tuple(found.get(row[0], ()))) for row in rows]

    def _body(self, text: bytes, ref: Ref) -> Body:
        """Read a document's text.

        Raises:
            StoreError: it is no JSON.
        """
        try:
            found: Body = json.loads(text.decode())
            return found
        except UnicodeDecodeError:
            got = "bytes that are not UTF-8"
        except RecursionError:
            got = "more levels than can be read"
        except ValueError as error:
            got = str(error)
        raise StoreError(f"{self._path}: {ref.kind} {ref.name}: expected JSON, got {got}")

    def close(self) -> None:
        """See `Store`."""
        with self._writing, self._reading:
            self._writer.close()
            self._reader.close()
            self._remove_stray_log()

    def _remove_stray_log(self) -> None:
        """Remove the log of a file that has no name any more, which SQLite leaves.

        The next start would replay it over the file that has the name now, and corrupt it.
        """
        found = self._identities(_FILES)
        if found[0] != self._opened[0]:
            for ending, expected, got in zip(_FILES[1:], self._opened[1:], found[1:], strict=True):
                if got == expected:
                    Path(f"{self._path}{ending}").unlink(missing_ok=True)


def _identity(path: str) -> tuple[int, int] | None:
    """Tell a file from others that may have its name; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _transaction(db: sqlite3.Connection, mode: str) -> Iterator[None]:
    db.execute(f"BEGIN {mode}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _newest(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("SELECT COALESCE(MAX(revision), 0) FROM commits").fetchone()
    return int(revision)


def _write_change(db: sqlite3.Connection, revision: int, change: Change) -> None:
    before, after = _text(change.before), _text(change.after)
    db.execute(
        "INSERT INTO changes (revision, kind, name, before, after) VALUES (?, ?, ?, ?, ?)",
        (revision, *change.ref, before, after),
    )
    if after is None:
        db.execute("DELETE FROM documents WHERE kind = ? AND name = ?", change.ref)
    else:
        db.execute(
            "INSERT OR REPLACE INTO documents (kind, name, revision, body) VALUES (?, ?, ?, ?)",
            (*change.ref, revision, after),
        )


def _text(body: Body | None) -> str | None:
    return None if body is None else json.dumps(body, sort_keys=True, allow_nan=False)


def _statements(script: str) -> Iterator[str]:
    """Split a script; a trigger holds semicolons of its own."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""

"""The SQLite store keeps what it acknowledged, whoever else writes and whoever is killed."""

import json
import os
import random
import resource
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from admin_support import ENTRY, bodies, execute, replay

from spin_server.admin.store.interface import (
    Body,
    Change,
    Commit,
    Document,
    Entry,
    Ref,
    StaleError,
    StoreError,
)
from spin_server.admin.store.sqlite import SqliteStore

A, B = Ref("tenant", "a"), Ref("policy", "a")
WRITER = [sys.executable, str(Path(__file__).parent / "store_writer.py")]
NOBODY = 65534
KILLS, WRITES = 50, 1000


@contextmanager
def one_line_error(path: Path) -> Iterator[pytest.ExceptionInfo[StoreError]]:
    with pytest.raises(StoreError) as caught:
        yield caught
    assert str(caught.value).startswith(f"{path}: expected ")
    assert "\n" not in str(caught.value)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be nobody for a while, if we are root: root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that anybody can enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_store_that_is_new_is_empty(store: SqliteStore) -> None:
    assert store.revision() == 0
    assert store.snapshot().revision == 0
    assert store.snapshot().documents == {}
    assert store.log(before=None, limit=10) == store.since(0) == []


def test_commit_is_in_the_snapshot_and_in_the_log(store: SqliteStore) -> None:
    entry = Entry("2026-01-01T00:00:00Z", "key-1", "PATCH /v1/x", "for ü, '\n' and \0", "request-1")
    first = [Change(A, None, {"x": [1, None, "é"]}), Change(B, None, {})]
    assert store.commit(0, first, ENTRY) == 1
    second = [Change(A, {"x": [1, None, "é"]}, {"x": 0.1}), Change(B, {}, None)]
    assert store.commit(1, second, entry) == 2
    assert store.revision() == 2
    assert store.snapshot().revision == 2
    assert store.snapshot().documents == {A: Document(2, {"x": 0.1})}
    assert store.since(1) == store.log(before=None, limit=1)
    (commit,) = store.since(1)
    assert (commit.revision, commit.entry) == (2, entry)
    assert sorted(commit.changes, key=lambda change: change.ref) == second[::-1]


def test_document_keeps_the_revision_that_wrote_it_last(store: SqliteStore) -> None:
    store.commit(0, [Change(A, None, {})], ENTRY)
    store.commit(1, [Change(B, None, {})], ENTRY)
    assert {ref: d.revision for ref, d in store.snapshot().documents.items()} == {A: 1, B: 2}


def test_log_is_read_in_pages_newest_first(store: SqliteStore) -> None:
    for base in range(5):
        store.commit(base, [Change(A, None, {"n": base})], ENTRY)
    assert [c.revision for c in store.log(before=None, limit=2)] == [5, 4]
    assert [c.revision for c in store.log(before=4, limit=9)] == [3, 2, 1]
    assert store.log(before=1, limit=9) == []
    assert [c.revision for c in store.since(2)] == [3, 4, 5]
    assert store.since(5) == []


def test_everything_is_there_when_the_store_is_opened_again(
    open_store: Callable[[], SqliteStore],
) -> None:
    first = open_store()
    first.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    snapshot, log = first.snapshot(), first.since(0)
    first.close()
    again = open_store()
    assert (again.snapshot(), again.since(0)) == (snapshot, log)


@pytest.mark.parametrize("base", [0, 2, -1])
def test_commit_on_another_revision_writes_nothing(store: SqliteStore, base: int) -> None:
    store.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    before = store.snapshot(), store.since(0)
    with pytest.raises(StaleError, match=rf"expected revision {base}, got 1"):
        store.commit(base, [Change(B, None, {})], ENTRY)
    assert (store.snapshot(), store.since(0)) == before
    assert store.commit(1, [Change(B, None, {})], ENTRY) == 2


def test_commit_that_fails_half_way_writes_nothing(store: SqliteStore) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        store.commit(0, [Change(A, None, {}), Change(B, None, {"x": float("nan")})], ENTRY)
    assert (store.revision(), store.snapshot().documents, store.since(0)) == (0, {}, [])
    assert store.commit(0, [Change(A, None, {})], ENTRY) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE commits SET actor = 'somebody else'",
        "DELETE FROM commits",
        "UPDATE changes SET after = NULL",
        "DELETE FROM changes WHERE revision = 1",
    ],
)
def test_log_cannot_be_changed_by_sql(path: Path, store: SqliteStore, statement: str) -> None:
    store.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    before = store.since(0)
    with pytest.raises(sqlite3.IntegrityError, match="the log is append-only"):
        execute(path, statement)
    assert store.since(0) == before


def test_files_are_for_their_owner_alone(path: Path, store: SqliteStore) -> None:
    store.commit(0, [Change(A, None, {})], ENTRY)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["admin.db", "admin.db-shm", "admin.db-wal"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_folder_of_the_store_is_made(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "a" / "b" / "admin.db")) as store:
        assert store.revision() == 0


def test_file_that_is_no_database_is_refused_and_stays(path: Path) -> None:
    text = "policies:\n" * 1000
    path.write_text(text)
    with one_line_error(path) as caught:
        SqliteStore(path)
    assert "not a database" in str(caught.value)
    assert path.read_text() == text


@pytest.mark.parametrize("place", ["folder", "below_a_file"])
def test_path_that_cannot_be_a_file_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path if place == "folder" else tmp_path / "file" / "admin.db"
    with one_line_error(path):
        SqliteStore(path)


def test_database_of_something_else_is_refused_and_stays(path: Path) -> None:
    execute(path, "CREATE TABLE customers (name TEXT)")
    before = path.read_bytes()
    with one_line_error(path) as caught:
        SqliteStore(path)
    assert "a database of something else" in str(caught.value)
    assert path.read_bytes() == before


def test_store_of_a_newer_format_is_refused_and_stays(
    path: Path, open_store: Callable[[], SqliteStore]
) -> None:
    store = open_store()
    store.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    snapshot = store.snapshot()
    store.close()
    execute(path, "PRAGMA user_version = 2")
    with one_line_error(path) as caught:
        SqliteStore(path)
    assert "expected a store of format 1, got format 2" in str(caught.value)
    execute(path, "PRAGMA user_version = 1")
    assert open_store().snapshot() == snapshot


def test_folder_that_is_read_only_is_refused(public_folder: Path) -> None:
    public_folder.chmod(0o555)
    path = public_folder / "admin.db"
    with without_privileges(), one_line_error(path) as caught:
        SqliteStore(path)
    assert "Permission denied" in str(caught.value)


def test_store_in_a_folder_that_is_read_only_is_refused(public_folder: Path) -> None:
    path = public_folder / "admin.db"
    SqliteStore(path).close()
    os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
    public_folder.chmod(0o555)
    with without_privileges(), one_line_error(path):
        SqliteStore(path)


def test_store_that_was_closed_says_so(path: Path, store: SqliteStore) -> None:
    store.close()
    with one_line_error(path):
        store.revision()
    with one_line_error(path):
        store.commit(0, [], ENTRY)


@pytest.mark.parametrize("size", [100_000, 8_000_000])  # the second is more than SQLite holds back
def test_full_disk_is_told_and_survived(path: Path, store: SqliteStore, size: int) -> None:
    store.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    before = store.snapshot(), store.since(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = path.with_name("admin.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
    try:
        with one_line_error(path) as caught:
            store.commit(1, [Change(B, None, {"x": "x" * size})], ENTRY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "disk" in str(caught.value)
    assert (store.snapshot(), store.since(0)) == before
    assert store.commit(1, [Change(B, None, {})], ENTRY) == 2


def test_store_opens_when_many_make_it_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(6)

    def open_and_count(path: Path) -> int:
        together.wait()
        with closing(SqliteStore(path)) as store:
            return store.revision()

    with ThreadPoolExecutor(6) as pool:
        for n in range(20):
            assert list(pool.map(open_and_count, [tmp_path / f"{n}.db"] * 6)) == [0] * 6


def test_store_opens_when_another_is_about_to_make_it(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        later = threading.Timer(0.2, other.execute, ["ROLLBACK"])
        later.start()
        try:
            with closing(SqliteStore(path)) as store:
                assert store.revision() == 0
        finally:
            later.join()


def test_threads_on_two_stores_lose_no_update(open_store: Callable[[], SqliteStore]) -> None:
    stores = [open_store(), open_store()]

    def count(store: SqliteStore) -> None:
        times = 100
        while times:
            snapshot = store.snapshot()
            before = snapshot.documents[A].body if A in snapshot.documents else None
            after = {"count": 1 + (before["count"] if before else 0)}
            try:
                store.commit(snapshot.revision, [Change(A, before, after)], ENTRY)
            except StaleError:
                continue
            times -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, stores * 2))
    assert [store.snapshot().documents for store in stores] == [
        {A: Document(400, {"count": 400})}
    ] * 2
    replayed: dict[Ref, Body] = {}
    replay(stores[0].since(0), replayed)
    assert replayed == {A: {"count": 400}}


def test_processes_lose_no_update(path: Path, open_store: Callable[[], SqliteStore]) -> None:
    children = [
        subprocess.Popen([*WRITER, "count", str(path), "100"], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    acknowledged = [child.communicate(timeout=120)[0].split() for child in children]
    assert [child.returncode for child in children] == [0] * 3
    assert sorted(int(line) for lines in acknowledged for line in lines) == list(range(1, 301))
    snapshot = open_store().snapshot()
    assert snapshot.revision == 300
    assert bodies(snapshot) == {Ref("tenant", "counter"): {"count": 300}}


def acknowledged_until_killed(path: Path, seed: int) -> list[tuple[int, dict[Ref, Body | None]]]:
    """Kill a writer at a random moment; get what it said was written."""
    draw = random.Random(seed)
    with subprocess.Popen(
        [*WRITER, "random", str(path), str(seed)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(draw.randint(WRITES // KILLS, 30))]
        time.sleep(draw.uniform(0, 0.01))  # a write takes less: a moment anywhere in one
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
    assert child.returncode == -9
    # Only a whole line was said.
    said = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(at, {Ref(k, n): body for k, n, body in written}) for at, written in said]


def test_every_acknowledged_write_survives_when_killed(
    path: Path, open_store: Callable[[], SqliteStore]
) -> None:
    replayed: dict[Ref, Body] = {}
    newest, total = 0, 0
    for seed in range(KILLS):
        acknowledged = acknowledged_until_killed(path, seed)
        store = open_store()
        commits, snapshot = store.since(newest), store.snapshot()
        store.close()
        found = {commit.revision: written(commit) for commit in commits}
        assert {at: found[at] for at, _ in acknowledged} == dict(acknowledged)
        # One more may have been written, and its acknowledgement lost.
        assert list(found) == list(range(newest + 1, snapshot.revision + 1))
        assert snapshot.revision - acknowledged[-1][0] in (0, 1)
        replay(commits, replayed)
        assert replayed == bodies(snapshot)
        newest, total = snapshot.revision, total + len(acknowledged)
    assert total >= WRITES
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def written(commit: Commit) -> dict[Ref, Body | None]:
    return {change.ref: change.after for change in commit.changes}

"""The SQLite store keeps what it acknowledged, whoever else writes and whoever is killed."""

import os
import resource
import sqlite3
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from admin_support import ENTRY, bodies, execute, replay
from store_writer import WRITER, acknowledged_until_killed, written

from spin_server.admin.store.interface import (
    Body,
    Change,
    Document,
    Ref,
    StaleError,
    StoreError,
)
from spin_server.admin.store.sqlite import SqliteStore

A, B = Ref("tenant", "a"), Ref("policy", "a")
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


def test_every_acknowledged_write_survives_when_killed(
    path: Path, open_store: Callable[[], SqliteStore]
) -> None:
    replayed: dict[Ref, Body] = {}
    newest, total = 0, 0
    for seed in range(KILLS):
        acknowledged = acknowledged_until_killed(str(path), seed)
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

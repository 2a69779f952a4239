"""A store that is replaced under a running server, or cannot be written: told, nothing lost."""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from admin_app import AdminApp, Client, audit, eventually, make_tenant
from admin_support import add_tenant, patch
from kube_api import KubeApi

from spin_server.admin.administration import Administration
from spin_server.admin.errors import UnavailableError
from spin_server.admin.http import context
from spin_server.admin.store import sqlite
from spin_server.admin.store.interface import StoreError
from spin_server.policy.policy import Policy

OpenAdmin = Callable[[], Administration]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the store's write lock, as another process would."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened do not wait for a lock."""
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.01)


def metric(ask: Client, of: str) -> float:
    (line,) = [
        line
        for line in ask("GET", "/metrics").text.splitlines()
        if line.startswith(f'spin_admin_trouble{{of="{of}"}}')
    ]
    return float(line.split()[-1])


# Replaced


def copy_over(path: Path) -> None:
    copy = backup(path)
    copy.replace(path)


def remove(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink()


def remove_log(path: Path) -> None:
    path.with_name(path.name + "-wal").unlink()


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (copy_over, "another file of that name"),
        (remove, "none: it was removed"),
        (remove_log, "none: it was removed"),
        (move_away, "none: it was removed"),
    ],
)
def test_store_whose_file_is_another_is_told_and_not_written(
    app: AdminApp, ask: Client, tmp_path: Path, spoil: Callable[[Path], None], got: str
) -> None:
    make_tenant(ask, target_sparsity=0.5)
    spoil(tmp_path / "admin.db")
    answer = ask("PATCH", "/v1/policies/acme", {"target_sparsity": 0.7}, match="*")
    assert answer.status_code == 503
    expected = f": expected the file that the server opened, got {got}; restart the servers"
    assert expected in answer.json()["detail"]
    assert got in ask("GET", "/v1/status").json()["trouble"]["store"]
    assert metric(ask, "store") == 1
    assert ask("GET", "/v1/policies/acme").json()["fields"]["target_sparsity"]["value"] == 0.5
    assert float(app.engine.policy("acme").sparsity) == 0.5
    assert ask("GET", "/v1/revisions/1/diff").status_code == 503


def test_file_that_is_replaced_during_a_commit_is_not_acknowledged(
    admin: Administration, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sqlite._write_change

    def replaced_meanwhile(*arguments: Any) -> None:
        write(*arguments)
        path.unlink()

    monkeypatch.setattr(sqlite, "_write_change", replaced_meanwhile)
    with pytest.raises(UnavailableError, match="got none: it was removed"):
        add_tenant(admin, "a")
    assert admin.state.revision == 0


def backup(path: Path) -> Path:
    copy = path.with_name("copy.db")
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(copy)) as other:
        db.backup(other)
    return copy


def test_copy_in_place_of_the_file_is_whole_after_a_restart(
    admin: Administration, open_admin: OpenAdmin, path: Path
) -> None:
    add_tenant(admin, "a")
    copy = backup(path)
    for number in range(50):  # a log that is longer than the copy
        add_tenant(admin, f"t{number}")
    copy.replace(path)
    admin.store.close()
    assert open_admin().state.tenants == ["a"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_backup_is_restored_as_documented(
    admin: Administration, open_admin: OpenAdmin, path: Path
) -> None:
    add_tenant(admin, "a")
    copy = backup(path)
    patch(admin, "a", target_sparsity=0.7)
    admin.store.close()
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    shutil.copy(copy, path)
    assert open_admin().state.stored_policy("a").fields == {}


def test_store_that_was_put_back_is_not_followed_when_it_goes_on(
    admin: Administration, open_admin: OpenAdmin, path: Path
) -> None:
    add_tenant(admin, "a")
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(":memory:")) as backup:
        db.backup(backup)
        newest = patch(admin, "a", target_sparsity=0.6).state
        backup.backup(db)
    assert admin.refresh() is newest
    other = open_admin()
    for name in "bcd":  # past the revision that was in force here
        add_tenant(other, name)
    assert admin.refresh() is newest
    assert admin.trouble is not None
    assert "the store was put back: expected revision 2 or later, got 1" in admin.trouble
    with pytest.raises(UnavailableError, match="the store was put back"):
        admin.bodies_at(1)


# Read, and not written


@pytest.mark.usefixtures("impatient")
def test_store_that_cannot_be_written_is_told_until_it_can_be(tmp_path: Path) -> None:
    app = AdminApp(tmp_path)
    with app.client() as ask:
        with locked(tmp_path / "admin.db"):
            answer = ask("PATCH", "/v1/policies/default", {"probe_period": 8}, match="*")
            assert answer.status_code == 503
            assert "nothing was written" in answer.json()["detail"]
            assert "locked" in ask("GET", "/v1/status").json()["trouble"]["store"]
            assert metric(ask, "store") == 1
            assert ask("GET", "/v1/revisions/0/diff").status_code == 200
        # Nobody writes; it is found out all the same.
        eventually(lambda: ask("GET", "/v1/status").json()["trouble"]["store"] is None)
        assert metric(ask, "store") == 0
        assert len(audit(ask)) == 1  # the first key: nothing was written meanwhile


@pytest.mark.usefixtures("impatient")
def test_time_limit_ends_where_the_store_cannot_be_written(tmp_path: Path) -> None:
    app = AdminApp(tmp_path)
    with app.client() as ask:
        make_tenant(ask, target_sparsity=0.4)
        url = "/v1/policies/acme?ttl_seconds=60"
        ask("PATCH", url, {"target_sparsity": 0.6}, match="*")
        with locked(tmp_path / "admin.db"):
            app.offset += app.offset.resolution * 61_000_000
            eventually(lambda: float(app.engine.policy("acme").sparsity) == 0.4)
            eventually(lambda: "locked" in (app.administration.trouble or ""))
            found = ask("GET", "/v1/policies/acme").json()
            assert found["fields"]["target_sparsity"] == {"value": 0.4, "source": "tenant"}
            assert found["expires_at"] is None
            assert audit(ask)[0]["action"] == "PATCH /v1/policies/acme"
        eventually(lambda: audit(ask)[0]["action"] == "end of a time limit")
        eventually(lambda: app.administration.trouble is None)
        assert float(app.engine.policy("acme").sparsity) == 0.4


def test_kubernetes_that_takes_no_writes_is_told_until_it_does(
    api: KubeApi, open_kubernetes: Callable[[], Any]
) -> None:
    admin = Administration(open_kubernetes(), Policy())
    add_tenant(admin, "a")

    api.forbidden.add(("update", "configmaps"))
    with pytest.raises(UnavailableError, match="cannot update"):
        add_tenant(admin, "b")
    admin.expire()
    assert admin.refresh().tenants == ["a"]
    assert "cannot update" in (admin.trouble or "")
    api.forbidden.clear()
    admin.expire()
    assert admin.trouble is None
    assert add_tenant(admin, "b").state.revision == 2


def test_reads_do_not_wait_for_writes(
    app: AdminApp, ask: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, come = context.Caller.author, []

    def counted(*arguments: Any) -> Any:
        come.append(None)
        return author(*arguments)

    monkeypatch.setattr(context.Caller, "author", counted)
    writers = 50  # more than there are threads for requests
    with ThreadPoolExecutor(writers) as pool:
        with locked(tmp_path / "admin.db"):
            writes = [pool.submit(make_tenant, ask, f"t{n}") for n in range(10)]
            writes += [
                pool.submit(ask, "PATCH", "/v1/policies/default", {"probe_period": n}, match="*")
                for n in range(writers - 10)
            ]
            eventually(lambda: len(come) == writers)
            for path in ("/v1/revisions", "/v1/audit", "/v1/revisions/0/diff", "/v1/status"):
                assert ask("GET", path).status_code == 200
            dry_run = ask("POST", "/v1/tenants?dryRun=All", {"name": "tried"})
            assert dry_run.status_code == 200
            assert not any(write.done() for write in writes)
        for write in writes:
            write.result()


# Bodies that cannot be read


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (b'{"fields": "\xff"}', "bytes that are not UTF-8"),
        (b"\xff\xfe{\0}\0", "bytes that are not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "more levels than can be read"),
        (b"{", "Expecting property name"),
        (b"9" * 5000, "Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("stored_as", ["TEXT", "BLOB"])
def test_body_that_cannot_be_read_names_its_document(
    admin: Administration, open_admin: OpenAdmin, path: Path, text: bytes, got: str, stored_as: str
) -> None:
    add_tenant(admin, "a")
    good = admin.state
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("INSERT INTO commits VALUES (2, '', '', '', '', '')")
        value = f"CAST(? AS {stored_as})"
        db.execute(f"INSERT INTO documents VALUES ('policy', 'a', 2, {value})", (text,))
        db.execute(f"INSERT INTO changes VALUES (2, 'policy', 'a', NULL, {value})", (text,))
    assert admin.refresh() is good
    assert f": policy a: expected JSON, got {got}" in (admin.trouble or "")
    with pytest.raises(UnavailableError, match="the store does not answer"):
        patch(admin, "a", target_sparsity=0.5)
    for read in (lambda: admin.log(before=None, limit=9), lambda: admin.since(0)):
        with pytest.raises(UnavailableError, match="policy a: expected JSON"):
            read()
    with pytest.raises(StoreError, match="policy a: expected JSON"):
        open_admin()


def test_names_that_cannot_be_read_are_told(
    admin: Administration, open_admin: OpenAdmin, path: Path
) -> None:
    add_tenant(admin, "a")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("INSERT INTO commits VALUES (2, CAST(x'ff' AS TEXT), '', '', '', '')")
        db.execute("INSERT INTO documents VALUES ('policy', CAST(x'ff' AS TEXT), 2, '{}')")
    admin.refresh()
    assert admin.trouble is not None
    with pytest.raises(UnavailableError):
        admin.log(before=None, limit=9)
    with pytest.raises(StoreError):
        open_admin()


def test_kubernetes_document_that_cannot_be_read_is_named(
    api: KubeApi, open_kubernetes: Callable[[], Any]
) -> None:
    add_tenant(Administration(open_kubernetes(), Policy()), "a")
    for text in ("[" * 100_000, "{"):
        api.edit("configmaps", lambda data, text=text: data.update({"tenant.a": text}))
        with pytest.raises(StoreError, match="expected tenant a in the ConfigMap as this release"):
            open_kubernetes()


def test_root_of_a_moved_folder_is_told(admin: Administration, path: Path) -> None:
    os.rename(path.parent, path.parent.with_name("moved"))
    admin.refresh()
    assert "none: it was removed" in (admin.trouble or "")

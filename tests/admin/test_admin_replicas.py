"""Replicas on one store agree, lose nothing, and outlast a store that cannot be read."""

import json
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from admin_support import AUTHOR, Clock, add_key, add_tenant, do, execute, patch, sent

from spin_server.admin.access import authenticate
from spin_server.admin.administration import Administration
from spin_server.admin.errors import ConflictError, UnavailableError
from spin_server.admin.first_key import KeyFile
from spin_server.admin.operations import (
    create_tenant,
    edit,
    patch_policy,
    revoke_key,
)
from spin_server.admin.state import State
from spin_server.admin.store.interface import Change, Commit, Ref, StaleError, StoreError
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.policy.policy import Policy

OpenAdmin = Callable[[], Administration]
COUNTER = Ref("tenant", "a")
KEY = {
    "sha256": "0" * 64,
    "prefix": "spin_abcdef",
    "tenant": None,
    "scopes": ["read"],
    "description": "",
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": None,
}


def count(state: State) -> list[Change]:
    """An operation that adds to a number, so that a lost one shows."""
    body = state.body(COUNTER)
    assert body is not None
    return edit(state, COUNTER, {**body, "description": str(int(body["description"]) + 1)})


def test_replicas_converge_when_they_refresh(
    admin: Administration, open_admin: OpenAdmin, clock: Clock
) -> None:
    other = open_admin()
    add_tenant(admin, "a")
    patch(other, "a", 60, target_sparsity=0.5)
    patch(admin, "default", probe_period=3)
    assert other.state.revision == 2
    assert other.refresh() == admin.state
    clock.advance(60)
    for replica in (admin, other):
        replica.expire()
    assert other.refresh() == admin.refresh()
    assert (admin.store.revision(), admin.state.stored_policy("a").fields) == (4, {})


def test_write_sees_what_another_replica_wrote(
    admin: Administration, open_admin: OpenAdmin
) -> None:
    other = open_admin()
    add_tenant(admin, "a")
    with pytest.raises(ConflictError, match="tenant 'a' exists"):
        add_tenant(other, "a")
    assert patch(other, "a", target_sparsity=0.5).state.revision == 2


def test_threads_on_two_replicas_lose_no_update(
    admin: Administration, open_admin: OpenAdmin
) -> None:
    do(admin, create_tenant("a", "0", now=admin.clock()))
    replicas = [admin, open_admin()]

    def count_often(replica: Administration) -> None:
        for _ in range(50):
            do(replica, count)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count_often, replicas * 2))
    assert replicas[0].refresh() == replicas[1].refresh()
    tenant = admin.state.tenant("a")
    assert tenant is not None
    assert (tenant.description, admin.state.revision) == ("200", 201)


def test_threads_that_patch_different_fields_keep_both(
    admin: Administration, open_admin: OpenAdmin
) -> None:
    replicas = [admin, open_admin()]

    def set_often(replica: Administration, field: str) -> None:
        for n in range(1, 31):
            value = n if field == "probe_period" else f"0.{n:02}"
            operation = patch_policy("default", sent(**{field: value}), "*", now=replica.clock())
            replica.perform(operation, AUTHOR)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(set_often, replicas, ["probe_period", "ema_decay"]))
    assert admin.refresh().stored_policy("default").fields == {
        "probe_period": 30,
        "ema_decay": "0.3",
    }
    assert admin.store.revision() == 60


def test_operation_is_tried_again_when_another_replica_was_faster(
    admin: Administration, open_admin: OpenAdmin
) -> None:
    other, seen = open_admin(), []

    def overtaken(state: State) -> list[Change]:
        seen.append(state.revision)
        if len(seen) < 3:
            add_tenant(other, f"b{len(seen)}")
        return create_tenant("a", "", now=admin.clock())(state)

    assert do(admin, overtaken).state.revision == 3
    assert seen == [0, 1, 2]
    assert admin.state.tenants == ["a", "b1", "b2"]


def test_operation_that_is_overtaken_for_ever_gives_up(
    admin: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> int:
        raise StaleError("somebody else wrote")

    monkeypatch.setattr(admin.store, "commit", stale)
    with pytest.raises(ConflictError, match="nothing was written"):
        add_tenant(admin, "a")
    assert admin.state.revision == 0


def test_old_revision_is_worked_out_right_while_another_replica_writes(
    admin: Administration, open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, read = open_admin(), admin.store.since
    add_tenant(admin, "a")
    patch(admin, "a", probe_period=1)

    def overtaken(revision: int) -> list[Commit]:
        patch(other, "a", probe_period=2)
        return read(revision)

    monkeypatch.setattr(admin.store, "since", overtaken)
    assert admin.bodies_at(2) == (2, {ref: d.body for ref, d in admin.state.documents.items()})
    assert admin.state.stored_policy("a").fields == {"probe_period": 1}


def test_commit_is_told_to_the_log_in_one_line(
    admin: Administration, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="spin_server")
    author = replace(AUTHOR, reason="for\nü")
    admin.perform(create_tenant("a", "not to be told", now=admin.clock()), author)
    admin.perform(patch_policy("a", sent(probe_period=2), "*", now=admin.clock()), author)
    told = [line for line in caplog.messages if line.startswith("admin audit: ")]
    assert [json.loads(line.removeprefix("admin audit: ")) for line in told] == [
        {
            "revision": revision,
            "at": "2026-01-01T00:00:00Z",
            "actor": "key-test",
            "action": "PATCH /v1/policies/default",
            "reason": "for\nü",
            "request_id": "request-1",
            "changed": changed,
        }
        for revision, changed in ((1, ["tenant/a"]), (2, ["policy/a"]))
    ]
    assert not any("\n" in line for line in told)


# A store that is not well


@pytest.mark.parametrize(
    ("ref", "body"),
    [
        (Ref("policy", "default"), '{"fields": {"target_sparsity": "7"}}'),
        (Ref("policy", "default"), '{"fields": {"target_sparsity": NaN}}'),
        (Ref("policy", "default"), '{"fields": {"target_sparsity": null}}'),
        (Ref("policy", "default"), '{"fields": {"canary": 1}}'),
        (Ref("policy", "default"), '{"fields": {}, "surprise": 1}'),
        (Ref("policy", "default"), "[]"),
        (Ref("policy", "default"), '{"fields": {'),
        (Ref("policy", "default"), '{"fields": {}, "expires": {"at": "soon", "restore": {}}}'),
        (
            Ref("policy", "default"),
            '{"fields": {}, "expires": {"at": "2026-01-01T00:00:00", "restore": {}}}',
        ),
        (
            Ref("policy", "default"),
            '{"fields": {}, "expires": {"at": "2026-01-01T00:00:00Z", "restore": {"budget": 1}}}',
        ),
        (Ref("tenant", "b"), '{"description": "b"}'),
        (Ref("key", "key-b"), json.dumps({**KEY, "sha256": "x"})),
        (Ref("key", "key-b"), json.dumps({**KEY, "scopes": ["root"]})),
        (Ref("key", "key-b"), json.dumps({**KEY, "expires_at": "soon"})),
        (Ref("key", "key-b"), json.dumps({**KEY, "expires_at": "2026-01-01T00:00:00"})),
        (Ref("canary", "b"), "{}"),  # type: ignore[arg-type]
    ],
)
def test_document_that_is_not_valid_keeps_the_last_good_state(
    admin: Administration, open_admin: OpenAdmin, path: Path, ref: Ref, body: str
) -> None:
    add_tenant(admin, "a")
    good = admin.state
    execute(path, "INSERT INTO commits VALUES (2, '', '', '', '', '')")
    execute(path, "INSERT INTO documents VALUES (?, ?, 2, ?)", values=(*ref, body))
    for _ in range(2):
        assert admin.refresh() is good
        assert admin.trouble is not None
        assert "\n" not in admin.trouble
        with pytest.raises(UnavailableError, match="the store does not answer") as caught:
            patch(admin, "a", target_sparsity=0.5)
        assert caught.value.status == 503
        admin.expire()
    with pytest.raises(StoreError):
        open_admin()
    execute(path, "DELETE FROM documents WHERE kind = ? AND name = ?", values=tuple(ref))
    assert admin.refresh().revision == 2
    assert admin.trouble is None
    assert patch(admin, "a", target_sparsity=0.5).state.revision == 3
    assert open_admin().state == admin.state


def test_store_that_went_away_keeps_the_last_good_state(
    admin: Administration, store: SqliteStore
) -> None:
    add_tenant(admin, "a")
    good = admin.state
    admin.store.close()
    assert admin.refresh() is good
    assert admin.trouble is not None
    for ask in (
        lambda: add_tenant(admin, "b"),
        lambda: admin.since(0),
        lambda: admin.log(before=None, limit=1),
        lambda: admin.bodies_at(0),
    ):
        with pytest.raises(UnavailableError):
            ask()
    admin.store = store
    assert add_tenant(admin, "b").state.revision == 2
    assert admin.trouble is None


def test_store_that_is_put_back_is_not_followed(
    admin: Administration, open_admin: OpenAdmin, path: Path
) -> None:
    add_tenant(admin, "a")
    patch(admin, "a", target_sparsity=0.5)
    good = admin.state
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(":memory:")) as backup:
        db.backup(backup)
        patch(admin, "a", target_sparsity=0.6)
        newest = admin.state
        backup.backup(db)
    assert admin.refresh() is newest
    assert admin.trouble == (
        "the store was put back: expected revision 3 or later, got 2; restart the servers to go on "
        "from there"
    )
    with pytest.raises(UnavailableError):
        patch(admin, "a", target_sparsity=0.7)
    assert open_admin().state == good


def test_write_that_fails_is_told_and_leaves_the_state(
    admin: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise StoreError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(admin.store, "commit", fail)
        with pytest.raises(UnavailableError, match="nothing was written: no space left"):
            add_tenant(admin, "a")
    assert admin.state.tenants == []
    assert add_tenant(admin, "a").state.tenants == ["a"]


# The first key


def enters(admin: Administration, key_file: Path) -> bool:
    principal = authenticate(
        admin.refresh(), f"Bearer {key_file.read_text().strip()}", admin.clock()
    )
    return principal.tenant is None and len(principal.scopes) == 4


def test_first_key_is_made_once_for_its_owners_eyes(
    admin: Administration, open_admin: OpenAdmin, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    assert admin.bootstrap(KeyFile(key_file))
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert enters(admin, key_file)
    for replica in (admin, open_admin()):
        assert not replica.bootstrap(KeyFile(key_file))
    assert len(admin.refresh().keys) == 1
    assert admin.since(0)[0].entry.actor == "[server]"


def test_file_that_is_in_the_way_of_the_first_key_is_replaced(
    admin: Administration, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("old, and for everybody to read")
    key_file.chmod(0o644)
    assert admin.bootstrap(KeyFile(key_file))
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert enters(admin, key_file)


@pytest.mark.parametrize("left", ["tenants", "scopes", "expired", "revoked"])
def test_first_key_is_made_again_when_nobody_can_make_keys(
    admin: Administration, clock: Clock, tmp_path: Path, left: str
) -> None:
    add_tenant(admin, "a")
    if left == "tenants":
        add_key(admin, "a")
    elif left == "scopes":
        add_key(admin, scopes=["read", "write", "audit"])
    else:
        key = add_key(admin, lifetime=60)
        assert not admin.bootstrap(KeyFile(tmp_path / "key"))
        if left == "expired":
            clock.advance(60)
        else:
            do(admin, revoke_key(key.key_id, "*"))
    assert admin.bootstrap(KeyFile(tmp_path / "key"))
    assert enters(admin, tmp_path / "key")
    assert not admin.bootstrap(KeyFile(tmp_path / "key"))


@pytest.mark.parametrize("place", ["folder", "nowhere/key"])
def test_first_key_that_cannot_be_written_is_not_made(
    admin: Administration, tmp_path: Path, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="expected a writable file"):
        admin.bootstrap(KeyFile(tmp_path / place))
    assert admin.refresh().keys == []


def test_first_key_is_one_when_two_replicas_start_at_once(
    open_store: Callable[[], SqliteStore], open_admin: OpenAdmin, tmp_path: Path
) -> None:
    key_file, started = tmp_path / "key", []

    def now() -> datetime:
        if not started:
            started.append(open_admin())
            started[0].bootstrap(KeyFile(key_file))
        return Clock().now

    admin = Administration(open_store(), Policy(), clock=now)
    admin.bootstrap(KeyFile(key_file))
    assert enters(admin, key_file)
    assert len(admin.refresh().keys) == 1

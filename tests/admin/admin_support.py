"""A clock that stands still, and short ways to say what the tests of the admin layer say often."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from spin_server.admin.access import authenticate
from spin_server.admin.administration import Administration, Author, Outcome
from spin_server.admin.documents import Fields, PolicyPatch, Scope
from spin_server.admin.errors import (
    UnauthorizedError,
)
from spin_server.admin.operations import (
    NewKey,
    Operation,
    create_key,
    create_tenant,
    patch_policy,
    restore,
    set_body,
    without_ended,
)
from spin_server.admin.store.interface import Body, Change, Commit, Entry, Ref, Snapshot

AUTHOR = Author("key-test", "PATCH /v1/policies/default", "a test", "request-1")
ENTRY = Entry("2026-01-01T00:00:00Z", "key-test", "a test")
EVERY_SCOPE: tuple[Scope, ...] = ("read", "write", "keys", "audit")


class Clock:
    """Tells the time that it is set to."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def do(admin: Administration, operation: Operation) -> Outcome:
    return admin.perform(operation, AUTHOR)


def sent(**fields: Any) -> Fields:
    """What a caller sends, as it is stored."""
    return PolicyPatch.model_validate(fields).changes()


def patch(
    admin: Administration,
    name: str,
    ttl_seconds: int | None = None,
    canary_percent: int | None = None,
    **fields: Any,
) -> Outcome:
    operation = patch_policy(
        name,
        sent(**fields),
        "*",
        now=admin.clock(),
        ttl_seconds=ttl_seconds,
        canary_percent=canary_percent,
    )
    return do(admin, operation)


def add_tenant(admin: Administration, name: str) -> Outcome:
    return do(admin, create_tenant(name, "", now=admin.clock()))


def add_key(
    admin: Administration,
    tenant: str | None = None,
    scopes: Iterable[Scope] = EVERY_SCOPE,
    lifetime: float | None = None,
    end: datetime | None = None,
) -> NewKey:
    key, now = NewKey.draw(), admin.clock()
    if lifetime is not None:
        end = now + timedelta(seconds=lifetime)
    document = key.document(
        tenant=tenant, scopes=scopes, description="a test's", now=now, expires_at=end
    )
    do(admin, create_key(key, document, now=now))
    return key


def revert(admin: Administration, revision: int) -> Outcome:
    base, then = admin.bodies_at(revision)
    wanted, _ = without_ended(then, admin.clock())
    return do(admin, restore(wanted, base))


def bodies(snapshot: Snapshot) -> dict[Ref, Body]:
    return {ref: document.body for ref, document in snapshot.documents.items()}


def replay(commits: Iterable[Commit], documents: dict[Ref, Body]) -> None:
    """Do again to `documents` what a log says was done."""
    for commit in commits:
        for change in commit.changes:
            assert documents.get(change.ref) == change.before
            documents.pop(change.ref, None)
            if change.after is not None:
                documents[change.ref] = change.after


def execute(path: Path, *statements: str, values: tuple[Any, ...] = ()) -> None:
    """Go behind the store's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement, values)


DEFAULT_POLICY = Ref("policy", "default")
# A commit that takes both objects of the store on Kubernetes.
TENANT, KEY = Ref("tenant", "a"), Ref("key", "key-1")
BOTH = [Change(TENANT, None, {"n": 1}), Change(KEY, None, {"n": 1})]


LAUNCH = {
    "target_sparsity": "0.3",
    "exploration_share": "0.05",
    "exploration_policy": "random",
    "budget": "uniform",
    "probe_period": 0,
    "ema_decay": "0.5",
}


def documents(admin: Administration) -> dict[Ref, Body]:
    """What is stored and sets something, seen to be what is in memory."""
    found = bodies(admin.store.snapshot())
    assert found == {ref: document.body for ref, document in admin.state.documents.items()}
    return {ref: body for ref, body in found.items() if set_body(body) is not None}


def effective(admin: Administration, name: str, field: str) -> tuple[Any, str]:
    found = admin.state.effective(name)
    return found.fields[field], found.sources[field]


def enters(admin: Administration, key: NewKey) -> bool:
    try:
        authenticate(admin.state, f"Bearer {key.secret}", admin.clock())
    except UnauthorizedError:
        return False
    return True


# Policies

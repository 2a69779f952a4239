"""Keys, and the way back: what ends, and what a revert leaves alone."""

from datetime import UTC, datetime

import pytest
from admin_support import (
    DEFAULT_POLICY,
    Clock,
    add_key,
    add_tenant,
    do,
    documents,
    enters,
    patch,
    revert,
)

from spin_server.admin.administration import Administration
from spin_server.admin.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PreconditionError,
)
from spin_server.admin.operations import (
    NewKey,
    delete_tenant,
    restore,
    revoke_key,
    rotate_key,
)
from spin_server.admin.store.interface import Ref
from spin_server.errors import SpinError


def test_key_that_cannot_be_made_is_refused(admin: Administration) -> None:
    with pytest.raises(NotFoundError, match="tenant 'a'"):
        add_key(admin, "a")
    for lifetime in (0, -1):
        with pytest.raises(InvalidError, match="expires_at: expected a time to come"):
            add_key(admin, lifetime=lifetime)
    assert documents(admin) == {}


@pytest.mark.parametrize("end", ["0900-01-01T00:00:00Z", "0001-01-01T00:00:00+10:00"])
def test_key_that_ended_ages_ago_is_refused(admin: Administration, end: str) -> None:
    with pytest.raises(SpinError):
        add_key(admin, end=datetime.fromisoformat(end))


def test_key_is_refused_once_it_is_revoked(admin: Administration) -> None:
    key = add_key(admin)
    assert enters(admin, key)
    do(admin, revoke_key(key.key_id, "*"))
    assert not enters(admin, key)
    for operation in (
        revoke_key(key.key_id, "*"),
        rotate_key(key.key_id, NewKey.draw(), 60, "*", now=admin.clock()),
    ):
        with pytest.raises(NotFoundError, match=key.key_id):
            do(admin, operation)


def test_rotation_keeps_rights_and_ends_the_old_key_after_the_overlap(
    admin: Administration, clock: Clock
) -> None:
    add_tenant(admin, "a")
    old, new = add_key(admin, "a", ["read", "keys"]), NewKey.draw()
    do(admin, rotate_key(old.key_id, new, 60, "*", now=clock()))
    assert admin.store.revision() == 3
    before, after = admin.state.key(old.key_id), admin.state.key(new.key_id)
    assert before is not None
    assert after is not None
    assert (after.tenant, after.scopes) == ("a", ["keys", "read"])
    assert (after.description, after.expires_at) == (before.description, None)
    clock.advance(59)
    assert (enters(admin, old), enters(admin, new)) == (True, True)
    clock.advance(1)
    assert (enters(admin, old), enters(admin, new)) == (False, True)


def test_rotation_without_overlap_ends_the_old_key_at_once(
    admin: Administration, clock: Clock
) -> None:
    old, new = add_key(admin), NewKey.draw()
    do(admin, rotate_key(old.key_id, new, 0, "*", now=clock()))
    assert (enters(admin, old), enters(admin, new)) == (False, True)


def test_rotation_never_makes_the_old_key_live_longer(admin: Administration, clock: Clock) -> None:
    old, new = add_key(admin, lifetime=100), NewKey.draw()
    clock.advance(80)
    do(admin, rotate_key(old.key_id, new, 3600, "*", now=clock()))
    clock.advance(20)
    assert not enters(admin, old)
    clock.advance(79)
    assert enters(admin, new)
    clock.advance(1)
    assert not enters(admin, new)


def test_rotation_of_an_expired_key_is_refused(admin: Administration, clock: Clock) -> None:
    key = add_key(admin, lifetime=60)
    clock.advance(60)
    with pytest.raises(ConflictError, match="has expired; make a new one"):
        do(admin, rotate_key(key.key_id, NewKey.draw(), 60, "*", now=clock()))
    assert admin.store.revision() == 1


def test_rotation_of_a_key_for_ages_is_done(admin: Administration, clock: Clock) -> None:
    # The latest end that the API takes is in 9998, and no date is later than 9999.
    old, new = add_key(admin, end=datetime(9998, 12, 31, tzinfo=UTC)), NewKey.draw()
    clock.advance(2 * 366 * 86400)
    do(admin, rotate_key(old.key_id, new, 60, "*", now=clock()))
    assert enters(admin, new)


# Reverts


def test_revert_brings_policies_and_tenants_back(admin: Administration) -> None:
    add_tenant(admin, "a")
    patch(admin, "a", target_sparsity=0.5)
    patch(admin, "default", probe_period=3)
    wanted = documents(admin)
    patch(admin, "a", target_sparsity=None, ema_decay=0.9)
    do(admin, delete_tenant("a", "*"))
    add_tenant(admin, "b")
    patch(admin, "default", probe_period=None)
    assert revert(admin, 3).state.revision == 8
    assert documents(admin) == wanted
    assert revert(admin, 3).changes == ()
    assert [commit.revision for commit in admin.since(0)] == list(range(1, 9))


def test_revert_to_the_beginning_leaves_keys_only(admin: Administration) -> None:
    key = add_key(admin)
    add_tenant(admin, "a")
    patch(admin, "default", probe_period=3)
    revert(admin, 0)
    assert set(documents(admin)) == {Ref("key", key.key_id)}
    assert enters(admin, key)


def test_revert_revives_no_key_that_was_revoked(admin: Administration) -> None:
    add_tenant(admin, "a")
    revoked, kept = add_key(admin), add_key(admin, "a")
    patch(admin, "default", probe_period=3)
    do(admin, revoke_key(revoked.key_id, "*"))
    made_later = add_key(admin, "a")
    for revision in range(3, admin.state.revision):
        revert(admin, revision)
        assert not enters(admin, revoked)
        assert enters(admin, kept)
        assert enters(admin, made_later)


def test_revert_does_not_undo_a_rotation(admin: Administration, clock: Clock) -> None:
    old, new = add_key(admin), NewKey.draw()
    patch(admin, "default", probe_period=3)
    do(admin, rotate_key(old.key_id, new, 60, "*", now=clock()))
    clock.advance(60)
    revert(admin, 1)
    assert (enters(admin, old), enters(admin, new)) == (False, True)


def test_revert_takes_the_keys_of_tenants_that_go(admin: Administration) -> None:
    everybodys = add_key(admin)
    add_tenant(admin, "a")
    own = add_key(admin, "a")
    revert(admin, 1)
    assert set(documents(admin)) == {Ref("key", everybodys.key_id)}
    revert(admin, 3)
    assert set(documents(admin)) == {Ref("key", everybodys.key_id), Ref("tenant", "a")}
    assert (enters(admin, everybodys), enters(admin, own)) == (True, False)


def test_revert_that_somebody_overtook_is_refused(admin: Administration) -> None:
    patch(admin, "default", probe_period=3)
    base, wanted = admin.bodies_at(0)
    patch(admin, "default", probe_period=4)
    with pytest.raises(PreconditionError, match="expected revision 1, got 2"):
        do(admin, restore(wanted, base))
    assert documents(admin) == {DEFAULT_POLICY: {"fields": {"probe_period": 4}}}


@pytest.mark.parametrize("revision", [-1, 2])
def test_revision_that_never_was_is_not_found(admin: Administration, revision: int) -> None:
    patch(admin, "default", probe_period=3)
    with pytest.raises(NotFoundError, match=rf"revision {revision}: expected 0 to 1"):
        admin.bodies_at(revision)


# What may be sent

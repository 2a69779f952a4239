"""Every operation does what it says, one revision each, or is refused and writes nothing."""

import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from admin_support import (
    AUTHOR,
    EVERY_SCOPE,
    Clock,
    add_key,
    add_tenant,
    bodies,
    do,
    patch,
    revert,
    sent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spin_server.admin.access import authenticate
from spin_server.admin.administration import Administration
from spin_server.admin.documents import PolicyPatch, timestamp
from spin_server.admin.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    UnauthorizedError,
    UnconditionalError,
)
from spin_server.admin.operations import (
    NewKey,
    Operation,
    create_key,
    create_tenant,
    delete_tenant,
    describe_tenant,
    patch_policy,
    restore,
    revoke_key,
    rotate_key,
    together,
)
from spin_server.admin.store.interface import Body, Ref
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.errors import SpinError
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

DEFAULT_POLICY = Ref("policy", "default")
LAUNCH = {
    "target_sparsity": "0.3",
    "exploration_share": "0.05",
    "exploration_policy": "random",
    "budget": "uniform",
    "probe_period": 0,
    "ema_decay": "0.5",
}


def documents(admin: Administration) -> dict[Ref, Body]:
    """What is stored, seen to be what is in memory."""
    found = bodies(admin.store.snapshot())
    assert found == {ref: document.body for ref, document in admin.state.documents.items()}
    return found


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


def test_policy_is_the_launchs_until_something_is_set(admin: Administration) -> None:
    add_tenant(admin, "a")
    for name in ("default", "a"):
        found = admin.state.effective(name)
        assert (found.policy, found.fields) == (Policy(), LAUNCH)
        assert set(found.sources.values()) == {"launch"}


def test_patch_sets_what_it_names_and_nothing_else(admin: Administration) -> None:
    patch(admin, "default", target_sparsity=0.5, probe_period=8)
    patch(admin, "default", exploration_policy="staleness")
    assert documents(admin) == {
        DEFAULT_POLICY: {
            "fields": {
                "target_sparsity": "0.5",
                "probe_period": 8,
                "exploration_policy": "staleness",
            }
        }
    }
    policy = admin.state.effective("default").policy
    assert policy.sparsity == Ratio.parse("sparsity", "0.5")
    assert (policy.probe_period, policy.exploration_policy) == (8, "staleness")
    assert policy.exploration == Policy().exploration


def test_patch_with_null_takes_a_field_back(admin: Administration) -> None:
    patch(admin, "default", target_sparsity=0.5, probe_period=8)
    patch(admin, "default", target_sparsity=None)
    assert documents(admin) == {DEFAULT_POLICY: {"fields": {"probe_period": 8}}}
    patch(admin, "default", probe_period=None, budget=None)
    assert documents(admin) == {}
    assert admin.state.effective("default").fields == LAUNCH


def test_sources_are_tenant_then_default_then_launch(admin: Administration) -> None:
    add_tenant(admin, "a")
    patch(admin, "default", target_sparsity=0.4, probe_period=4)
    patch(admin, "a", target_sparsity=0.6)
    assert effective(admin, "a", "target_sparsity") == ("0.6", "tenant")
    assert effective(admin, "a", "probe_period") == (4, "default")
    assert effective(admin, "a", "budget") == ("uniform", "launch")
    assert effective(admin, "default", "target_sparsity") == ("0.4", "default")
    patch(admin, "a", target_sparsity=None)
    assert effective(admin, "a", "target_sparsity") == ("0.4", "default")
    patch(admin, "default", target_sparsity=None)
    assert effective(admin, "a", "target_sparsity") == ("0.3", "launch")


def test_policy_of_nobody_is_not_found(admin: Administration) -> None:
    with pytest.raises(NotFoundError, match="policy 'b': expected 'default' or a tenant's name"):
        patch(admin, "b", target_sparsity=0.5)
    assert documents(admin) == {}


def test_log_says_who_did_what_and_why(admin: Administration) -> None:
    patch(admin, "default", target_sparsity=0.5)
    (commit,) = admin.since(0)
    entry = commit.entry
    assert (entry.actor, entry.action) == (AUTHOR.actor, AUTHOR.action)
    assert (entry.reason, entry.request_id) == (AUTHOR.reason, AUTHOR.request_id)
    assert entry.at == "2026-01-01T00:00:00Z"
    (change,) = commit.changes
    assert (change.ref, change.before) == (DEFAULT_POLICY, None)
    assert change.after == {"fields": {"target_sparsity": "0.5"}}


@pytest.mark.parametrize("value", [0.5, "0.5", "0.500", "5e-1"])
def test_patch_that_changes_nothing_makes_no_revision(admin: Administration, value: Any) -> None:
    patch(admin, "default", target_sparsity=0.5)
    outcome = patch(admin, "default", target_sparsity=value, probe_period=None)
    assert outcome.changes == ()
    assert outcome.state.revision == admin.store.revision() == 1
    patch(admin, "default")
    assert admin.store.revision() == 1


def test_dry_run_shows_and_writes_nothing(admin: Administration) -> None:
    operation = patch_policy("default", sent(target_sparsity=0.5), "*", now=admin.clock())
    outcome = admin.perform(operation, AUTHOR, dry_run=True)
    assert outcome.state.effective("default").fields["target_sparsity"] == "0.5"
    assert [change.ref for change in outcome.changes] == [DEFAULT_POLICY]
    assert (admin.state.revision, admin.store.revision(), documents(admin)) == (0, 0, {})


def test_dry_run_is_refused_as_the_real_one_is(admin: Administration) -> None:
    operation = patch_policy("default", sent(target_sparsity=0.5), '"9"', now=admin.clock())
    with pytest.raises(PreconditionError):
        admin.perform(operation, AUTHOR, dry_run=True)


# If-Match


def writes(admin: Administration) -> dict[str, Callable[[str | None], Operation]]:
    """Every write that has a revision to be based on; each of its documents is at revision 2."""
    now, key = admin.clock(), NewKey.draw()
    document = key.document(tenant=None, scopes=["read"], description="", now=now, expires_at=None)
    patch(admin, "default", probe_period=1)
    do(
        admin,
        together(
            [
                create_tenant("a", "", now=now),
                create_key(key, document, now=now),
                patch_policy("default", sent(probe_period=2), "*", now=now),
            ]
        ),
    )
    changes, key_id = sent(target_sparsity=0.5), key.key_id
    return {
        "patch_policy": lambda tag: patch_policy("default", changes, tag, now=now),
        "describe_tenant": lambda tag: describe_tenant("a", "new", tag),
        "delete_tenant": lambda tag: delete_tenant("a", tag),
        "revoke_key": lambda tag: revoke_key(key_id, tag),
        "rotate_key": lambda tag: rotate_key(key_id, NewKey.draw(), 60, tag, now=now),
    }


WRITES = ["patch_policy", "describe_tenant", "delete_tenant", "revoke_key", "rotate_key"]


@pytest.mark.parametrize("write", WRITES)
def test_write_without_if_match_is_refused(admin: Administration, write: str) -> None:
    operation = writes(admin)[write]
    with pytest.raises(UnconditionalError, match=r'expected If-Match, such as "2"') as caught:
        do(admin, operation(None))
    assert (caught.value.status, admin.store.revision()) == (428, 2)


@pytest.mark.parametrize("tag", ['"1"', '"3"', "2", 'W/"2"', '"1", "3"', "", '"*"'])
@pytest.mark.parametrize("write", WRITES)
def test_write_on_another_revision_is_refused(admin: Administration, write: str, tag: str) -> None:
    operation = writes(admin)[write]
    with pytest.raises(PreconditionError, match=r'expected If-Match "2", got') as caught:
        do(admin, operation(tag))
    assert (caught.value.status, admin.store.revision()) == (412, 2)


@pytest.mark.parametrize("tag", ['"2"', "*", " * ", '"1", "2"', '"2","9"'])
@pytest.mark.parametrize("write", WRITES)
def test_write_on_the_newest_revision_is_done(admin: Administration, write: str, tag: str) -> None:
    operation = writes(admin)[write]
    assert do(admin, operation(tag)).state.revision == admin.store.revision() == 3


def test_document_that_is_not_there_has_revision_zero(admin: Administration) -> None:
    changes = sent(target_sparsity=0.5)
    do(admin, patch_policy("default", changes, '"0"', now=admin.clock()))
    with pytest.raises(PreconditionError):
        do(admin, patch_policy("default", sent(probe_period=1), '"0"', now=admin.clock()))


# Several at once


def test_together_makes_one_revision_of_merged_changes(admin: Administration) -> None:
    now = admin.clock()
    outcome = do(
        admin,
        together(
            [
                create_tenant("a", "first", now=now),
                patch_policy("a", sent(target_sparsity=0.5), '"0"', now=now),
                describe_tenant("a", "second", "*"),
                patch_policy("a", sent(target_sparsity=None, probe_period=3), "*", now=now),
                create_tenant("b", "", now=now),
                delete_tenant("b", "*"),
            ]
        ),
    )
    assert outcome.state.revision == admin.store.revision() == 1
    (commit,) = admin.since(0)
    assert sorted(outcome.changes, key=lambda change: change.ref) == list(commit.changes)
    assert {change.ref: (change.before, change.after) for change in commit.changes} == {
        Ref("policy", "a"): (None, {"fields": {"probe_period": 3}}),
        Ref("tenant", "a"): (
            None,
            {"description": "second", "created_at": "2026-01-01T00:00:00Z"},
        ),
    }
    assert admin.state.revision_of(Ref("policy", "a")) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_together_writes_nothing_if_one_is_refused(admin: Administration, place: int) -> None:
    now = admin.clock()
    operations = [create_tenant("a", "", now=now), create_tenant("b", "", now=now)]
    operations.insert(place, create_tenant("default", "", now=now))
    with pytest.raises(InvalidError):
        do(admin, together(operations))
    assert (admin.store.revision(), documents(admin)) == (0, {})


def test_together_that_undoes_itself_makes_no_revision(admin: Administration) -> None:
    now = admin.clock()
    patch(admin, "default", target_sparsity=0.5)
    there_and_back = [
        patch_policy("default", sent(target_sparsity=share), "*", now=now) for share in (0.6, 0.5)
    ]
    assert do(admin, together(there_and_back)).changes == ()
    assert do(admin, together([])).changes == ()
    assert admin.store.revision() == 1


def test_together_of_an_iterator_can_be_tried_again(admin: Administration) -> None:
    now = admin.clock()
    operation = together(create_tenant(name, "", now=now) for name in "ab")
    admin.perform(operation, AUTHOR, dry_run=True)
    do(admin, operation)
    assert admin.state.tenants == ["a", "b"]


# Time limits


def test_time_limit_takes_fields_back(admin: Administration, clock: Clock) -> None:
    patch(admin, "default", target_sparsity=0.5)
    patch(admin, "default", 60, target_sparsity=0.9, probe_period=7)
    clock.advance(59)
    admin.expire()
    assert effective(admin, "default", "target_sparsity") == ("0.9", "default")
    assert admin.store.revision() == 2
    clock.advance(1)
    admin.expire()
    assert documents(admin) == {DEFAULT_POLICY: {"fields": {"target_sparsity": "0.5"}}}
    assert admin.store.revision() == 3
    assert admin.since(2)[0].entry.actor == "[server]"
    admin.expire()
    assert admin.store.revision() == 3


def test_time_limit_goes_back_to_nothing_set(admin: Administration, clock: Clock) -> None:
    patch(admin, "default", 60, target_sparsity=0.9)
    clock.advance(60)
    admin.expire()
    assert documents(admin) == {}
    assert effective(admin, "default", "target_sparsity") == ("0.3", "launch")


def test_time_limit_brings_back_what_null_took(admin: Administration, clock: Clock) -> None:
    patch(admin, "default", target_sparsity=0.5)
    patch(admin, "default", 60, target_sparsity=None)
    assert effective(admin, "default", "target_sparsity") == ("0.3", "launch")
    clock.advance(60)
    admin.expire()
    assert effective(admin, "default", "target_sparsity") == ("0.5", "default")


@pytest.mark.parametrize("second", [30, 120])
def test_time_limit_on_another_goes_back_to_what_was_to_last(
    admin: Administration, clock: Clock, second: int
) -> None:
    patch(admin, "default", target_sparsity=0.5)
    patch(admin, "default", 60, target_sparsity=0.7)
    patch(admin, "default", second, target_sparsity=0.9)
    clock.advance(second - 1)
    admin.expire()
    assert effective(admin, "default", "target_sparsity") == ("0.9", "default")
    clock.advance(1)
    admin.expire()
    assert documents(admin) == {DEFAULT_POLICY: {"fields": {"target_sparsity": "0.5"}}}


def test_patch_to_last_outlives_a_time_limit_under_it(admin: Administration, clock: Clock) -> None:
    patch(admin, "default", target_sparsity=0.5, budget="uniform")
    patch(admin, "default", 60, target_sparsity=0.9, exploration_share=0.2, ema_decay=0.1)
    patch(admin, "default", exploration_share=0.3, probe_period=4, ema_decay=None, budget=None)
    assert effective(admin, "default", "target_sparsity") == ("0.9", "default")
    clock.advance(60)
    admin.expire()
    lasting = {"target_sparsity": "0.5", "exploration_share": "0.3", "probe_period": 4}
    assert documents(admin) == {DEFAULT_POLICY: {"fields": lasting}}


def test_time_limit_survives_a_restart(
    admin: Administration, open_admin: Callable[[], Administration], clock: Clock
) -> None:
    patch(admin, "default", target_sparsity=0.5)
    patch(admin, "default", 60, target_sparsity=0.9)
    admin.store.close()
    clock.advance(3600)
    again = open_admin()
    again.expire()
    assert documents(again) == {DEFAULT_POLICY: {"fields": {"target_sparsity": "0.5"}}}


def test_time_limits_end_one_by_one(admin: Administration, clock: Clock) -> None:
    for name, seconds in (("a", 60), ("b", 30), ("c", 90)):
        add_tenant(admin, name)
        patch(admin, name, seconds, target_sparsity=0.9)
    left = []
    for _ in range(4):
        admin.expire()
        left.append("".join(ref.name for ref in sorted(documents(admin)) if ref.kind == "policy"))
        clock.advance(30)
    assert left == ["abc", "ac", "c", ""]


def test_time_limit_that_a_revert_brings_back_still_ends(
    admin: Administration, clock: Clock
) -> None:
    patch(admin, "default", 60, target_sparsity=0.9)
    patch(admin, "default", target_sparsity=0.4)
    clock.advance(120)
    revert(admin, 1)
    admin.expire()
    assert documents(admin) == {}


# Tenants


def test_tenant_is_made_and_described(admin: Administration) -> None:
    do(admin, create_tenant("a", "first", now=admin.clock()))
    do(admin, describe_tenant("a", "second", '"1"'))
    tenant = admin.state.tenant("a")
    assert tenant is not None
    assert (tenant.description, tenant.created_at) == ("second", "2026-01-01T00:00:00Z")
    assert do(admin, describe_tenant("a", "second", '"2"')).changes == ()


def test_tenant_that_cannot_be_made_is_refused(admin: Administration) -> None:
    now = admin.clock()
    with pytest.raises(InvalidError, match="another name than 'default'"):
        add_tenant(admin, "default")
    add_tenant(admin, "a")
    with pytest.raises(ConflictError, match="tenant 'a' exists"):
        add_tenant(admin, "a")
    with pytest.raises(ConflictError, match="at most 1"):
        do(admin, create_tenant("b", "", now=now, most_tenants=1))
    assert admin.store.revision() == 1


def test_tenant_that_is_not_there_is_not_found(admin: Administration) -> None:
    for operation in (describe_tenant("a", "", "*"), delete_tenant("a", "*")):
        with pytest.raises(NotFoundError, match="tenant 'a'"):
            do(admin, operation)


def test_tenant_takes_its_policy_and_keys_along(admin: Administration) -> None:
    for name in "ab":
        add_tenant(admin, name)
        patch(admin, name, target_sparsity=0.5)
    keys = {name: [add_key(admin, name), add_key(admin, name)] for name in "ab"}
    everybodys = add_key(admin)
    do(admin, delete_tenant("a", "*"))
    left = {Ref("tenant", "b"), Ref("policy", "b"), Ref("key", everybodys.key_id)}
    assert set(documents(admin)) == left | {Ref("key", key.key_id) for key in keys["b"]}
    assert not any(enters(admin, key) for key in keys["a"])
    assert all(enters(admin, key) for key in [*keys["b"], everybodys])
    add_tenant(admin, "a")
    assert effective(admin, "a", "target_sparsity") == ("0.3", "launch")
    assert not any(enters(admin, key) for key in keys["a"])


# Keys


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


def refused(text: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        PolicyPatch.model_validate_json(text)
    with pytest.raises(ValidationError):
        PolicyPatch.model_validate(json.loads(text))
    return [error["msg"] for error in caught.value.errors()]


@pytest.mark.parametrize("field", ["target_sparsity", "exploration_share", "ema_decay"])
@pytest.mark.parametrize(
    "value",
    [
        *("NaN", "Infinity", "-Infinity", '"NaN"', '"inf"', "true", "false", '""', '"x"', "[]"),
        *("-1e-9", "1.000000001", "2", "-1", "1e-10", "0.0000000001", '"0.1234567891"', "{}"),
        *('"1e-99999"', "1e400", "1" * 4000, '"0.3%"'),
    ],
)
def test_share_that_is_none_is_refused(field: str, value: str) -> None:
    assert refused(f'{{"{field}": {value}}}')


@pytest.mark.parametrize(
    "fields",
    [
        {"probe_period": True},
        {"probe_period": -1},
        {"probe_period": 2**31},
        {"probe_period": 1.5},
        {"probe_period": "8"},
        {"exploration_policy": "greedy"},
        {"exploration_policy": 1},
        {"budget": "global"},
        {"sparsity": 0.5},
        {"Target_Sparsity": 0.5},
        {"target_sparsity": 0.5, "surprise": None},
        [],
        None,
    ],
)
def test_patch_with_something_else_is_refused(fields: Any) -> None:
    assert refused(json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"max_miss_rate": 0.1}, "max_miss_rate: guard rails do not exist in this release"),
        ({"min_sparsity": None}, "min_sparsity: guard rails do not exist in this release"),
        ({"max_sparsity": 1}, "max_sparsity: guard rails do not exist in this release"),
        ({"guard_rails": {}}, "guard_rails: guard rails do not exist in this release"),
        ({"canary": True}, "canary: canary releases do not exist in this release"),
        ({"canary_percent": 5}, "canary_percent: canary releases do not exist in this release"),
        ({"layer_budgets": []}, "layer_budgets: per-layer budgets do not exist in this release"),
        ({"budget": "per_layer"}, "budget: per-layer budgets do not exist in this release"),
    ],
)
def test_feature_that_does_not_exist_is_named(fields: dict[str, Any], line: str) -> None:
    assert refused(json.dumps({"target_sparsity": 0.5, **fields})) == [f"Value error, {line}"]


@pytest.mark.parametrize(
    ("text", "billionths"),
    [
        ("1e-9", 1),
        ('"1e-9"', 1),
        ("0.000000001", 1),
        ('"0.3"', 300_000_000),
        ("0.3", 300_000_000),
        ("0.1234567890", 123_456_789),
        ("0.999999999", 999_999_999),
        ("0", 0),
        ("-0.0", 0),
        ("1", 10**9),
    ],
)
def test_share_survives_exactly(
    admin: Administration,
    open_admin: Callable[[], Administration],
    text: str,
    billionths: int,
) -> None:
    changes = PolicyPatch.model_validate_json(f'{{"target_sparsity": {text}}}').changes()
    do(admin, patch_policy("default", changes, "*", now=admin.clock()))
    for found in (admin, open_admin()):
        assert found.state.effective("default").policy.sparsity.billionths == billionths


@given(billionths=st.integers(0, 10**9), as_text=st.booleans())
def test_every_share_is_stored_exactly(billionths: int, as_text: bool) -> None:
    value: str | float = f"{billionths / 10**9:.9f}"
    if not as_text:
        value = float(value)
    stored = sent(ema_decay=value)["ema_decay"]
    assert Ratio.parse("ema_decay", stored).billionths == billionths
    assert sent(ema_decay=stored)["ema_decay"] == stored


# A model: plain dictionaries

NAMES = ["default", "a", "b"]
VALUES: dict[str, list[Any]] = {
    "target_sparsity": [None, "0.1", "0.9"],
    "exploration_policy": [None, "none"],
    "probe_period": [None, 0, 8],
}
STEPS = st.one_of(
    st.tuples(st.just("create"), st.sampled_from(NAMES)),
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(st.just("describe"), st.sampled_from(NAMES), st.sampled_from("xy")),
    st.tuples(
        st.just("patch"),
        st.sampled_from(NAMES),
        st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in VALUES.items()}),
        st.sampled_from([None, None, 5, 20]),
    ),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("revert"), st.floats(0, 1)),
)
Documents = dict[tuple[str, str], dict[str, Any]]


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(fields)
    for field, value in changes.items():
        result.pop(field, None)
        if value is not None:
            result[field] = value
    return result


class Model:
    """What the documents ought to be after each step, by the plainest means."""

    def __init__(self) -> None:
        self.documents: Documents = {}
        self.history: list[Documents] = [{}]

    def end(self, now: datetime) -> None:
        for ref, body in list(self.documents.items()):
            if "expires" in body and body["expires"]["at"] <= timestamp(now):
                del self.documents[ref]
                if body["expires"]["restore"]:
                    self.documents[ref] = {"fields": body["expires"]["restore"]}

    def create(self, name: str, now: datetime) -> None:
        if name != "default" and ("tenant", name) not in self.documents:
            body = {"description": "", "created_at": timestamp(now)}
            self.documents["tenant", name] = body

    def delete(self, name: str) -> None:
        if self.documents.pop(("tenant", name), None) is not None:
            self.documents.pop(("policy", name), None)

    def describe(self, name: str, text: str) -> None:
        if (ref := ("tenant", name)) in self.documents:
            self.documents[ref] = {**self.documents[ref], "description": text}

    def patch(self, name: str, changes: dict[str, Any], ttl: int | None, end: str) -> None:
        if name != "default" and ("tenant", name) not in self.documents:
            return
        body = self.documents.pop(("policy", name), {"fields": {}})
        expires, fields = body.get("expires"), merged(body["fields"], changes)
        if ttl is not None:
            expires = {"at": end, "restore": expires["restore"] if expires else body["fields"]}
        elif expires:
            expires = {"at": expires["at"], "restore": merged(expires["restore"], changes)}
        if expires:
            self.documents["policy", name] = {"fields": fields, "expires": expires}
        elif fields:
            self.documents["policy", name] = {"fields": fields}

    def note(self) -> None:
        """A revision, if anything changed."""
        if self.documents != self.history[-1]:
            self.history.append(dict(self.documents))


def take(step: tuple[Any, ...], admin: Administration, clock: Clock, model: Model) -> None:
    kind, *rest = step
    now = clock()
    try:
        if kind == "create":
            model.create(rest[0], now)
            do(admin, create_tenant(rest[0], "", now=now))
        elif kind == "delete":
            model.delete(rest[0])
            do(admin, delete_tenant(rest[0], "*"))
        elif kind == "describe":
            model.describe(*rest)
            do(admin, describe_tenant(*rest, "*"))
        elif kind == "patch":
            name, changes, ttl = rest
            clock.advance(ttl or 0)
            model.patch(name, changes, ttl, timestamp(clock()))
            clock.advance(-(ttl or 0))
            do(admin, patch_policy(name, sent(**changes), "*", now=now, ttl_seconds=ttl))
        elif kind == "wait":
            clock.advance(rest[0])
            model.end(clock())
            admin.expire()
        else:
            revision = round(rest[0] * (len(model.history) - 1))
            model.documents = dict(model.history[revision])
            revert(admin, revision)
    except RefusedError:
        assert model.documents == model.history[-1]
    model.note()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, min_size=15, max_size=40))
def test_documents_equal_a_plain_model_at_every_revision(steps: list[tuple[Any, ...]]) -> None:
    clock, model = Clock(), Model()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(SqliteStore(Path(folder) / "admin.db")) as store,
    ):
        admin = Administration(store, Policy(), clock=clock)
        key = add_key(admin, scopes=EVERY_SCOPE)
        model.history.append({})  # the key's revision; keys are no part of the model
        for step in steps:
            take(step, admin, clock, model)
            found = documents(admin)
            del found[Ref("key", key.key_id)]
            assert found == model.documents
            assert admin.state.revision == store.revision() == len(model.history) - 1
        for revision, wanted in enumerate(model.history):
            assert admin.bodies_at(revision) == (store.revision(), wanted)
        assert Administration(store, Policy(), clock=clock).state == admin.state

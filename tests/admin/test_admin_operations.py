"""Changes of policies and tenants: what they make, what is refused, and their end."""

from collections.abc import Callable
from typing import Any

import pytest
from admin_support import (
    AUTHOR,
    DEFAULT_POLICY,
    LAUNCH,
    Clock,
    add_key,
    add_tenant,
    do,
    documents,
    effective,
    enters,
    patch,
    revert,
    sent,
)

from spin_server.admin.administration import Administration
from spin_server.admin.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    UnconditionalError,
)
from spin_server.admin.operations import (
    NewKey,
    Operation,
    create_key,
    create_tenant,
    delete_tenant,
    etag,
    patch_policy,
    patch_tenant,
    revoke_key,
    rotate_key,
    together,
)
from spin_server.admin.store.interface import Ref
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio


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
        "patch_tenant": lambda tag: patch_tenant("a", tag, description="new"),
        "delete_tenant": lambda tag: delete_tenant("a", tag),
        "revoke_key": lambda tag: revoke_key(key_id, tag),
        "rotate_key": lambda tag: rotate_key(key_id, NewKey.draw(), 60, tag, now=now),
    }


WRITES = ["patch_policy", "patch_tenant", "delete_tenant", "revoke_key", "rotate_key"]


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
                patch_policy("a", sent(target_sparsity=0.5), "*", now=now),
                patch_tenant("a", "*", description="second"),
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


def test_revert_brings_nothing_back_whose_time_has_passed(
    admin: Administration, clock: Clock
) -> None:
    patch(admin, "default", probe_period=8)
    patch(admin, "default", 60, target_sparsity=0.9)
    patch(admin, "default", target_sparsity=0.4, probe_period=None)
    clock.advance(59)
    assert revert(admin, 2).state.stored_policy("default").expires is not None
    patch(admin, "default", target_sparsity=0.4, probe_period=None)
    clock.advance(1)
    revert(admin, 2)
    assert documents(admin) == {DEFAULT_POLICY: {"fields": {"probe_period": 8}}}
    revision = admin.state.revision
    admin.expire()  # nothing is undone later
    assert admin.store.revision() == revision


# ETags


def write_and_take_back(admin: Administration, clock: Clock, way: str) -> None:
    if way == "null":
        patch(admin, "a", target_sparsity=0.5)
        patch(admin, "a", target_sparsity=None)
    elif way == "time limit":
        patch(admin, "a", 60, target_sparsity=0.5)
        clock.advance(60)
        admin.expire()
    elif way == "canary":
        patch(admin, "a", canary_percent=10, target_sparsity=0.5)
        patch(admin, "a", canary_percent=0)
    elif way == "revert":
        patch(admin, "a", target_sparsity=0.5)
        revert(admin, 1)
    else:
        patch(admin, "default", target_sparsity=0.5)
        revert(admin, 1)


@pytest.mark.parametrize("way", ["null", "time limit", "canary", "revert", "default"])
def test_etag_does_not_come_back_when_nothing_is_set_any_more(
    admin: Administration, clock: Clock, way: str
) -> None:
    add_tenant(admin, "a")
    ref = DEFAULT_POLICY if way == "default" else Ref("policy", "a")
    old = etag(admin.state.revision_of(ref))
    write_and_take_back(admin, clock, way)
    assert ref not in documents(admin)
    assert admin.state.revision_of(ref) == admin.state.revision == 3
    with pytest.raises(PreconditionError):
        do(admin, patch_policy(ref.name, sent(probe_period=1), old, now=clock()))
    assert admin.bodies_at(3)[1].keys() == {Ref("tenant", "a")}
    # What changes nothing is no revision, as ever.
    assert patch(admin, ref.name, target_sparsity=None).changes == ()


def test_policy_that_is_set_and_taken_back_at_once_was_never_there(admin: Administration) -> None:
    there_and_back = [
        patch_policy("default", sent(target_sparsity=share), "*", now=admin.clock())
        for share in (0.6, None)
    ]
    assert do(admin, together(there_and_back)).changes == ()


# Tenants


def test_tenant_is_made_and_described(admin: Administration) -> None:
    do(admin, create_tenant("a", "first", now=admin.clock()))
    do(admin, patch_tenant("a", '"1"', description="second"))
    tenant = admin.state.tenant("a")
    assert tenant is not None
    assert (tenant.description, tenant.created_at) == ("second", "2026-01-01T00:00:00Z")
    assert do(admin, patch_tenant("a", '"2"', description="second")).changes == ()


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
    for operation in (patch_tenant("a", "*", description=""), delete_tenant("a", "*")):
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


def test_time_limit_with_nothing_left_to_take_back_is_gone(admin: Administration) -> None:
    patch(admin, "default", 60, target_sparsity=0.65)
    patch(admin, "default", target_sparsity=None)
    assert DEFAULT_POLICY not in documents(admin)


def test_time_limit_without_a_field_is_refused(admin: Administration) -> None:
    with pytest.raises(InvalidError, match="expected a field to set for a while, got none"):
        patch(admin, "default", 60)

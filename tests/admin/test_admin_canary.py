"""A change that some of a policy's requests try before all of them get it."""

from collections.abc import Callable
from typing import Any

import pytest
from admin_app import AdminApp, Client, RememberingEngine, audit, eventually, make_tenant
from admin_support import Clock, add_tenant, documents, effective, patch, revert

from spin_server.admin.administration import Administration
from spin_server.admin.errors import ConflictError, InvalidError
from spin_server.admin.operations import begin_anew
from spin_server.admin.state import State
from spin_server.admin.store.interface import Body, Change, Ref
from spin_server.engine.tenancy.salts import PrefixSalts
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

POLICY = Ref("policy", "a")


@pytest.fixture
def admin(open_admin: Callable[[], Administration]) -> Administration:
    """With a tenant."""
    admin = open_admin()
    add_tenant(admin, "a")
    return admin


def tried(admin: Administration, field: str) -> tuple[Any, str]:
    found = admin.state.effective("a", canary=True)
    return found.fields[field], found.sources[field]


def test_canary_is_beside_the_policy_and_on_top_of_it(admin: Administration) -> None:
    patch(admin, "a", target_sparsity=0.4)
    patch(admin, "a", canary_percent=10, target_sparsity=0.65)
    patch(admin, "default", probe_period=8)
    assert documents(admin)[POLICY] == {
        "fields": {"target_sparsity": "0.4"},
        "canary": {"percent": 10, "fields": {"target_sparsity": "0.65"}},
    }
    assert admin.state.canaries == {"a": 10}
    assert effective(admin, "a", "target_sparsity") == ("0.4", "tenant")
    assert tried(admin, "target_sparsity") == ("0.65", "canary")
    assert tried(admin, "probe_period") == (8, "default")


def test_lasting_change_leaves_the_canary_and_is_under_it(admin: Administration) -> None:
    patch(admin, "a", canary_percent=10, target_sparsity=0.65)
    patch(admin, "a", target_sparsity=0.2, exploration_share=0.1)
    assert tried(admin, "target_sparsity") == ("0.65", "canary")
    assert tried(admin, "exploration_share") == ("0.1", "tenant")


def test_canary_grows_and_changes(admin: Administration) -> None:
    patch(admin, "a", canary_percent=5, target_sparsity=0.65, probe_period=4)
    patch(admin, "a", canary_percent=50)
    patch(admin, "a", canary_percent=50, probe_period=None, ema_decay=0.25)
    assert documents(admin)[POLICY]["canary"] == {
        "percent": 50,
        "fields": {"target_sparsity": "0.65", "ema_decay": "0.25"},
    }


def test_canary_of_a_hundred_percent_is_everybodys(admin: Administration) -> None:
    patch(admin, "a", target_sparsity=0.4, probe_period=2)
    patch(admin, "a", canary_percent=5, target_sparsity=0.65, probe_period=4)
    patch(admin, "a", canary_percent=100, probe_period=8)
    assert documents(admin)[POLICY] == {"fields": {"target_sparsity": "0.65", "probe_period": 8}}
    assert admin.state.canaries == {}


def test_field_that_is_taken_out_of_a_canary_stays_as_the_policy_has_it(
    admin: Administration,
) -> None:
    patch(admin, "a", target_sparsity=0.4)
    patch(admin, "a", canary_percent=5, target_sparsity=0.9, probe_period=4)
    patch(admin, "a", canary_percent=100, target_sparsity=None)
    assert documents(admin)[POLICY] == {"fields": {"target_sparsity": "0.4", "probe_period": 4}}


def test_canary_that_is_not_there_cannot_be_everybodys(admin: Administration) -> None:
    with pytest.raises(ConflictError, match="policy 'a': no canary to give to all requests"):
        patch(admin, "a", canary_percent=100, target_sparsity=0.5)


def test_canary_that_ends_leaves_the_policy(admin: Administration) -> None:
    patch(admin, "a", canary_percent=5, target_sparsity=0.65)
    patch(admin, "a", canary_percent=0)
    assert POLICY not in documents(admin)
    revision = admin.state.revision
    patch(admin, "a", canary_percent=0)  # there is none
    assert admin.state.revision == revision


def test_canary_outlives_a_time_limit(admin: Administration, clock: Clock) -> None:
    patch(admin, "a", 60, target_sparsity=0.5)
    patch(admin, "a", canary_percent=5, probe_period=4)
    clock.advance(60)
    admin.expire()
    assert documents(admin)[POLICY] == {
        "fields": {},
        "canary": {"percent": 5, "fields": {"probe_period": 4}},
    }


def test_canary_that_became_everybodys_outlives_a_time_limit(
    admin: Administration, clock: Clock
) -> None:
    patch(admin, "a", 60, target_sparsity=0.5)
    patch(admin, "a", canary_percent=5, probe_period=4)
    patch(admin, "a", canary_percent=100)
    clock.advance(60)
    admin.expire()
    assert documents(admin)[POLICY] == {"fields": {"probe_period": 4}}


def test_revert_brings_a_canary_back_or_takes_it_away(admin: Administration) -> None:
    patch(admin, "a", canary_percent=5, target_sparsity=0.65)
    patch(admin, "a", canary_percent=100)
    revert(admin, 2)
    assert admin.state.canaries == {"a": 5}
    revert(admin, 1)
    assert admin.state.canaries == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"canary_percent": 10}, "expected a field, got none"),
        ({"canary_percent": 10, "target_sparsity": None}, "expected a field, got none"),
        ({"canary_percent": 0, "target_sparsity": 0.5}, "expected no fields beside it"),
        (
            {"canary_percent": 10, "ttl_seconds": 60, "target_sparsity": 0.5},
            "expected ttl_seconds or canary_percent, got both",
        ),
    ],
)
def test_canary_that_makes_no_sense_is_refused(
    admin: Administration, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidError, match=message):
        patch(admin, "a", **given)
    assert POLICY not in documents(admin)


SHARES = ("0", "0.5")
KINDS = [(policy, canary) for policy in SHARES for canary in (None, *SHARES)]


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_prefixes_begin_anew_where_the_engine_salts_them_anew(
    admin: Administration, before: tuple[str, str | None], after: tuple[str, str | None]
) -> None:
    salts, main, tried = PrefixSalts({0: Policy()}), 1, 2
    salts.name_rows({main: "a", tried: "a"})

    def found(kind: tuple[str, str | None]) -> set[str]:
        policy, canary = kind
        # What is left of a canary's requests goes on with the policy.
        rows = {main: Policy(ratio(policy)), tried: Policy(ratio(canary or policy))}
        salts.before_write(rows)
        salts.after_write(rows)
        return {salts.salt("a", row) for row in ([main, tried] if canary else [main])}

    def state(kind: tuple[str, str | None]) -> State:
        policy, canary = kind
        body: Body = {"fields": {"target_sparsity": policy}}
        if canary is not None:
            body["canary"] = {"percent": 10, "fields": {"target_sparsity": canary}}
        return admin.state.after([Change(POLICY, None, body)])

    known = found(before)
    anew = found(after) - known
    assert begin_anew(state(before), state(after), {"a"}) == (["a"] if anew else [])


# Over HTTP, and in the engine


def ratio(text: str) -> Ratio:
    return Ratio.parse("share", text)


def test_engine_gets_a_row_for_the_canary(app: AdminApp, ask: Client) -> None:
    make_tenant(ask, "acme", target_sparsity=0.4)
    path = "/v1/policies/acme?canary_percent=25"
    answer = ask("PATCH", path, {"target_sparsity": 0.65}, match="*").json()
    assert answer["canary"] == {"percent": 25, "fields": {"target_sparsity": 0.65}}
    assert answer["fields"]["target_sparsity"] == {"value": 0.4, "source": "tenant"}
    assert answer["applied"]["complete"] is True
    assert app.engine.policy("acme").sparsity == ratio("0.4")
    policy, percent = app.engine.tried("acme")
    assert (policy.sparsity, percent) == (ratio("0.65"), 25)
    assert audit(ask)[0]["changes"][0]["after"]["canary"]["percent"] == 25
    ask("PATCH", "/v1/policies/acme?canary_percent=100", {}, match="*")
    assert app.engine.policy("acme").sparsity == ratio("0.65")
    assert app.engine.canaries == {}


def test_default_policy_has_a_canary_that_tenants_do_not_inherit(
    app: AdminApp, ask: Client
) -> None:
    make_tenant(ask, "acme")
    ask("PATCH", "/v1/policies/default?canary_percent=5", {"target_sparsity": 0.65}, match="*")
    assert app.engine.tried("default")[0].sparsity == ratio("0.65")
    assert app.engine.policy("acme") == app.engine.rows[0] == Policy()


@pytest.mark.parametrize("percent", ["-1", "101", "1.5", "5.0", "1_0", "%2B5", "ten", ""])
def test_percentage_that_is_none_is_refused(ask: Client, percent: str) -> None:
    path = f"/v1/policies/default?canary_percent={percent}"
    answer = ask("PATCH", path, {"target_sparsity": 0.65}, match="*")
    assert answer.status_code == 422
    assert "canary_percent" in answer.json()["detail"]


@pytest.mark.parametrize("percent", [True, "10", 10.0, 10.5, -1, 101])
def test_percentage_of_a_bulk_change_that_is_none_is_refused(ask: Client, percent: Any) -> None:
    step = {"op": "patch_policy", "name": "default", "patch": {"probe_period": 3}, "if_match": "*"}
    answer = ask("POST", "/v1/bulk", {"operations": [{**step, "canary_percent": percent}]})
    assert answer.status_code == 422
    assert ask("GET", "/v1/policies/default").json()["revision"] == 0


def test_bulk_makes_canaries_too(ask: Client) -> None:
    step = {
        "op": "patch_policy",
        "name": "default",
        "patch": {"target_sparsity": 0.5},
        "if_match": "*",
        "canary_percent": 10,
    }
    assert ask("POST", "/v1/bulk", {"operations": [step]}).status_code == 200
    assert ask("GET", "/v1/policies/default").json()["canary"]["percent"] == 10


def test_no_tenant_goes_without_a_row_for_a_canary(app: AdminApp, ask: Client) -> None:
    rows = RememberingEngine().capacity - 1
    for n in range(rows - 1):
        make_tenant(ask, f"t{n:02}")
    ask("PATCH", "/v1/policies/default?canary_percent=5", {"target_sparsity": 0.65}, match="*")
    assert list(app.engine.canaries) == ["default"]
    path = "/v1/policies/t00?canary_percent=5"
    answer = ask("PATCH", path, {"target_sparsity": 0.65}, match="*").json()
    assert answer["applied"]["complete"] is False
    assert answer["applied"]["trouble"] == (
        "no row for 1 canaries, such as t00's: nobody tries them here (--spin-capacity, or a "
        "policy of --spin-policies with the same name)"
    )
    # Nobody else hears of it.
    other = ask.new_key(tenant="t01", scopes=["write"])
    answer = other("PATCH", "/v1/policies/t01", {"probe_period": 3}, match="*").json()
    assert (answer["applied"]["complete"], answer["applied"]["trouble"]) == (True, None)
    make_tenant(ask, "last", target_sparsity=0.1)
    eventually(lambda: "last" in app.engine.names)
    assert app.engine.policy("last").sparsity == ratio("0.1")
    assert app.engine.canaries == {}
    trouble = ask("GET", "/v1/status").json()["trouble"]["tenants"]
    assert trouble.startswith("no row for 2 canaries")


def test_running_requests_of_a_canary_that_is_over_follow_the_policy(
    app: AdminApp, ask: Client
) -> None:
    make_tenant(ask, "acme", target_sparsity=0.4)
    for end, left in ((0, "0.4"), (100, "0.9")):
        path = "/v1/policies/acme?canary_percent="
        ask("PATCH", f"{path}50", {"target_sparsity": 0.9}, match="*")
        row = app.engine.canaries["acme"].row
        assert app.engine.rows[row].sparsity == ratio("0.9")
        ask("PATCH", f"{path}{end}", {}, match="*")
        assert app.engine.canaries == {}
        assert app.engine.rows[row].sparsity == ratio(left)
        ask("PATCH", "/v1/policies/acme", {"target_sparsity": 0.1}, match="*")
        assert app.engine.rows[row].sparsity == ratio("0.1")
        ask("PATCH", "/v1/policies/acme", {"target_sparsity": 0.4}, match="*")


def test_no_new_request_has_a_row_that_is_being_given_to_somebody_else(
    app: AdminApp, ask: Client
) -> None:
    for n in range(app.engine.capacity - 2):
        make_tenant(ask, f"t{n:02}")
    path = "/v1/policies/t00?canary_percent=50"
    ask("PATCH", path, {"target_sparsity": 0.9}, match="*")
    row, apply, seen = app.engine.canaries["t00"].row, app.engine.apply, []

    async def watched(revision: int, rows: Any) -> Any:
        seen.append((dict(app.engine.names), dict(app.engine.canaries), dict(rows)))
        return await apply(revision, rows)

    app.engine.apply = watched  # type: ignore[method-assign]
    make_tenant(ask, "other", target_sparsity=0.1)
    eventually(lambda: app.engine.names.get("other") == row)
    names, canaries, _ = next(written for written in seen if row in written[2])
    assert canaries == {}
    assert row not in names.values()


def test_canary_that_has_a_row_keeps_it(app: AdminApp, ask: Client) -> None:
    for n in range(app.engine.capacity - 2):
        make_tenant(ask, f"t{n:02}")
    for name in ("t05", "t00"):
        ask("PATCH", f"/v1/policies/{name}?canary_percent=50", {"probe_period": 3}, match="*")
    assert list(app.engine.canaries) == ["t05"]


def test_tenant_with_a_launch_policys_name_has_no_canary_here(app: AdminApp, ask: Client) -> None:
    app.engine.reserved = frozenset()
    make_tenant(ask, "launched")
    app.engine.reserved = frozenset({"launched"})
    path = "/v1/policies/launched?canary_percent=50"
    answer = ask("PATCH", path, {"target_sparsity": 0.9}, match="*").json()
    assert answer["applied"]["complete"] is False
    assert app.engine.canaries == {}

"""What the admin API answers, and what the engine and the log hold afterwards."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from admin_app import AdminApp, Client, audit, eventually, make_tenant

from spin_server.admin.applier import RowAllotment
from spin_server.admin.http import context
from spin_server.policy.ratio import Ratio


def test_change_reaches_the_engine_before_the_answer(app: AdminApp, ask: Client) -> None:
    make_tenant(ask)
    answer = ask("PATCH", "/v1/policies/acme", {"target_sparsity": 0.65}, match='"2"')
    assert answer.status_code == 200
    found = answer.json()
    assert found["fields"]["target_sparsity"] == {"value": 0.65, "source": "tenant"}
    assert found["fields"]["ema_decay"]["source"] == "launch"
    revision = found["revision"]
    assert found["applied"] == {
        "complete": True,
        "desired_revision": revision,
        "ranks": [{"engine": 0, "rank": rank, "revision": revision} for rank in (0, 1)],
        "trouble": None,
    }
    assert float(app.engine.policy("acme").sparsity) == 0.65
    assert float(app.engine.rows[0].sparsity) == 0.3


@pytest.mark.parametrize(
    "share", [0, 1, 0.3, 2e-6, 1e-9, "0.000000001", "1.000", ".5", "1e-9", 0.999999999]
)
def test_share_is_kept_exactly(app: AdminApp, ask: Client, share: Any) -> None:
    for field in ("target_sparsity", "exploration_share", "ema_decay"):
        answer = ask("PATCH", "/v1/policies/default", {field: share}, match="*")
        assert answer.status_code == 200, answer.text
        assert answer.json()["fields"][field]["value"] == float(share)
    wanted = Ratio.parse("share", share)
    held = app.engine.rows[0]
    assert held.sparsity == held.exploration == held.ema_decay == wanted


def test_default_policy_is_inherited_field_by_field(app: AdminApp, ask: Client) -> None:
    make_tenant(ask, target_sparsity=0.1)
    ask("PATCH", "/v1/policies/default", {"target_sparsity": 0.5, "probe_period": 8}, match='"0"')
    fields = ask("GET", "/v1/policies/acme").json()["fields"]
    assert fields["target_sparsity"] == {"value": 0.1, "source": "tenant"}
    assert fields["probe_period"] == {"value": 8, "source": "default"}
    held = app.engine.policy("acme")
    assert (float(held.sparsity), held.probe_period) == (0.1, 8)
    back = ask("PATCH", "/v1/policies/acme", {"target_sparsity": None}, match="*").json()
    assert back["fields"]["target_sparsity"] == {"value": 0.5, "source": "default"}


def test_write_without_or_with_an_old_etag_is_refused(ask: Client) -> None:
    patch = {"target_sparsity": 0.5}
    assert ask("PATCH", "/v1/policies/default", patch).status_code == 428
    etag = ask("GET", "/v1/policies/default").headers["etag"]
    first = ask("PATCH", "/v1/policies/default", patch, match=etag)
    assert first.status_code == 200
    assert first.headers["etag"] != etag
    assert first.headers["etag"] == ask("GET", "/v1/policies/default").headers["etag"]
    assert ask("PATCH", "/v1/policies/default", patch, match=etag).status_code == 412


def test_patch_that_changes_nothing_keeps_etag_and_log(ask: Client) -> None:
    ask("PATCH", "/v1/policies/default", {"target_sparsity": 0.5}, match="*")
    etag, entries = ask("GET", "/v1/policies/default").headers["etag"], len(audit(ask))
    again = ask("PATCH", "/v1/policies/default", {"target_sparsity": "0.50"}, match=etag)
    assert (again.status_code, again.headers["etag"]) == (200, etag)
    assert len(audit(ask)) == entries


def test_dry_run_changes_nothing(app: AdminApp, ask: Client) -> None:
    eventually(lambda: app.applier.applied == 1)
    writes, entries = app.engine.writes, len(audit(ask))
    for method, path, body in (
        ("PATCH", "/v1/policies/default", {"target_sparsity": 0.5}),
        ("POST", "/v1/tenants", {"name": "acme"}),
        ("POST", "/v1/keys", {"scopes": ["read"]}),
        ("POST", "/v1/bulk", {"operations": [{"op": "create_tenant", "name": "b"}]}),
        ("POST", "/v1/revisions/0/revert", None),
    ):
        answer = ask(method, f"{path}?dryRun=All", body, match="*")
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json()["dry_run"] is True
        assert "key" not in answer.json()
    assert (app.engine.writes, len(audit(ask))) == (writes, entries)


def test_misspelt_or_repeated_parameter_is_refused(ask: Client) -> None:
    for query in ("dryrun=All", "dryRun=all", "dry_run=All", "dryRun=All&dryRun=All"):
        answer = ask("PATCH", f"/v1/policies/default?{query}", {"target_sparsity": 0}, match="*")
        assert answer.status_code == 422, query
    assert ask("GET", "/v1/policies/default").json()["fields"]["target_sparsity"]["value"] == 0.3


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ({"max_miss_rate": 0.1}, "guard rails do not exist in this release"),
        ({"budget": "per_layer"}, "per-layer budgets do not exist in this release"),
        ({"canary": {"percent": 10}}, "canary: expected ?canary_percent= beside the fields"),
        ({"sparsity": 0.5}, "'sparsity': expected one of target_sparsity, exploration_share"),
        ({"target_sparsity": True}, "target_sparsity"),
        ({"target_sparsity": 1.5}, "target_sparsity: expected a number from 0 to 1, got "),
        ({"target_sparsity": "x"}, "target_sparsity: expected a number from 0 to 1, got "),
        ({"target_sparsity": 0.12345678901}, "at most 9 decimals"),
        ({"probe_period": -1}, "probe_period: expected at least 0, got -1"),
        ([], "body: expected an object, got a list"),
    ],
)
def test_value_that_cannot_be_accepted_is_named(ask: Client, patch: Any, text: str) -> None:
    answer = ask("PATCH", "/v1/policies/default", patch, match="*")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert text in answer.json()["detail"]
    assert len(audit(ask)) == 1  # the first key


def test_number_that_is_none_is_refused(ask: Client) -> None:
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
        answer = ask(
            "PATCH",
            "/v1/policies/default",
            match="*",
            content=b'{"target_sparsity": ' + text + b"}",
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert answer.status_code == 422, text


def test_time_limit_takes_a_change_back(app: AdminApp, ask: Client) -> None:
    url = "/v1/policies/default?ttl_seconds=60"
    found = ask("PATCH", url, {"target_sparsity": 0.6}, match="*").json()
    assert found["expires_at"] is not None
    assert float(app.engine.rows[0].sparsity) == 0.6
    app.offset += app.offset.resolution * 61_000_000
    eventually(lambda: float(app.engine.rows[0].sparsity) == 0.3)
    assert ask("GET", "/v1/policies/default").json()["expires_at"] is None
    # The engine goes by the clock, whether or not the store can be written; then it is written.
    eventually(lambda: audit(ask)[0]["actor"] == "[server]")


def test_lasting_change_outlives_a_time_limit(app: AdminApp, ask: Client) -> None:
    url = "/v1/policies/default"
    ask("PATCH", url + "?ttl_seconds=60", {"target_sparsity": 0.6}, match="*")
    found = ask("PATCH", url, {"probe_period": 8}, match="*").json()
    assert found["expires_at"] is not None
    app.offset += app.offset.resolution * 61_000_000
    eventually(lambda: float(app.engine.rows[0].sparsity) == 0.3)
    assert app.engine.rows[0].probe_period == 8


def test_bulk_is_all_or_nothing(app: AdminApp, ask: Client) -> None:
    tenants = [{"op": "create_tenant", "name": f"t{index}"} for index in range(3)]
    harsh = {"op": "patch_policy", "name": "t1", "patch": {"target_sparsity": 0.65}}
    wrong = {**harsh, "if_match": '"9"'}
    assert ask("POST", "/v1/bulk", {"operations": [*tenants, wrong]}).status_code == 412
    assert ask("GET", "/v1/tenants").json()["items"] == []
    right = {**harsh, "if_match": "*"}
    found = ask("POST", "/v1/bulk", {"operations": [*tenants, right]}).json()
    assert len(found["changes"]) == 4
    assert len(audit(ask)) == 2
    assert float(app.engine.policy("t1").sparsity) == 0.65


def test_tenant_is_not_made_anew_beside_its_deletion(ask: Client) -> None:
    make_tenant(ask)
    steps = [
        {"op": "delete_tenant", "name": "acme", "if_match": "*"},
        {"op": "create_tenant", "name": "acme"},
    ]
    refused = ask("POST", "/v1/bulk", {"operations": steps})
    assert refused.status_code == 409
    assert "expected to be made anew in a request of its own" in refused.json()["detail"]


def test_lists_come_in_pages(ask: Client) -> None:
    names = [f"t{index:02}" for index in range(7)]
    ask("POST", "/v1/bulk", {"operations": [{"op": "create_tenant", "name": n} for n in names]})
    found, url = [], "/v1/tenants?limit=3"
    while True:
        page = ask("GET", url).json()
        found += [tenant["name"] for tenant in page["items"]]
        if page["next_cursor"] is None:
            break
        url = f"/v1/tenants?limit=3&cursor={page['next_cursor']}"
    assert found == names


def test_revert_brings_policies_back_and_no_key(app: AdminApp, ask: Client) -> None:
    make_tenant(ask, target_sparsity=0.4)
    made = ask("POST", "/v1/keys", {"tenant": "acme", "scopes": ["read"]}).json()
    good = ask("GET", "/v1/status").json()["desired_revision"]
    ask("PATCH", "/v1/policies/acme", {"target_sparsity": 0.9}, match="*")
    ask("DELETE", f"/v1/keys/{made['id']}", match="*")
    assert ask("POST", f"/v1/revisions/{good}/revert").status_code == 428
    assert ask("POST", f"/v1/revisions/{good}/revert", match='"1"').status_code == 412
    newest = ask("GET", "/v1/status").headers["etag"]
    tried = ask("POST", f"/v1/revisions/{good}/revert?dryRun=All", match=f'"1", {newest}')
    assert tried.status_code == 200, tried.text
    found = ask("POST", f"/v1/revisions/{good}/revert", match=newest)
    assert found.status_code == 200, found.text
    assert [change["kind"] for change in found.json()["changes"]] == ["policy"]
    assert float(app.engine.policy("acme").sparsity) == 0.4
    assert ask.with_key(made["key"])("GET", "/v1/policies/acme").status_code == 401
    difference = ask("GET", f"/v1/revisions/{good}/diff").json()
    assert difference["changes"] == []


def test_every_write_is_in_the_audit_log_once(ask: Client) -> None:
    make_tenant(ask)
    made = ask("POST", "/v1/keys?reason=INC-7", {"tenant": "acme"}, headers={"X-Request-Id": "r-1"})
    key_id = made.json()["id"]
    writes = [
        ("PATCH", "/v1/tenants/acme", {"description": "x"}),
        ("PATCH", "/v1/policies/acme", {"target_sparsity": 0.5}),
        ("POST", f"/v1/keys/{key_id}/rotate", {}),
        ("DELETE", f"/v1/keys/{key_id}", None),
        ("DELETE", "/v1/tenants/acme", None),
    ]
    for method, path, body in writes:
        entries = len(audit(ask))
        assert ask(method, path, body, match="*").status_code in (200, 201)
        found = audit(ask)
        assert len(found) == entries + 1
        assert found[0]["action"] == f"{method} {path}"
        assert found[0]["changes"]
    entry = next(entry for entry in audit(ask) if entry["reason"] == "INC-7")
    assert (entry["request_id"], entry["action"]) == ("r-1", "POST /v1/keys")
    assert entry["changes"][0]["before"] is None


def test_engine_that_does_not_answer_loses_nothing(app: AdminApp, ask: Client) -> None:
    assert ask("GET", "/readyz").status_code == 200
    app.engine.fault = RuntimeError("no answer")
    app.applier._clock = lambda: time.monotonic() + 3600  # behind for an hour
    context = __import__("spin_server.admin.http.context", fromlist=["context"])
    context.APPLY_SECONDS, before = 0.2, context.APPLY_SECONDS
    try:
        found = ask("PATCH", "/v1/policies/default", {"target_sparsity": 0.5}, match="*").json()
    finally:
        context.APPLY_SECONDS = before
    assert found["applied"]["complete"] is False
    status = ask("GET", "/v1/status").json()
    assert (status["desired_revision"], status["applied_revision"]) == (2, 1)
    assert "no answer" in status["trouble"]["engine"]
    app.engine.fault = None
    eventually(lambda: float(app.engine.rows[0].sparsity) == 0.5)
    assert ask("GET", "/readyz").status_code == 200


def test_tenant_that_has_no_row_here_is_named(tmp_path: Path) -> None:
    one, two = AdminApp(tmp_path), AdminApp(tmp_path)
    two.engine.capacity = 3
    two.applier._allotment = RowAllotment(range(1, 3))
    steps = [{"op": "create_tenant", "name": f"t{index}"} for index in range(4)]
    with one.client() as ask_one, two.client() as ask_two:
        assert ask_one("POST", "/v1/bulk", {"operations": steps}).status_code == 200
        eventually(lambda: two.engine.names == {"t0": 1, "t1": 2})
        found = ask_two("PATCH", "/v1/policies/t3", {"target_sparsity": 0.5}, match="*").json()
        assert found["applied"]["complete"] is False
        assert "no row for 1 tenants, such as t3" in found["applied"]["trouble"]
        assert "no row for 2 tenants" in ask_two("GET", "/v1/status").json()["trouble"]["tenants"]


def test_name_of_the_launch_is_no_tenants(ask: Client) -> None:
    answer = ask("POST", "/v1/tenants", {"name": "launched"})
    assert answer.status_code == 409
    assert "--spin-policies" in answer.json()["detail"]


def test_tenants_are_as_many_as_the_table_has_rows(app: AdminApp, ask: Client) -> None:
    names = [f"t{index}" for index in range(app.engine.capacity - 1)]
    steps = [{"op": "create_tenant", "name": name} for name in names]
    assert ask("POST", "/v1/bulk", {"operations": steps}).status_code == 200
    assert ask("POST", "/v1/tenants", {"name": "one-more"}).status_code == 409
    assert ask("DELETE", "/v1/tenants/t3", match="*").status_code == 200
    make_tenant(ask, "one-more", target_sparsity=0.5)
    assert float(app.engine.policy("one-more").sparsity) == 0.5
    assert sorted(app.engine.names.values()) == list(range(1, app.engine.capacity))


def test_two_replicas_on_one_store_converge(tmp_path: Path) -> None:
    one, two = AdminApp(tmp_path), AdminApp(tmp_path)
    with one.client() as ask_one, two.client() as ask_two:
        make_tenant(ask_one, target_sparsity=0.6)
        eventually(lambda: "acme" in two.engine.names)
        assert float(two.engine.policy("acme").sparsity) == 0.6
        etag = ask_two("GET", "/v1/policies/acme").headers["etag"]
        ask_two("PATCH", "/v1/policies/acme", {"target_sparsity": 0.2}, match=etag)
        late = ask_one("PATCH", "/v1/policies/acme", {"target_sparsity": 0.9}, match=etag)
        assert late.status_code == 412
        eventually(lambda: float(one.engine.policy("acme").sparsity) == 0.2)


def test_requests_are_counted_by_route(ask: Client) -> None:
    ask("GET", "/v1/policies/default")
    ask("GET", "/v1/policies/nobody")
    ask("GET", "/nowhere/at/all")
    text = ask("GET", "/metrics").text
    route = 'method="GET",route="/v1/policies/{name}"'
    assert f'spin_admin_requests_total{{code="200",{route}}} 1.0' in text
    assert f'spin_admin_requests_total{{code="404",{route}}} 1.0' in text
    assert 'spin_admin_requests_total{code="404",method="GET",route="none"} 1.0' in text


def test_change_says_whose_cached_prefixes_begin_anew(ask: Client) -> None:
    for name, fields in (
        ("follows", {}),
        ("own", {"target_sparsity": 0.4}),
        ("exact", {"target_sparsity": 0}),
    ):
        make_tenant(ask, name, **fields)

    def change(name: str, sparsity: float | None, query: str = "") -> Any:
        answer = ask(
            "PATCH", f"/v1/policies/{name}{query}", {"target_sparsity": sparsity}, match="*"
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["prefix_cache"]

    nothing = {"begin_anew": [], "count": 0}
    assert change("default", 0.6) == nothing
    assert change("own", 0.1, "?dryRun=All") == nothing
    everybody = {"begin_anew": ["default", "follows"], "count": 2}
    assert change("default", 0, "?dryRun=All") == everybody
    assert change("default", 0) == everybody
    assert change("exact", None) == nothing  # as the default policy says: 0
    assert change("default", 0.5) == {"begin_anew": ["default", "exact", "follows"], "count": 3}
    assert change("own", 0) == {"begin_anew": ["own"], "count": 1}
    own = {"begin_anew": ["own"], "count": 1}
    assert change("own", 0.9, "?canary_percent=10&dryRun=All") == own  # for the canary's requests
    assert change("own", 0.9, "?canary_percent=10") == own
    assert change("own", 0.8, "?canary_percent=100&dryRun=All") == nothing  # found by then
    newest = ask("GET", "/v1/status").json()["desired_revision"]
    reverted = ask("POST", f"/v1/revisions/{newest - 2}/revert", match="*").json()
    assert reverted["prefix_cache"] == nothing  # the canary's are found by all


def test_limits_of_a_tenant_are_set_lifted_and_nobodys_own(ask: Client) -> None:
    made = ask("POST", "/v1/tenants", {"name": "acme", "limits": {"queued_tokens": 5000}})
    assert made.json()["limits"] == {
        "concurrent_requests": None,
        "queued_tokens": 5000,
        "context_tokens": None,
    }

    def patch(body: Any, by: Client = ask) -> Any:
        return by("PATCH", "/v1/tenants/acme", body, match="*")

    found = patch({"limits": {"concurrent_requests": 8, "queued_tokens": None}}).json()
    assert (found["limits"]["concurrent_requests"], found["limits"]["queued_tokens"]) == (8, None)
    assert patch({"description": "x"}).json()["limits"] == found["limits"]
    assert patch({}).json()["description"] == "x"
    for bad in (0, -1, 1.5, "8", True, 2**53):
        assert patch({"limits": {"concurrent_requests": bad}}).status_code == 422
    assert patch({"limits": {"requests": 1}}).status_code == 422
    own = ask.new_key(tenant="acme", scopes=["read", "write"])
    assert patch({"description": "mine"}, own).status_code == 200
    assert patch({"limits": {"concurrent_requests": None}}, own).status_code == 403
    step = {"op": "patch_tenant", "name": "acme", "if_match": "*"}
    bulk = {"operations": [{**step, "limits": {"context_tokens": 10}}]}
    assert own("POST", "/v1/bulk", bulk).status_code == 403
    assert ask("POST", "/v1/bulk", bulk).status_code == 200
    assert ask("GET", "/v1/tenants/acme").json()["limits"]["context_tokens"] == 10


def test_engine_that_hangs_is_behind_from_the_change_on(
    app: AdminApp, ask: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "APPLY_SECONDS", 0.3)
    apply, release = app.engine.apply, asyncio.Event()

    async def hang(*arguments: Any) -> Any:
        await release.wait()
        return await apply(*arguments)

    monkeypatch.setattr(app.engine, "apply", hang)
    began = time.monotonic()
    answer = ask("PATCH", "/v1/policies/default", {"target_sparsity": 0.5}, match="*").json()
    assert answer["applied"]["complete"] is False
    assert answer["applied"]["trouble"] == "no answer of the engine within 0 seconds"
    time.sleep(0.5)  # nobody asks meanwhile
    lowest, behind = 0.75, app.applier.behind_seconds()
    assert lowest < behind < time.monotonic() - began + 0.1


def test_etag_of_a_tenant_that_is_gone_is_not_its_namesakes(ask: Client) -> None:
    make_tenant(ask)
    read = ask("GET", "/v1/policies/acme")
    assert read.headers["etag"] == f'"{read.json()["revision"]}"' == '"2"'
    ask("DELETE", "/v1/tenants/acme", match="*")
    make_tenant(ask)
    path, patch = "/v1/policies/acme", {"target_sparsity": 0.5}
    assert ask("PATCH", path, patch, match=read.headers["etag"]).status_code == 412
    assert ask("PATCH", path, patch, match=ask("GET", path).headers["etag"]).status_code == 200

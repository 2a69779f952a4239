"""What every request has in common, whatever it asks for."""

import logging
from typing import Any

import pytest
from admin_app import AdminApp, Client, audit, eventually, make_tenant

ID = "X-Request-Id"
DEFAULT = "/v1/policies/default"


# Request ids


@pytest.mark.parametrize("given", ["r-1", "a" * 128, "Root=1-2:3/4+5@host_6.7", "0"])
def test_clients_own_id_is_in_its_answer_and_in_the_audit_log(ask: Client, given: str) -> None:
    answer = ask("PATCH", DEFAULT, {"probe_period": 8}, match="*", headers={ID: given})
    assert answer.headers[ID] == audit(ask)[0]["request_id"] == given


@pytest.mark.parametrize(
    "given", [None, "", "a" * 129, "two words", "a\tb", "é", "<b>", "spin_" + "A" * 43]
)
def test_request_without_a_good_id_gets_one(ask: Client, given: str | None) -> None:
    headers = {} if given is None else {ID: given.encode()}
    answer = ask("PATCH", DEFAULT, {"probe_period": 8}, match="*", headers=headers)
    found = answer.headers[ID]
    assert found == audit(ask)[0]["request_id"] != given
    assert len(found) == 32
    assert ask("GET", DEFAULT, headers=headers).headers[ID] != found


def test_request_with_two_ids_gets_another(ask: Client) -> None:
    headers = [("Authorization", f"Bearer {ask.key}"), (ID, "one"), (ID, "two")]
    assert ask.http.get(DEFAULT, headers=headers).headers[ID] not in ("one", "two")


def test_every_answer_has_its_requests_id(
    app: AdminApp, ask: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, text = {ID: "mine"}, {"Content-Type": "text/plain"}
    answers = [
        ask("GET", DEFAULT, headers=headers),
        ask("HEAD", DEFAULT, headers=headers),
        ask("GET", "/metrics", headers=headers),
        ask("GET", "/livez", headers=headers),
        ask("GET", "/nowhere", headers=headers),
        ask("PUT", DEFAULT, headers=headers),
        ask.with_key(None)("GET", DEFAULT, headers=headers),
        ask.with_key(None)("POST", "/v1/tenants", {"name": "a"}, headers=headers),
        ask("PATCH", DEFAULT, {"probe_period": 1}, headers=headers),
        ask("PATCH", DEFAULT, {"probe_period": -1}, match="*", headers=headers),
        ask("PATCH", DEFAULT, content=b"{}", match="*", headers={**headers, **text}),
        ask("PATCH", DEFAULT, content=b" " * 2**21, match="*", headers={**headers, **text}),
    ]

    def fail(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    logging.disable()
    monkeypatch.setattr(app.administration, "log", fail)
    headers["Authorization"] = f"Bearer {ask.key}"
    answers.append(ask.http.get("/v1/revisions", headers=headers))
    logging.disable(logging.NOTSET)
    codes = [200, 200, 200, 200, 404, 405, 401, 401, 428, 422, 415, 413, 500]
    assert [answer.status_code for answer in answers] == codes
    assert {answer.headers[ID] for answer in answers} == {"mine"}


# Methods, headers and bodies


@pytest.mark.parametrize(
    "path", [DEFAULT, "/v1/tenants", "/v1/status", "/v1/audit", "/livez", "/metrics", "/nowhere"]
)
def test_head_is_get_without_the_body(ask: Client, path: str) -> None:
    got, head = ask("GET", path), ask("HEAD", path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    own = {"content-length", "x-request-id"}
    assert {k: v for k, v in head.headers.items() if k not in own} == {
        k: v for k, v in got.headers.items() if k not in own
    }
    assert head.headers.keys() == got.headers.keys()


def test_head_needs_a_key_and_is_counted(ask: Client) -> None:
    assert ask.with_key(None)("HEAD", DEFAULT).status_code == 401
    assert ask("HEAD", "/v1/bulk").status_code == 405
    assert ask("PUT", DEFAULT).headers["allow"] == "GET, HEAD, PATCH"
    ask("HEAD", DEFAULT)
    counted = 'spin_admin_requests_total{code="200",method="HEAD",route="/v1/policies/{name}"} 1.0'
    assert counted in ask("GET", "/metrics").text


def test_repeated_if_match_is_refused(ask: Client) -> None:
    make_tenant(ask)
    key = ask("POST", "/v1/keys", {}).json()["id"]
    for method, path, body in (
        ("PATCH", DEFAULT, {"probe_period": 8}),
        ("PATCH", "/v1/tenants/acme", {"description": "x"}),
        ("POST", f"/v1/keys/{key}/rotate", {}),
        ("DELETE", f"/v1/keys/{key}", None),
        ("DELETE", "/v1/tenants/acme", None),
        ("POST", "/v1/revisions/1/revert", None),
    ):
        headers = [("Authorization", f"Bearer {ask.key}"), ("If-Match", '"1"'), ("if-match", "*")]
        answer = ask.http.request(method, path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (
            400,
            "expected one header If-Match, got several",
        )
    assert len(audit(ask)) == 3


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_body_that_is_not_utf_8_is_refused(ask: Client, encoding: str) -> None:
    answer = ask(
        "PATCH",
        DEFAULT,
        match="*",
        content='{"probe_period": 8}'.encode(encoding),
        headers={"Content-Type": f"application/json; charset={encoding}"},
    )
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("body: expected JSON in UTF-8, got ")


# What was expected, and what came


NAME = "a name of lower-case letters, digits and hyphens within, at most 63 in all"


@pytest.mark.parametrize(
    ("method", "path", "body", "detail"),
    [
        ("PATCH", DEFAULT, {"target_sparsity": 1.5}, "a number from 0 to 1, got 1.5"),
        ("PATCH", DEFAULT, {"ema_decay": True}, "a number from 0 to 1, got true"),
        ("PATCH", DEFAULT, {"ema_decay": {}}, "ema_decay: expected a number from 0 to 1, got an"),
        ("PATCH", DEFAULT, {"ema_decay": "1" * 99}, "got one of 101 characters"),
        (
            "PATCH",
            f"{DEFAULT}?canary_percent=101",
            {"probe_period": 1},
            "canary_percent: expected at most 100, got '101'",
        ),
        ("PATCH", f"{DEFAULT}?dryrun=All", {}, "dryrun: expected dryRun, got 'dryrun'"),
        ("PATCH", f"{DEFAULT}?dry_run=All", {}, "dry_run: expected dryRun, got 'dry_run'"),
        (
            "PATCH",
            f"{DEFAULT}?force=1",
            {},
            "force: expected dryRun or reason or ttl_seconds or canary_percent, got 'force'",
        ),
        ("PATCH", f"{DEFAULT}?dryRun=all", {}, "dryRun: expected 'All', got 'all'"),
        ("GET", f"{DEFAULT}?x=1", None, "x: expected nothing of this name"),
        ("GET", "/v1/tenants/Not_A_Label", None, f"name: expected {NAME}, got 'Not_A_Label'"),
        ("POST", "/v1/tenants", {"name": "-a"}, f"name: expected {NAME}, got '-a'"),
        ("POST", "/v1/tenants", {}, "name: expected it, got nothing"),
        ("POST", "/v1/tenants", {"name": "a", "limit": 1}, "limit: expected nothing of this name"),
        ("POST", "/v1/tenants", {"name": 1}, "name: expected a text, got 1"),
        (
            "PATCH",
            "/v1/tenants/acme",
            {"limits": {"foo": 1}},
            "limits: expected one of concurrent_requests, queued_tokens, context_tokens, got 'foo'",
        ),
        (
            "PATCH",
            "/v1/tenants/acme",
            {"limits": {"queued_tokens": "abc"}},
            "limits/queued_tokens: expected a whole number, got 'abc'",
        ),
        (
            "PATCH",
            "/v1/tenants/acme",
            {"limits": {"queued_tokens": 0}},
            "limits/queued_tokens: expected at least 1, got 0",
        ),
        ("PATCH", "/v1/tenants/default", {"limits": {}}, "which have no limits"),
        ("GET", "/v1/keys/key-0000000000000000", None, "no key 'key-0000000000000000'"),
        ("GET", "/v1/keys/key-1", None, "key_id: expected a key's id, such as key-01234"),
        ("GET", "/v1/tenants/nobody", None, "no tenant 'nobody'"),
        ("GET", "/v1/policies/nobody", None, "no policy 'nobody': expected 'default' or a tenant"),
        ("POST", "/v1/keys", {"scopes": ["x"]}, "scopes/0: expected 'read', 'write', 'keys' or"),
        ("GET", "/v1/tenants?limit=x", None, "limit: expected a whole number, got 'x'"),
        ("POST", "/v1/bulk", {"operations": [{"op": "x"}]}, "'delete_tenant' for 'op', got 'x'"),
    ],
)
def test_refusal_says_what_was_expected_and_what_came(
    ask: Client, method: str, path: str, body: Any, detail: str
) -> None:
    make_tenant(ask)
    answer = ask(method, path, body, match="*")
    assert answer.status_code in (404, 422)
    assert detail in answer.json()["detail"]
    assert "Input should" not in answer.text


def test_key_among_the_values_is_not_in_the_refusal(ask: Client) -> None:
    for body in ({"target_sparsity": ask.key}, {"probe_period": ask.key}, {ask.key: 1}):
        answer = ask("PATCH", DEFAULT, body, match="*")
        assert answer.status_code == 422
        assert ask.key[5:25] not in answer.text
    assert ask.key[5:25] not in ask("GET", f"{DEFAULT}?{ask.key}=1").text
    assert ask.key[5:25] not in ask("GET", f"/v1/policies/{ask.key}").text


@pytest.mark.parametrize(
    ("method", "path", "doing"), [("DELETE", "", "revoke"), ("POST", "/rotate", "replace")]
)
def test_key_that_may_do_more_is_out_of_reach(
    ask: Client, method: str, path: str, doing: str
) -> None:
    stronger = ask("POST", "/v1/keys", {"scopes": ["audit", "write"]}).json()["id"]
    weaker = ask.new_key(scopes=["keys", "read"])
    body = {} if method == "POST" else None
    answer = weaker(method, f"/v1/keys/{stronger}{path}", body, match="*")
    assert (answer.status_code, answer.json()["detail"]) == (
        403,
        f"this key cannot {doing} a key that has audit, write: it does not have that itself",
    )
    refusal = weaker("POST", "/v1/keys", {"scopes": ["audit"]}).json()["detail"]
    assert refusal == "this key cannot grant audit: it does not have that itself"


# What answers warn of, and show


LEFT = "no tenant is left: the serving API needs no key"


def test_answer_says_that_the_last_tenant_goes(ask: Client) -> None:
    for name in ("acme", "other"):
        make_tenant(ask, name)
    assert ask("DELETE", "/v1/tenants/other", match="*").json()["warnings"] == []
    assert ask("GET", "/v1/status").json()["serving_needs_key"] is True
    bulk = {"operations": [{"op": "delete_tenant", "name": "acme", "if_match": "*"}]}
    for method, path, body in (
        ("DELETE", "/v1/tenants/acme", None),
        ("POST", "/v1/revisions/1/revert", None),
        ("POST", "/v1/bulk", bulk),
    ):
        for query in ("?dryRun=All", ""):
            answer = ask(method, path + query, body, match="*")
            assert (answer.status_code, answer.json()["warnings"]) == (200, [LEFT]), path
        assert ask("GET", "/v1/status").json()["serving_needs_key"] is False
        make_tenant(ask)


def test_revert_says_what_is_not_brought_back(app: AdminApp, ask: Client) -> None:
    make_tenant(ask, target_sparsity=0.4)
    ask("PATCH", "/v1/policies/acme?ttl_seconds=60", {"target_sparsity": 0.6}, match="*")
    ask("PATCH", "/v1/policies/acme", {"target_sparsity": 0.9}, match="*")
    app.offset += app.offset.resolution * 61_000_000
    eventually(lambda: ask("GET", "/v1/policies/acme").json()["expires_at"] is None)
    said = ["what was set until a time that has passed is not brought back: acme"]
    for query in ("?dryRun=All", ""):
        answer = ask("POST", f"/v1/revisions/3/revert{query}", match="*").json()
        assert answer["warnings"] == said
        (change,) = answer["changes"]
        assert change["after"] == {"fields": {"target_sparsity": 0.4}}
    assert float(app.engine.policy("acme").sparsity) == 0.4
    assert ask("POST", "/v1/revisions/2/revert", match="*").json()["warnings"] == []


def test_policy_of_which_nothing_is_set_is_shown_as_none(ask: Client) -> None:
    ask("PATCH", DEFAULT, {"target_sparsity": 0.5}, match="*")
    ask("PATCH", DEFAULT, {"target_sparsity": None}, match="*")
    (change,) = audit(ask)[0]["changes"]
    assert (change["before"], change["after"]) == ({"fields": {"target_sparsity": 0.5}}, None)
    assert ask("GET", "/v1/revisions/1/diff").json()["changes"] == []
    assert ask("GET", DEFAULT).json()["revision"] == 3
    ask("PATCH", DEFAULT, {"target_sparsity": 0.6}, match="*")
    assert audit(ask)[0]["changes"][0]["before"] is None


def test_shares_are_numbers_wherever_they_are_shown(ask: Client) -> None:
    ask("PATCH", DEFAULT, {"target_sparsity": "0.25", "ema_decay": "0.5"}, match="*")
    ask("PATCH", f"{DEFAULT}?ttl_seconds=60", {"target_sparsity": "0.75"}, match="*")
    ask("PATCH", f"{DEFAULT}?canary_percent=5", {"exploration_share": ".1"}, match="*")
    after = audit(ask)[0]["changes"][0]["after"]
    del after["expires"]["at"]
    assert after == {
        "fields": {"target_sparsity": 0.75, "ema_decay": 0.5},
        "expires": {"restore": {"target_sparsity": 0.25, "ema_decay": 0.5}},
        "canary": {"percent": 5, "fields": {"exploration_share": 0.1}},
    }


def test_status_shows_what_is_not_to_last(ask: Client) -> None:
    for name in ("acme", "other"):
        make_tenant(ask, name)
        ask("PATCH", f"/v1/policies/{name}?ttl_seconds=60", {"probe_period": 8}, match="*")
        ask("PATCH", f"/v1/policies/{name}?canary_percent=5", {"ema_decay": 0.1}, match="*")
    found = ask("GET", "/v1/status").json()
    assert sorted(limit["name"] for limit in found["time_limits"]) == ["acme", "other"]
    assert found["canaries"] == [{"name": name, "percent": 5} for name in ("acme", "other")]
    own = ask.new_key(tenant="acme", scopes=["read"])("GET", "/v1/status").json()
    assert [limit["name"] for limit in own["time_limits"]] == ["acme"]
    assert own["canaries"] == [{"name": "acme", "percent": 5}]


def test_key_that_has_ended_is_said_to_have(ask: Client, app: AdminApp) -> None:
    made = ask("POST", "/v1/keys", {"expires_at": "2500-01-01T00:00:00Z"}).json()
    assert made["ended"] is False
    app.offset += app.offset.resolution * 1_000_000 * 86400 * 366 * 500
    keys = {key["id"]: key["ended"] for key in ask("GET", "/v1/keys").json()["items"]}
    assert keys[made["id"]] is True
    assert sorted(keys.values()) == [False, True]

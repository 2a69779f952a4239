"""Who may do what over HTTP, and where keys must not be seen."""

import logging
from pathlib import Path

import pytest
from admin_app import AdminApp, Client, make_tenant

SECRET_ROUTES = ("/livez", "/readyz", "/metrics")


def operations(app: AdminApp) -> list[tuple[str, str]]:
    return [
        (method.upper(), path.replace("{name}", "acme").replace("{revision}", "1"))
        for path, found in app.app.openapi()["paths"].items()
        for method in found
    ]


def test_every_route_needs_a_key_and_its_scope(app: AdminApp, ask: Client) -> None:
    make_tenant(ask)
    made = ask("POST", "/v1/keys", {"tenant": "acme"}).json()
    weak, foreign = ask.with_key(made["key"]), ask.new_key(scopes=[])
    bodies = {
        "/v1/policies/acme": {"target_sparsity": 0.5},
        "/v1/tenants": {"name": "b"},
        "/v1/tenants/acme": {"description": "x"},
        "/v1/keys": {"tenant": "acme"},
        "/v1/bulk": {"operations": [{"op": "create_tenant", "name": "b"}]},
    }
    for method, path in operations(app):
        body = bodies.get(path, {}) if method in ("PATCH", "POST") else None
        path = path.replace("{key_id}", made["id"])
        for key, status in ((None, 401), ("spin_wrong", 401), (weak.key, 403), (foreign.key, 403)):
            answer = ask.with_key(key)(method, path, body, match="*")
            assert answer.status_code == status, (method, path, answer.text)
    for path in SECRET_ROUTES:
        assert ask.with_key(None)("GET", path).status_code == 200


def test_key_of_a_tenant_is_good_for_that_tenant_only(ask: Client) -> None:
    make_tenant(ask, "acme")
    make_tenant(ask, "other")
    bound = ask.new_key(tenant="acme", scopes=["read", "write", "keys", "audit"])
    assert bound("GET", "/v1/policies/acme").status_code == 200
    patch = {"target_sparsity": 0.5}
    assert bound("PATCH", "/v1/policies/acme", patch, match="*").status_code == 200
    for method, path, body in (
        ("GET", "/v1/policies/other", None),
        ("GET", "/v1/policies/default", None),
        ("PATCH", "/v1/policies/other", patch),
        ("PATCH", "/v1/policies/default", patch),
        ("POST", "/v1/tenants", {"name": "new"}),
        ("DELETE", "/v1/tenants/acme", None),
        ("POST", "/v1/keys", {"tenant": None, "scopes": []}),
        ("POST", "/v1/keys", {"tenant": "other", "scopes": []}),
        ("GET", "/v1/audit", None),
        ("POST", "/v1/revisions/0/revert", None),
        ("POST", "/v1/bulk", {"operations": [{"op": "create_tenant", "name": "b"}]}),
    ):
        assert bound(method, path, body, match="*").status_code == 403, (method, path)
    status = bound("GET", "/v1/status").json()
    assert (status["default_policy"], status["keys"]) == (None, None)
    assert status["tenant_policy"]["name"] == "acme"
    assert status["realized"]["realized_sparsity"] == 0.5
    assert list(status["realized"]["by_tenant"]) == ["acme"]
    realized = ask("GET", "/v1/status").json()["realized"]
    assert realized["realized_sparsity"] == 80 / 200
    assert realized["by_tenant"]["default"]["realized_sparsity"] == 0.3
    assert [t["name"] for t in bound("GET", "/v1/tenants").json()["items"]] == ["acme"]
    first = ask("GET", "/v1/keys").json()["items"]
    foreign = next(key["id"] for key in first if key["tenant"] is None)
    assert bound("DELETE", f"/v1/keys/{foreign}", match="*").status_code == 404


def test_nobody_hands_out_more_than_he_has(ask: Client) -> None:
    clerk = ask.new_key(scopes=["keys", "read"])
    assert clerk("POST", "/v1/keys", {"scopes": ["write"]}).status_code == 403
    strong = ask("POST", "/v1/keys", {"scopes": ["write"]}).json()["id"]
    assert clerk("POST", f"/v1/keys/{strong}/rotate", {}, match="*").status_code == 403
    assert clerk("POST", "/v1/keys", {"scopes": ["read"]}).status_code == 201


def test_key_that_is_revoked_meanwhile_writes_nothing(tmp_path: Path) -> None:
    one, two = AdminApp(tmp_path), AdminApp(tmp_path)
    two.applier._period = 3600.0  # it learns of nothing by itself
    with one.client() as ask_one, two.client() as ask_two:
        made = ask_one("POST", "/v1/keys", {"scopes": ["read", "write", "keys", "audit"]}).json()
        two.administration.refresh()
        thief = ask_two.with_key(made["key"])
        assert thief("GET", "/v1/status").status_code == 200
        assert ask_one("DELETE", f"/v1/keys/{made['id']}", match="*").status_code == 200
        assert thief("POST", "/v1/keys", {"scopes": ["read"]}).status_code == 401
        assert thief("GET", "/v1/status").status_code == 401  # and now it knows


def test_rotation_overlaps_and_then_ends(app: AdminApp, ask: Client) -> None:
    made = ask("POST", "/v1/keys", {"scopes": ["read"], "description": "ci"}).json()
    url = f"/v1/keys/{made['id']}/rotate"
    turned = ask("POST", url, {"overlap_seconds": 60}, match=f'"{made["revision"]}"').json()
    assert (turned["scopes"], turned["description"]) == (["read"], "ci")
    old, new = ask.with_key(made["key"]), ask.with_key(turned["key"])
    assert old("GET", "/v1/status").status_code == new("GET", "/v1/status").status_code == 200
    again = ask("POST", url, {}, match="*")
    assert again.status_code == 409
    assert turned["id"] in again.json()["detail"]
    app.offset += app.offset.resolution * 61_000_000
    assert old("GET", "/v1/status").status_code == 401
    assert new("GET", "/v1/status").status_code == 200


def test_no_key_is_in_any_answer_log_metric_or_audit(
    app: AdminApp, ask: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    make_tenant(ask)
    made = ask("POST", "/v1/keys", {"tenant": "acme", "scopes": ["read"]}).json()
    turned = ask("POST", f"/v1/keys/{made['id']}/rotate", {}, match="*").json()
    secrets = [ask.key or "", made["key"], turned["key"]]
    texts = []
    for secret in secrets:
        body, headers = {"description": f"x {secret}"}, {"X-Request-Id": secret}
        url = f"/v1/tenants/acme?reason={secret}"
        answer = ask("PATCH", url, body, match="*", headers=headers)
        assert answer.status_code == 200
        texts.append(answer.text)
    for secret in [*secrets, "spin_" + "A" * 43]:
        client = ask.with_key(secret)
        for method, path in operations(app):
            path = path.replace("{key_id}", made["id"])
            texts.append(client(method, path, {"key": secret} if method != "GET" else None).text)
        texts.append(client("GET", "/metrics").text)
        texts.append(client("PATCH", "/v1/policies/default", {secret: secret}, match="*").text)
    app.engine.fault = RuntimeError("the engine is gone")
    texts.append(ask("GET", "/v1/status").text)
    # The test's own client logs what it sends; it is no part of the product.
    ours = [r.getMessage() for r in caplog.records if not r.name.startswith("httpx")]
    texts += [ask("GET", "/v1/audit?limit=500").text, *ours]
    for secret in secrets:
        assert not any(secret in text for text in texts)
        hashes = [
            d.body["sha256"]
            for r, d in app.administration.state.documents.items()
            if r.kind == "key"
        ]
        assert not any(digest in text for text in texts for digest in hashes)

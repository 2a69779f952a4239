"""What of a request's body the admin API reads, and what it makes of it."""

import asyncio
from typing import Any

import pytest
from admin_app import AdminApp, Client

from spin_server.admin.http import limits


def test_body_of_another_type_or_size_is_refused(ask: Client) -> None:
    url, headers = "/v1/policies/default", {"Content-Type": "text/plain"}
    answer = ask("PATCH", url, match="*", content=b"{}", headers=headers)
    assert answer.status_code == 415
    large = b'{"target_sparsity": "' + b"0" * 2**20 + b'"}'
    headers = {"Content-Type": "application/json"}
    assert ask("PATCH", url, match="*", content=large, headers=headers).status_code == 413
    pieces = (large[i : i + 65536] for i in range(0, len(large), 65536))  # no length announced
    assert ask("PATCH", url, match="*", content=pieces, headers=headers).status_code == 413


def test_request_that_breaks_off_does_nothing(app: AdminApp) -> None:
    sent: list[Any] = []
    parts = iter(
        [
            {"type": "http.request", "body": b'{"name":"half"}', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [
        (b"authorization", f"Bearer {app.key}".encode()),
        (b"content-type", b"application/json"),
        (b"content-length", b"5000"),
    ]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/tenants",
        "raw_path": b"/v1/tenants",
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
    }
    asyncio.run(app.app(scope, receive, send))
    assert sent == []
    assert app.administration.state.tenants == []
    app.store.close()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"probe_period": 1, "probe_period": 2}', "expected each member of an object once"),
        (b'{"probe_period": 1', "expected JSON, got something else at line 1, column 19"),
        (b"probe_period=1", "expected JSON, got something else at line 1, column 1"),
        (b'{"probe_period": "\xff"}', "expected JSON in UTF-8, got other bytes"),
        (b"[" * 100_000, "expected JSON of ordinary depth"),
        (b'{"probe_period": ' + b"9" * 5000 + b"}", "numbers of ordinary length"),
    ],
)
def test_body_that_means_nothing_or_two_things_is_refused(
    ask: Client, body: bytes, detail: str
) -> None:
    headers = {"content-type": "application/json", "if-match": "*"}
    headers["authorization"] = f"Bearer {ask.key}"
    answer = ask.http.patch("/v1/policies/default", content=body, headers=headers)
    assert answer.status_code == 422
    assert detail in answer.json()["detail"]
    assert ask("GET", "/v1/policies/default").json()["revision"] == 0


def test_nothing_of_an_unknown_callers_body_is_read(
    app: AdminApp, ask: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(limits, "_fault", lambda body: read.append(len(body)))
    nested = b"[" * 1000 + b"]" * 1000
    headers = {"Content-Type": "application/json"}
    for key in (None, "spin_" + "A" * 43, ""):
        stranger = ask.with_key(key)
        for content in (nested, iter([nested])):  # announced, and not
            answer = stranger("POST", "/v1/bulk", content=content, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert read == []
    assert ask("POST", "/v1/bulk", content=nested, headers=headers).status_code == 400
    assert read == [2000]


def test_slow_body_is_let_go(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_READ_SECONDS", 0.05)

    async def never(_: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    monkeypatch.setattr(limits, "_read", never)
    answer = ask("POST", "/v1/bulk", {"operations": []})
    assert answer.status_code == 408
    assert "expected the whole body within 0 seconds" in answer.json()["detail"]

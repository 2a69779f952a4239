"""Who comes in by the door of the server, and with what."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from spin_server.engine.tenancy import door
from spin_server.engine.tenancy.callers import Caller, UnknownCallerError, current_caller
from spin_server.engine.tenancy.routes import FREE, SERVED

KEYS = {"Bearer good": Caller("acme"), "Bearer nobodys": Caller(None)}


class Keys:
    """Knows two keys, once there are tenants."""

    def __init__(self) -> None:
        self.tenants = True

    def configured(self) -> bool:
        return self.tenants

    def caller(self, authorization: str | None) -> Caller:
        if authorization not in KEYS:
            raise UnknownCallerError("no such key")
        return KEYS[authorization]


async def _echo(request: Request) -> JSONResponse:
    caller = current_caller()
    body = await request.body()
    # What a handler starts belongs to the caller, too.
    later = await asyncio.create_task(_later())
    assert later == caller
    return JSONResponse(
        {
            "tenant": caller.tenant if caller else "unasked",
            "bytes": len(body),
            "id": request.headers.get("x-request-id"),
        }
    )


async def _forgiving(request: Request) -> JSONResponse:
    try:
        await request.body()
    except Exception:  # as FastAPI does
        return JSONResponse({"error": "parsing the body"}, 400)
    return JSONResponse({})


async def _later() -> Caller | None:
    return current_caller()


async def _talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    found = Keys()
    monkeypatch.setattr(door, "_authenticator", found)
    return found


@pytest.fixture
def http(keys: Keys) -> Iterator[TestClient]:
    routes: list[Any] = [
        Route(path, _echo, methods=["GET", "POST", "OPTIONS", "DELETE"])
        for path in sorted({path for _, path in FREE | SERVED} - {"/tokenize"})
    ]
    routes.append(Route("/tokenize", _forgiving, methods=["POST"]))
    routes += [
        Route("/v1/unheard-of", _echo, methods=["POST"]),
        WebSocketRoute("/v1/realtime", _talk),
    ]
    with TestClient(door.TenantDoor(Starlette(routes=routes))) as client:
        yield client


def key(text: str = "Bearer good", **more: str) -> dict[str, str]:
    return {"Authorization": text, **more}


@pytest.mark.parametrize("endpoint", sorted(SERVED - {("POST", "/tokenize")}))
def test_served_routes_need_a_key_and_know_whose_it_is(
    http: TestClient, endpoint: tuple[str, str]
) -> None:
    method, path = endpoint
    refused = http.request(method, path)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert refused.json()["error"] == {
        "message": "no such key",
        "type": "Unauthorized",
        "param": None,
        "code": 401,
    }
    assert http.request(method, path, headers=key()).json()["tenant"] == "acme"
    assert http.request(method, path, headers=key("Bearer nobodys")).json()["tenant"] is None
    assert current_caller() is None


@pytest.mark.parametrize("endpoint", sorted(FREE))
def test_probes_and_metrics_need_none(http: TestClient, endpoint: tuple[str, str]) -> None:
    assert http.request(*endpoint).json()["tenant"] == "unasked"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/unheard-of"),
        ("DELETE", "/v1/completions"),
        ("POST", "//v1/completions"),
        ("POST", "/v1/completions/"),
        ("POST", "/V1/completions"),
        ("POST", "/health/../v1/unheard-of"),
        ("POST", "/metrics/../v1/unheard-of"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/inference/v1/abort_requests"),
        ("OPTIONS", "/v1/completions"),
    ],
)
def test_every_other_route_is_denied_key_or_not(http: TestClient, method: str, path: str) -> None:
    assert http.request(method, path).status_code == 401
    assert http.request(method, path, headers=key()).status_code == 403


def test_preflight_of_a_browser_passes_and_nothing_else_without_a_key(http: TestClient) -> None:
    asked = {"access-control-request-method": "POST", "origin": "https://a"}
    assert http.options("/v1/completions", headers=asked).status_code == 200
    assert http.post("/v1/completions", headers=asked).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer good"), ("Authorization", "Bearer good")],
        [("Authorization", "Bearer bad"), ("authorization", "Bearer good")],
        [("X-Authorization", "Bearer good")],
        [("Proxy-Authorization", "Bearer good")],
        [("Cookie", "Authorization=Bearer good")],
        [("Authorization", "")],
        [("Authorization", "Bearer\tgood")],
        [("Authorization", "bearer good, Bearer good")],
    ],
)
def test_only_one_header_that_is_a_key_lets_in(
    http: TestClient, headers: list[tuple[str, str]]
) -> None:
    assert http.post("/v1/completions", headers=headers).status_code == 401


@pytest.mark.parametrize("query", ["key=good", "Authorization=Bearer%20good", "api_key=good"])
def test_key_in_the_address_is_none(http: TestClient, query: str) -> None:
    assert http.post(f"/v1/completions?{query}").status_code == 401


def test_id_of_a_client_is_taken_off(http: TestClient, keys: Keys) -> None:
    headers = key(**{"X-Request-Id": "another's"})
    assert http.post("/v1/completions", headers=headers).json()["id"] is None
    keys.tenants = False
    assert http.post("/v1/completions", headers=headers).json()["id"] == "another's"


def test_body_has_its_bounds(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MOST_BODY_BYTES", 1000)
    assert http.post("/v1/completions", headers=key(), content=b"x" * 1000).json()["bytes"] == 1000

    def pieces() -> Iterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    for path, content in (  # told beforehand, and not
        ("/v1/completions", b"x" * 1001),
        ("/v1/completions", pieces()),
        ("/tokenize", pieces()),
    ):
        refused = http.post(path, headers=key(), content=content)
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == "expected a body of at most 1,000 bytes"


def test_websocket_without_a_route_for_tenants_is_closed(http: TestClient, keys: Keys) -> None:
    for headers in ({}, key()):
        with (
            pytest.raises(WebSocketDisconnect) as closed,
            http.websocket_connect("/v1/realtime", headers=headers),
        ):
            pass
        assert closed.value.code == 1008
    keys.tenants = False
    with http.websocket_connect("/v1/realtime"):
        pass


def test_without_tenants_nobody_is_asked(http: TestClient, keys: Keys) -> None:
    keys.tenants = False
    for path in ("/v1/completions", "/v1/unheard-of"):
        assert http.post(path, headers=key("Bearer bad")).json()["tenant"] == "unasked"


def test_one_connection_serves_two_tenants_one_after_the_other(http: TestClient) -> None:
    found = [
        http.post("/v1/completions", headers=key(text)).json()["tenant"]
        for text in ("Bearer good", "Bearer nobodys", "Bearer good")
    ]
    assert found == ["acme", None, "acme"]

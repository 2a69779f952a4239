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

from spin_server.engine.spin.metrics import OTHER, SpinCollector
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.tenancy import door
from spin_server.engine.tenancy.callers import Caller, UnknownCallerError, Visit, current_visit
from spin_server.engine.tenancy.limits import Limits
from spin_server.engine.tenancy.refusals import Refusals
from spin_server.engine.tenancy.routes import FREE, SERVED, TOKEN_COUNTS
from spin_server.errors import InputError

KEYS = {
    "Bearer good": Caller("acme"),
    "Bearer nobodys": Caller(None),
    "Bearer limited": Caller("acme", Limits(concurrent_requests=2)),
}


def current_caller() -> Caller | None:
    visit = current_visit()
    return visit.caller if visit else None


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
def refusals() -> Refusals:
    collector = SpinCollector("m", SpinSettings(capacity=4), {})
    collector.name_rows({"acme": 1}, 1)
    return Refusals(collector)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, refusals: Refusals) -> Keys:
    found = Keys()
    monkeypatch.setattr(door, "_porter", door.Porter(found, refusals, max_tokens=1000))
    return found


def counted(refusals: Refusals) -> dict[tuple[str, str], float]:
    (family,) = refusals.collect()
    return {(s.labels["tenant"], s.labels["status"]): s.value for s in family.samples}


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


@pytest.mark.parametrize("path", sorted(path for _, path in TOKEN_COUNTS))
def test_body_of_a_token_count_is_bounded_by_the_longest_context(
    http: TestClient, path: str
) -> None:
    most = 2**16 + 8 * 1000
    assert http.post(path, headers=key(), content=b"x" * most).status_code == 200
    refused = http.post(path, headers=key(), content=b"x" * (most + 1))
    assert refused.json()["error"]["message"] == f"expected a body of at most {most:,} bytes"


async def ask(app: Any, path: str, text: str = "Bearer good", pause: float = 0) -> list[Any]:
    """Send one request, its body after a pause; what was answered."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    scope["headers"] = [(b"authorization", text.encode())]
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    await door.TenantDoor(app)(scope, receive, send)
    return sent


START = {"type": "http.response.start", "status": 200, "headers": []}


def piece(text: bytes, *, more: bool = True) -> Any:
    return {"type": "http.response.body", "body": text, "more_body": more}


def visit_here() -> Visit:
    visit = current_visit()
    assert visit is not None
    return visit


@pytest.mark.parametrize("refused", [True, False])
def test_stream_that_begins_before_the_engine_is_asked_is_held_back_until_then(
    keys: Keys, refusals: Refusals, *, refused: bool
) -> None:
    from vllm.exceptions import GracefulHTTPError

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        await send(piece(b"created"))
        if refused:
            visit_here().refusal = GracefulHTTPError("too many", 429)
            raise RuntimeError("response already started")
        visit_here().admitted = True
        await send(piece(b"token"))
        assert len(seen) == 3, "nothing is held any longer"
        await send(piece(b"", more=False))

    seen: list[Any] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            await send(message)
            seen.append(message)

        await app(scope, receive, noted)

    found = asyncio.run(ask(watched, "/v1/responses"))
    if refused:
        assert found[0]["status"] == 429
        assert (b"retry-after", b"1") in found[0]["headers"]
        assert b"too many" in found[1]["body"]
        assert counted(refusals) == {("acme", "429"): 1}
    else:
        assert [m.get("body") for m in found] == [None, b"created", b"token", b""]
        assert counted(refusals) == {}


@pytest.mark.parametrize("refused", [True, False])
def test_stream_is_held_back_where_nobody_needs_a_key_too(keys: Keys, *, refused: bool) -> None:
    keys.tenants = False

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        if refused:
            visit_here().refusal = InputError("vllm_xargs.spin_policy", "absent", "x")
            raise RuntimeError("response already started")
        visit_here().admitted = True
        await send(piece(b"token", more=False))

    found = asyncio.run(ask(app, "/v1/responses", "Bearer bad"))
    assert [found[0]["status"], len(found)] == [400 if refused else 200, 2]


def test_key_that_is_over_once_the_body_has_come_is_refused(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.setitem(KEYS, "Bearer short", Caller("acme"))

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        monkeypatch.delitem(KEYS, "Bearer short")
        await receive()
        await send(START)

    assert asyncio.run(ask(app, "/tokenize", "Bearer short"))[0]["status"] == 401
    assert counted(refusals) == {("acme", "401"): 1}


def test_failure_that_is_no_refusal_stays_one(keys: Keys) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        asyncio.run(ask(app, "/v1/responses"))


def test_what_vllm_refuses_once_the_stream_has_begun_is_400(keys: Keys) -> None:
    from vllm.exceptions import VLLMValidationError

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        visit_here().admitted = True
        raise RuntimeError("response already started") from VLLMValidationError("no such grammar")

    found = asyncio.run(ask(app, "/v1/responses"))
    assert found[0]["status"] == 400
    assert b"no such grammar" in found[1]["body"]


def test_refusal_of_ours_is_400(keys: Keys) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        visit_here().refusal = InputError("prompt", "fewer tokens", 7)
        raise RuntimeError("response already started")

    assert asyncio.run(ask(app, "/v1/responses"))[0]["status"] == 400


def test_body_that_does_not_come_ends_the_wait(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 0.01)

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
        except Exception:  # as FastAPI does
            await send({**START, "status": 400})

    assert asyncio.run(ask(app, "/v1/completions", pause=5))[0]["status"] == 408
    assert counted(refusals) == {("acme", "408"): 1}


def test_client_may_take_his_time_once_the_body_is_read(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 0.01)

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.wait_for(receive(), 5)  # whether the client is gone
        await send(START)
        await send(piece(b"", more=False))

    assert asyncio.run(ask(app, "/v1/completions", pause=0.005))[0]["status"] == 200


def test_token_counts_of_a_tenant_run_side_by_side_as_far_as_its_requests(
    keys: Keys, refusals: Refusals
) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        await send(START)
        await send(piece(b"", more=False))

    async def run() -> list[int]:
        asked = [ask(app, "/tokenize", "Bearer limited") for _ in range(3)]
        asked += [ask(app, "/tokenize", "Bearer nobodys") for _ in range(3)]
        first = [found[0]["status"] for found in await asyncio.gather(*asked)]
        return [*first, (await ask(app, "/tokenize", "Bearer limited"))[0]["status"]]

    assert asyncio.run(run()) == [200, 200, 429, 200, 200, 200, 200]
    assert counted(refusals) == {("acme", "429"): 1}


def test_refusals_are_counted_by_tenant_and_status(http: TestClient, refusals: Refusals) -> None:
    http.post("/v1/completions", headers=key("Bearer bad"))
    http.post("/v1/unheard-of", headers=key())
    http.post("/v1/unheard-of", headers=key("Bearer nobodys"))
    http.post("/v1/completions", headers=key())
    assert counted(refusals) == {("", "401"): 1, ("acme", "403"): 1, ("default", "403"): 1}
    refusals._label = lambda _: OTHER  # type: ignore[method-assign,assignment]
    assert counted(refusals) == {("", "401"): 1, ("_other", "403"): 2}


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

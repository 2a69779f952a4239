"""Two tenants on one server, and what they, or nobody, may try: refused, or harmless."""

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import live_server
import pytest
from live_server import LiveServer
from recorded import replayed

from spin_server.admin.administration import Administration, Author
from spin_server.admin.documents import Limits
from spin_server.admin.operations import (
    NewKey,
    create_key,
    create_tenant,
    patch_policy,
    together,
)
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.algorithm.options import SpinOptions
from spin_server.policy.policy import Policy

PROMPT = [(index * 7919) % 200 + 30 for index in range(7900)]
ADDRESS = re.compile(r"admin API at (http://127\.0\.0\.1:\d+)")
SPARSITIES = {"gentle": "0.3", "harsh": "0.65"}


@pytest.fixture(scope="module")
def keys() -> dict[str, NewKey]:
    return {name: NewKey.draw() for name in (*SPARSITIES, "small", "reader")}


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, keys: dict[str, NewKey]
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("attacks")
    store, now, operations = SqliteStore(folder / "admin.db"), datetime.now(UTC), []
    for name, sparsity, limits in (
        *((name, sparsity, None) for name, sparsity in SPARSITIES.items()),
        ("small", "0.3", Limits(concurrent_requests=2)),
    ):
        document = keys[name].document(
            tenant=name, scopes=[], description="", now=now, expires_at=None
        )
        operations += [
            create_tenant(name, "", now=now, limits=limits),
            patch_policy(name, {"target_sparsity": sparsity}, "*", now=now),
            create_key(keys[name], document, now=now),
        ]
    reader = keys["reader"].document(
        tenant=None, scopes=["read"], description="", now=now, expires_at=None
    )
    operations.append(create_key(keys["reader"], reader, now=now))
    Administration(store, Policy()).perform(together(operations), Author("test", "test"))
    store.close()
    arguments = (
        *("--max-model-len", "8192", "--max-num-seqs", "8", "--spin-allow-request-policy"),
        *("--admin-store", str(folder / "admin.db"), "--admin-port", "0"),
        *("--spin-record", str(folder / "traces"), "--spin-record-requests", "40"),
    )
    with live_server.running(tiny_model, folder / "log", *arguments) as running:
        yield running


def raw(server: LiveServer, text: str, body: bytes = b"", idle: float = 60) -> list[int]:
    """Send bytes as they are; the status of every answer until the server closes, or idles."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=idle) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode("latin-1") + body)
        found = b""
        with suppress(TimeoutError):
            while part := connection.recv(65536):
                found += part
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", found)]


def asked(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1, **more}).encode()


def post(
    body: bytes, *headers: str, path: str = "/v1/completions", connection: str = "close"
) -> str:
    lines = [f"POST {path} HTTP/1.1", "Host: h", "Content-Type: application/json", *headers]
    lines.append(f"Connection: {connection}")
    return "\n".join([*lines, f"Content-Length: {len(body)}", "", ""])


def skipped(server: LiveServer, reader: NewKey) -> dict[str, tuple[float, float]]:
    """Blocks of each tenant's sparse steps so far, and how many of them were skipped."""
    address = ADDRESS.search(server.log.read_text(errors="replace"))
    assert address is not None
    request = urllib.request.Request(
        address[1] + "/v1/status", headers={"Authorization": f"Bearer {reader.secret}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found = json.load(response)["realized"]["by_tenant"]
    return {
        name: (f["sparse_step_blocks"], f["sparse_step_blocks"] * (f["realized_sparsity"] or 0))
        for name in (*SPARSITIES, "default")
        for f in [found.get(name, {"sparse_step_blocks": 0, "realized_sparsity": None})]
    }


def share(before: tuple[float, float], after: tuple[float, float]) -> float:
    blocks = after[0] - before[0]
    assert blocks > 0
    return (after[1] - before[1]) / blocks


def cached(answer: dict[str, Any]) -> int:
    """Tokens of a prompt that were found in the prefix cache."""
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_a_thousand_requests_of_two_tenants_are_kept_apart(
    server: LiveServer, keys: dict[str, NewKey]
) -> None:
    documents = {
        name: [(index * 31 + number) % 200 + 30 for index in range(24 * 256)]
        for number, name in enumerate(SPARSITIES)
    }
    names = list(SPARSITIES)

    def usage(name: str) -> list[float]:
        label, found = f'tenant="{name}"', server.metrics()
        return [
            sum(
                value
                for sample, value in found.items()
                if sample.startswith(kind) and label in sample
            )
            for kind in ("spin_requests_total", "spin_generation_tokens_total")
        ]

    def ask(number: int, document: str = "") -> dict[str, Any]:
        name = names[number % 2]
        own = [30 + number % 97, 30 + number // 97, *range(40, 46)]
        prompt = documents[document or name] + own
        return server.complete(prompt, keys[name].secret, max_tokens=6)

    assert [cached(ask(number)) for number in (0, 1)] == [0, 0]
    before = {name: (usage(name), skipped(server, keys["reader"])[name]) for name in names}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(1000)))
    for answer in answers:
        assert answer["usage"]["completion_tokens"] == 6
        assert cached(answer) == 24 * 256
    after = {name: (usage(name), skipped(server, keys["reader"])[name]) for name in names}
    # Of 25 blocks 18 and 9 are kept.
    for name, sparsity in (("gentle", 0.28), ("harsh", 0.64)):
        (requests, tokens), (old_requests, old_tokens) = after[name][0], before[name][0]
        assert (requests - old_requests, tokens - old_tokens) == (500, 3000)
        assert share(before[name][1], after[name][1]) == pytest.approx(sparsity, abs=1e-6)
    # A thousand requests later, nobody finds the other's document.
    assert [cached(ask(0, names[1])), cached(ask(1, names[0]))] == [0, 0]
    policies = {name: {"sparsity": sparsity} for name, sparsity in SPARSITIES.items()}
    traces = sorted((server.log.parent / "traces").glob("*.npz"))
    sparse = [
        sum(not step.dense for step in replayed(path, SpinOptions(), policies)[0])
        for path in traces
    ]
    assert len(sparse) == 40
    assert min(sparse) >= 3


def test_second_request_in_a_body_needs_its_own_key(
    server: LiveServer, keys: dict[str, NewKey]
) -> None:
    bearer = f"Authorization: Bearer {keys['harsh'].secret}"
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
    body = asked()
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    # Two lengths that disagree: whichever wins, what is hidden has no key.
    for said, more, sent in (
        (chunked, ["Transfer-Encoding: chunked"], chunked),
        (body, [], body),
        (body[:10], [], body),
        (body, ["Content-Length: 3"], body),
        (body, ["Transfer-Encoding: x, chunked"], body),
    ):
        text = post(said, bearer, *more, connection="keep-alive")
        found = raw(server, text, sent + hidden, idle=1.5)
        assert found[0] in (200, 400, 501), (text, found)
        assert all(status in (400, 401) for status in found[1:]), (text, found)
    # Well-formed, so what is hidden is a second request.
    whole = post(body, bearer, connection="keep-alive")
    in_pieces = whole.replace(f"Content-Length: {len(body)}", "Transfer-Encoding: chunked")
    assert raw(server, whole, body + hidden, idle=1.5) == [200, 401]
    assert raw(server, in_pieces, chunked + hidden, idle=1.5) == [200, 401]


@pytest.mark.parametrize(
    "headers",
    [
        ["Authorization: Bearer {key}", "Authorization: Bearer {key}"],
        ["Authorization: Bearer {key}", "authorization: Bearer other"],
        ["Authorization: Bearer", "\t{key}"],  # folded
        ["Authorization : Bearer {key}"],
        ["X-Forwarded-Authorization: Bearer {key}"],
        ["Authorization: Basic {key}"],
        ["Authorization: Bearer {key}\0"],
        ["Cookie: key={key}"],
    ],
)
def test_strange_headers_are_no_key(
    server: LiveServer, keys: dict[str, NewKey], headers: list[str]
) -> None:
    body = asked()
    given = [header.format(key=keys["harsh"].secret) for header in headers]
    assert raw(server, post(body, *given), body)[0] in (400, 401)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions?api_key={key}", "//v1/completions", "/v1/completions/", "/v1/models;x"),
        *(
            "/health/../v1/models",
            "/metrics/%2e%2e/v1/models",
            "http://evil/v1/models",
            "/v1%2fmodels",
        ),
    ],
)
def test_strange_addresses_reach_nothing(
    server: LiveServer, keys: dict[str, NewKey], path: str
) -> None:
    body = asked()
    target = path.format(key=keys["harsh"].secret)
    assert raw(server, post(body, path=target), body)[0] in (400, 401, 404)
    for method in ("GET", "PUT", "HEAD", "TRACE"):
        override = "X-HTTP-Method-Override: GET\nConnection: close"
        text = f"{method} {target} HTTP/1.1\nHost: h\n{override}\n\n"
        assert raw(server, text)[0] in (400, 401, 404, 405)
    log = server.log.read_text(errors="replace")
    assert keys["harsh"].secret not in log
    if "api_key" in path:
        assert "api_key=spin_…" in log


def test_whatever_is_in_the_body_the_key_decides(
    server: LiveServer, keys: dict[str, NewKey]
) -> None:
    before = skipped(server, keys["reader"])
    bearer = f"Authorization: Bearer {keys['harsh'].secret}"
    policy = b'"vllm_xargs": {"spin_policy": "gentle"}'
    plain = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True})
    begin = plain.encode()[:-1]
    bodies = {
        begin + b", " + policy + b"}": {400},
        begin + b', "vllm_xargs": {}, ' + policy + b"}": {400},  # the last one counts
        begin + b", " + policy + b', "vllm_xargs": {}}': {200, 400},
        begin + b', "extra_body": {' + policy + b"}}": {200, 400},
        begin + b', "vllm_xargs": {"x": {"spin_policy": 0}}}': {200, 400},
        begin + b', "vllm_xargs": {"SPIN_POLICY": "gentle", "\xef\xbd\x93pin_policy": 0}}': {
            200,
            400,
        },
        begin + b', "vllm_xargs": {"spin_policy\\u0000": "gentle"}}': {400},
        begin + b', "spin_policy": "gentle", "tenant": "gentle"}': {200, 400},
        begin + b', "priority": -100, "request_id": "x", "cache_salt": "gentle"}': {200},
    }
    for body, allowed in bodies.items():
        found = raw(server, post(body, bearer, "X-Tenant: gentle", "X-Request-Id: 1"), body)
        assert found[0] in allowed, (body[-80:], found)
    body = bodies and next(iter(bodies))
    assert raw(server, post(body, bearer, path="/invocations"), body)[0] == 400
    after = skipped(server, keys["reader"])
    for other in ("gentle", "default"):
        assert after[other] == before[other]
    assert share(before["harsh"], after["harsh"]) == pytest.approx(0.65, abs=0.03)


def stream(server: LiveServer, key: NewKey, tokens: int, **more: Any) -> Iterator[bytes]:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}
    with server.open("/v1/completions", body, key=key.secret) as response:
        yield from (line for line in response if line.startswith(b"data: {"))


def test_two_tenants_stream_at_once_each_under_its_policy_and_end_only_their_own(
    server: LiveServer, keys: dict[str, NewKey]
) -> None:
    before, counts = skipped(server, keys["reader"]), dict.fromkeys(SPARSITIES, 0)

    def run(name: str) -> None:
        counts[name] = sum(1 for _ in stream(server, keys[name], 80, request_id="same"))

    threads = [threading.Thread(target=run, args=(name,)) for name in SPARSITIES]
    for thread in threads:
        thread.start()
    # One more of each, of the same id, whose client goes away at once.
    for name in SPARSITIES:
        left = stream(server, keys[name], 80, request_id="same")
        next(left)
        left.close()
    for thread in threads:
        thread.join()
    assert min(counts.values()) >= 78  # a piece may hold two tokens
    after = skipped(server, keys["reader"])
    for name, sparsity in SPARSITIES.items():
        assert share(before[name], after[name]) == pytest.approx(float(sparsity), abs=0.03)


STREAMS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4000, "n": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4000,
        "n": 2,
    },
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000},
    "/v1/responses": {"input": "x", "max_output_tokens": 4000},
}


@pytest.mark.parametrize("path", STREAMS)
def test_places_are_free_once_a_client_is_gone(
    server: LiveServer, keys: dict[str, NewKey], path: str
) -> None:
    secret, label = keys["small"].secret, 'tenant="small"'

    def aborted() -> float:
        found = server.metrics().items()
        return sum(v for name, v in found if label in name and 'finished_reason="abort"' in name)

    before = aborted()
    body = {**STREAMS[path], "stream": True, "ignore_eos": True}
    opened = [server.open(path, body, key=secret) for _ in range(3 - body.get("n", 1))]
    for response in opened:
        assert response.readline().strip()
    with pytest.raises(urllib.error.HTTPError) as error:
        server.open(path, body, key=secret)
    with error.value:
        assert (error.value.code, error.value.headers["retry-after"]) == (429, "1")
    for response in opened:
        response.close()
    end = time.monotonic() + 20
    while aborted() < before + 2:
        assert time.monotonic() < end
        time.sleep(0.2)
    answer = server.complete("x", secret, max_tokens=1, n=2, temperature=1)
    assert answer["usage"]["completion_tokens"] == 2


NO_GRAMMAR = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "zzz"}}}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"vllm_xargs": {"spin_policy": 1}}, "the key decides the policy"),
        ({"text": NO_GRAMMAR}, "Invalid type: zzz"),  # vLLM's own, once the gate let it in
    ],
)
def test_stream_of_a_response_that_is_refused_has_not_begun(
    server: LiveServer, keys: dict[str, NewKey], sent: dict[str, Any], said: str
) -> None:
    body = {"input": "x", "stream": True, **sent}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.open("/v1/responses", body, key=keys["harsh"].secret)
    with error.value:
        assert error.value.code == 400
        assert said in json.load(error.value)["error"]["message"]


def test_too_much_and_too_slow_hold_nobody_up(server: LiveServer, keys: dict[str, NewKey]) -> None:
    bearer = f"Authorization: Bearer {keys['harsh'].secret}"
    told = post(b"", bearer).replace("Content-Length: 0", "Content-Length: 70000000")
    assert raw(server, told)[0] == 413
    long = "GET /v1/models HTTP/1.1\nHost: h\nConnection: close\nX: " + "x" * 300_000 + "\n\n"
    assert raw(server, long)[0] in (400, 401, 431)
    body = asked()
    slow = []
    for index in range(40):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        given = bearer if index % 2 else "X: y"
        text = post(body, given).replace("\n", "\r\n").encode()
        connection.sendall(text + (body[:20] if index % 4 else b""))
        slow.append(connection)
    started = time.monotonic()
    assert (
        server.complete("x", keys["gentle"].secret, max_tokens=1)["usage"]["completion_tokens"] == 1
    )
    assert time.monotonic() - started < 10
    for connection in slow:
        connection.close()
    with pytest.raises(urllib.error.HTTPError) as error:
        server.complete("x", max_tokens=1)
    with error.value:
        assert error.value.code == 401

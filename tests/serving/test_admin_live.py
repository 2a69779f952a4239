"""Policies of a running engine, changed through the admin API while it generates."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import live_server
import pytest
from live_server import LiveServer

from spin_server.admin.administration import Administration, Author
from spin_server.admin.operations import create_tenant, patch_policy, together
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.policy.policy import Policy

PROMPT = [(index * 7919) % 200 + 30 for index in range(9000)]
ADDRESS = re.compile(r"admin API at (http://127\.0\.0\.1:\d+); its first key is in (\S+)")


class Admin:
    """Speaks to the admin API of a live server."""

    def __init__(self, server: LiveServer) -> None:
        found = ADDRESS.search(server.log.read_text(errors="replace"))
        assert found is not None
        self.url, key_file = found.groups()
        self.key = Path(key_file).read_text().strip()

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {
                "content-type": "application/json",
                "authorization": f"Bearer {self.key}",
                "if-match": "*",
            },
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def realized(self) -> tuple[float, float]:
        """Blocks of sparse steps so far, and how many of them were skipped."""
        found = self("GET", "/v1/status")["realized"]
        blocks = found["sparse_step_blocks"]
        return blocks, blocks * (found["realized_sparsity"] or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admin")


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path) -> Iterator[LiveServer]:
    """A server on a store that held policies before it started."""
    store = SqliteStore(folder / "admin.db")
    now = datetime.now(UTC)
    Administration(store, Policy()).perform(
        together(
            [
                create_tenant("harsh", "", now=now),
                patch_policy("harsh", {"target_sparsity": "0.65"}, "*", now=now),
                patch_policy("default", {"target_sparsity": "0.1"}, "*", now=now),
            ]
        ),
        Author("key-test", "before the start"),
    )
    store.close()
    arguments = (
        *("--profile", "cpu-demo", "--max-model-len", "16384", "--max-num-seqs", "4"),
        *("--admin-store", str(folder / "admin.db"), "--admin-port", "0"),
    )
    with live_server.running(tiny_model, folder / "log", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def admin(server: LiveServer) -> Admin:
    return Admin(server)


@pytest.fixture(scope="module")
def plain(admin: Admin) -> str:
    """A key of no tenant."""
    made: str = admin("POST", "/v1/keys", {})["key"]
    return made


@pytest.fixture(scope="module")
def harsh(admin: Admin) -> str:
    """A key of the tenant `harsh`."""
    made: str = admin("POST", "/v1/keys", {"tenant": "harsh"})["key"]
    return made


def stream(server: LiveServer, key: str, tokens: int, **options: Any) -> Iterator[str]:
    """Yield the pieces of a completion as they come."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with server.open("/v1/completions", {**body, "stream": True, **options}, key=key) as response:
        for line in response:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield json.loads(text)["choices"][0]["text"]


def refused(call: Any, *arguments: Any, **options: Any) -> tuple[int, str]:
    """Status and reason of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as error:
        call(*arguments, **options)
    with error.value:
        return error.value.code, json.load(error.value)["error"]["message"]


def cached(server: LiveServer, key: str, prompt: list[int]) -> int:
    """Tokens of a prompt that were found in the prefix cache."""
    usage = server.complete(prompt, key, max_tokens=1)["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def skipped_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    blocks = after[0] - before[0]
    assert blocks > 0
    return (after[1] - before[1]) / blocks


def test_stored_policies_are_in_force_before_the_first_request(
    server: LiveServer, admin: Admin, request: pytest.FixtureRequest
) -> None:
    status = admin("GET", "/v1/status")
    assert status["desired_revision"] == status["applied_revision"] == 2  # and the first key
    assert status["ranks"] == [{"engine": 0, "rank": 0, "revision": 2}]
    plain = request.getfixturevalue("plain")  # makes a revision
    before = admin.realized()
    assert len(list(stream(server, plain, 40))) > 0
    assert skipped_share(before, admin.realized()) == pytest.approx(0.1, abs=0.02)


def test_nobody_is_served_without_a_key(server: LiveServer, harsh: str) -> None:
    for key in (None, "spin_" + "A" * 43, harsh[:-1]):
        assert refused(server.complete, "x", key, max_tokens=1)[0] == 401
        assert refused(server.post, "/tokenize", {"prompt": "x"}, key=key)[0] == 401
    assert refused(server.post, "/v1/unheard-of", {}, key=harsh)[0] == 403
    assert refused(server.post, "/inference/v1/abort_requests", {}, key=harsh)[0] == 403
    assert server.post("/tokenize", {"prompt": "x"}, key=harsh)["count"] > 0
    assert server.healthy()
    assert server.metrics()


def test_tenant_reaches_nothing_past_its_policy(server: LiveServer, harsh: str) -> None:
    for name, value in (("spin_policy", "default"), ("spin_policy", 0), ("spin_sparsity", 0)):
        options = {"max_tokens": 1, "vllm_xargs": {name: value}}
        code, text = refused(server.complete, "x", harsh, **options)
        assert (code, "the key decides the policy" in text) == (400, True)
    answer = server.complete("x", harsh, max_tokens=1, priority=-9, cache_salt="mine")
    assert answer["usage"]["completion_tokens"] == 1


def test_tenants_find_no_prefix_of_each_others(
    server: LiveServer, admin: Admin, plain: str, harsh: str
) -> None:
    admin("POST", "/v1/tenants", {"name": "other", "policy": {"target_sparsity": 0.65}})
    other = admin("POST", "/v1/keys", {"tenant": "other"})["key"]
    prompt = [(index * 31) % 200 + 30 for index in range(3000)]
    whole = len(prompt) // 256 * 256
    assert [cached(server, key, prompt) for key in (harsh, plain, other)] == [0, 0, 0]
    assert [cached(server, key, prompt) for key in (harsh, plain, other)] == [whole] * 3

    def change(sparsity: float) -> list[str]:
        path, body = "/v1/policies/other", {"target_sparsity": sparsity}
        tried = admin("PATCH", path + "?dryRun=All", body)["prefix_cache"]
        assert admin("PATCH", path, body)["prefix_cache"] == tried
        return list(tried["begin_anew"])

    assert change(0.3) == []
    assert cached(server, other, prompt) == whole
    assert change(0) == ["other"]
    assert [cached(server, other, prompt) for _ in range(2)] == [0, whole]
    assert change(0.5) == ["other"]
    assert cached(server, other, prompt) == whole  # of what it computed while sparse
    assert change(0) == ["other"]
    assert cached(server, other, prompt) == 0
    admin("DELETE", "/v1/tenants/other")
    assert refused(server.complete, "x", other, max_tokens=1)[0] == 401


def test_revoked_key_ends_at_the_door_and_streams_go_on(server: LiveServer, admin: Admin) -> None:
    made = admin("POST", "/v1/keys", {"tenant": "harsh"})
    pieces = stream(server, made["key"], 120)
    for _ in range(10):
        next(pieces)
    admin("DELETE", f"/v1/keys/{made['id']}")
    assert refused(server.complete, "x", made["key"], max_tokens=1)[0] == 401
    assert len(list(pieces)) > 50


def test_limits_of_a_tenant_hold_and_are_its_own(
    server: LiveServer, admin: Admin, plain: str, harsh: str
) -> None:
    def limit(**limits: int | None) -> None:
        admin("PATCH", "/v1/tenants/harsh", {"limits": limits})

    limit(concurrent_requests=2, context_tokens=9040, queued_tokens=9500)
    pieces = stream(server, harsh, 4000)
    next(pieces)
    for options in ({"n": 2}, {"prompt": [[30, 31], [32, 33]]}, {"stream": True, "n": 2}):
        body = {"prompt": "x", "max_tokens": 1, **options}
        with pytest.raises(urllib.error.HTTPError) as error:
            server.post("/v1/completions", body, key=harsh)
        with error.value:
            assert (error.value.code, error.value.headers["retry-after"]) == (429, "1")
            message = json.load(error.value)["error"]["message"]
        assert "of 2 sequences of the tenant are open" in message
    assert server.complete("x", harsh, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert (
        server.complete("x", plain, max_tokens=1, n=3, temperature=1)["usage"]["completion_tokens"]
        == 3
    )
    assert len(list(pieces)) < 100  # 9,040 tokens of context for a prompt of 9,000
    code, text = refused(server.complete, PROMPT[:200] * 46, harsh, max_tokens=1)
    assert (code, "fewer than 9,040 tokens, the tenant's context" in text) == (400, True)
    code, text = refused(server.complete, "x", harsh, n=3, max_tokens=1, temperature=1)
    assert (code, "at most 2 sequences of a tenant open at once, got 3" in text) == (400, True)
    limit(concurrent_requests=None, context_tokens=None, queued_tokens=None)
    assert (
        server.complete("x", harsh, max_tokens=1, n=3, temperature=1)["usage"]["completion_tokens"]
        == 3
    )


def test_usage_is_counted_by_tenant(server: LiveServer, plain: str, harsh: str) -> None:
    def used(tenant: str) -> dict[str, float]:
        label = f'tenant="{tenant}"'
        names = ("spin_requests", "spin_prompt", "spin_cached", "spin_gen", "spin_request_time")
        return {
            name: sum(v for k, v in server.metrics().items() if k.startswith(name) and label in k)
            for name in names
        }

    before = {tenant: used(tenant) for tenant in ("harsh", "default")}
    server.complete("x" * 300, harsh, max_tokens=7)
    after = {tenant: used(tenant) for tenant in ("harsh", "default")}
    assert after["default"] == before["default"]
    assert after["harsh"]["spin_gen"] == before["harsh"]["spin_gen"] + 7
    assert after["harsh"]["spin_requests"] == before["harsh"]["spin_requests"] + 1
    assert after["harsh"]["spin_prompt"] >= before["harsh"]["spin_prompt"] + 300
    assert after["harsh"]["spin_request_time"] > before["harsh"]["spin_request_time"]


def test_change_takes_hold_of_a_request_that_is_running(
    server: LiveServer, admin: Admin, plain: str
) -> None:
    pieces = stream(server, plain, 240)
    for _ in range(40):
        next(pieces)
    at_change = admin.realized()
    answer = admin("PATCH", "/v1/policies/default", {"target_sparsity": 0.5})
    assert answer["applied"]["complete"] is True
    changed = admin.realized()
    rest = list(pieces)  # the stream goes on, and to its end
    after = admin.realized()
    assert len(rest) > 100
    assert skipped_share(changed, after) == pytest.approx(0.5, abs=0.02)
    assert at_change[0] > 0
    metrics = server.metrics()
    desired = [v for k, v in metrics.items() if "spin_config_revision" in k and "desired" in k]
    assert desired == [answer["revision"]]


def test_keys_and_reasons_are_not_in_the_servers_output(
    server: LiveServer, admin: Admin, plain: str, harsh: str
) -> None:
    other = "spin_" + "A" * 43
    admin("PATCH", f"/v1/policies/default?reason=for+{other}", {"probe_period": 0})
    for path in (f"/v1/keys/{other}", f"/v1/status?k={admin.key}", f"/{admin.key}"):
        with pytest.raises(urllib.error.HTTPError) as error:
            admin("GET", path)
        error.value.close()
    for key in (plain, harsh, other):
        with suppress(urllib.error.HTTPError):
            server.complete("x", key, max_tokens=1)
    output = server.log.read_text(errors="replace")
    assert "POST /v1/completions" in output  # vLLM's own log of requests is on
    assert "spin_A" not in output
    for key in (admin.key, plain, harsh):
        assert key not in output
    assert "/v1/status" not in output


def test_some_requests_try_a_canary_and_are_counted_apart(
    server: LiveServer, admin: Admin, harsh: str
) -> None:
    path = "/v1/policies/harsh?canary_percent=50"
    answer = admin("PATCH", path, {"target_sparsity": 0.2, "exploration_share": 0})
    assert answer["applied"]["complete"] is True
    for _ in range(12):  # all the same way once in two thousand runs
        list(stream(server, harsh, 8))
    parts = admin("GET", "/v1/status")["realized"]["by_tenant"]
    assert parts["harsh"]["realized_sparsity"] == pytest.approx(0.65, abs=0.02)
    assert parts["harsh/canary"]["realized_sparsity"] == pytest.approx(0.2, abs=0.02)
    assert any('tenant="harsh/canary"' in name for name in server.metrics())
    admin("PATCH", "/v1/policies/harsh?canary_percent=0", {})


def test_requests_of_a_tenant_run_with_its_policy(
    server: LiveServer, admin: Admin, plain: str, harsh: str
) -> None:
    before = admin.realized()
    list(stream(server, harsh, 40))
    assert skipped_share(before, admin.realized()) == pytest.approx(0.65, abs=0.02)
    parts = admin("GET", "/v1/status")["realized"]["by_tenant"]
    assert parts["harsh"]["realized_sparsity"] == pytest.approx(0.65, abs=0.02)
    name = next(k for k in server.metrics() if "kv_blocks" in k and 'tenant="harsh"' in k)
    assert name.startswith("spin_kv_blocks_total")
    admin("DELETE", "/v1/tenants/harsh")
    # No tenant is left, and so nobody is asked for a key: not the one whose key went with it, too.
    for key in (None, plain, harsh):
        assert server.complete("x", key, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_stop_ends_the_admin_api_too(server: LiveServer, admin: Admin) -> None:
    assert live_server.stop(server) == 0
    with pytest.raises(urllib.error.URLError):
        admin("GET", "/v1/status")
    log = server.log.read_text(errors="replace")
    assert admin.key not in log
    # vLLM's own output handler may log that its engine is gone; nothing of ours fails.
    assert "/spin_server/" not in log

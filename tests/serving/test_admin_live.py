"""Policies of a running engine, changed through the admin API while it generates."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
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
        *("--max-model-len", "16384", "--max-num-seqs", "4", "--spin-allow-request-policy"),
        *("--admin-store", str(folder / "admin.db"), "--admin-port", "0"),
    )
    with live_server.running(tiny_model, folder / "log", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def admin(server: LiveServer) -> Admin:
    return Admin(server)


def stream(server: LiveServer, tokens: int, **options: Any) -> Iterator[str]:
    """Yield the pieces of a completion as they come."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with server.open("/v1/completions", {**body, "stream": True, **options}) as response:
        for line in response:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield json.loads(text)["choices"][0]["text"]


def skipped_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    blocks = after[0] - before[0]
    assert blocks > 0
    return (after[1] - before[1]) / blocks


def test_stored_policies_are_in_force_before_the_first_request(
    server: LiveServer, admin: Admin
) -> None:
    status = admin("GET", "/v1/status")
    assert status["desired_revision"] == status["applied_revision"] == 2  # and the first key
    assert status["ranks"] == [{"engine": 0, "rank": 0, "revision": 2}]
    before = admin.realized()
    assert len(list(stream(server, 40))) > 0
    assert skipped_share(before, admin.realized()) == pytest.approx(0.1, abs=0.02)


def test_change_takes_hold_of_a_request_that_is_running(server: LiveServer, admin: Admin) -> None:
    pieces = stream(server, 240)
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


def test_keys_and_reasons_are_not_in_the_servers_output(server: LiveServer, admin: Admin) -> None:
    other = "spin_" + "A" * 43
    admin("PATCH", f"/v1/policies/default?reason=for+{other}", {"probe_period": 0})
    for path in (f"/v1/keys/{other}", f"/v1/status?k={admin.key}", f"/{admin.key}"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            admin("GET", path)
        refused.value.close()
    server.complete("x", max_tokens=1)
    output = server.log.read_text(errors="replace")
    assert "POST /v1/completions" in output  # vLLM's own log of requests is on
    assert "spin_A" not in output
    assert admin.key not in output
    assert "/v1/status" not in output


def test_some_requests_try_a_canary_and_are_counted_apart(server: LiveServer, admin: Admin) -> None:
    path = "/v1/policies/harsh?canary_percent=50"
    answer = admin("PATCH", path, {"target_sparsity": 0.2, "exploration_share": 0})
    assert answer["applied"]["complete"] is True
    for _ in range(12):  # all the same way once in two thousand runs
        list(stream(server, 8, vllm_xargs={"spin_policy": "harsh"}))
    parts = admin("GET", "/v1/status")["realized"]["by_tenant"]
    assert parts["harsh"]["realized_sparsity"] == pytest.approx(0.65, abs=0.02)
    assert parts["harsh/canary"]["realized_sparsity"] == pytest.approx(0.2, abs=0.02)
    assert any('tenant="harsh/canary"' in name for name in server.metrics())
    admin("PATCH", "/v1/policies/harsh?canary_percent=0", {})


def test_requests_of_a_tenant_run_with_its_policy(server: LiveServer, admin: Admin) -> None:
    options = {"vllm_xargs": {"spin_policy": "harsh"}}
    before = admin.realized()
    list(stream(server, 40, **options))
    assert skipped_share(before, admin.realized()) == pytest.approx(0.65, abs=0.02)
    parts = admin("GET", "/v1/status")["realized"]["by_tenant"]
    assert parts["harsh"]["realized_sparsity"] == pytest.approx(0.65, abs=0.02)
    name = next(k for k in server.metrics() if "kv_blocks" in k and 'tenant="harsh"' in k)
    assert name.startswith("spin_kv_blocks_total")
    admin("DELETE", "/v1/tenants/harsh")
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.complete("x", max_tokens=1, **options)
    with refused.value:
        assert refused.value.code == 400


def test_stop_ends_the_admin_api_too(server: LiveServer, admin: Admin) -> None:
    assert live_server.stop(server) == 0
    with pytest.raises(urllib.error.URLError):
        admin("GET", "/v1/status")
    log = server.log.read_text(errors="replace")
    assert admin.key not in log
    # vLLM's own output handler may log that its engine is gone; nothing of ours fails.
    assert "/spin_server/" not in log

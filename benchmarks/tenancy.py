"""What tenancy adds to a request and to a token: 1,000 tenants, 10,000 keys, all with limits.

  python benchmarks/tenancy.py      on a laptop CPU; no engine behind it, and no network before it
With and without the door and the gate, alternating; medians and 95th percentiles of the difference.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from machine import commit, cpu_name
from many_tenants import KEYS, TENANTS, fill

from spin_server.admin.administration import Administration
from spin_server.admin.documents import Limits
from spin_server.admin.operations import NewKey
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.cli.admin_guest import KeyRing
from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.metrics import SpinCollector
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.tenancy import door
from spin_server.engine.tenancy.callers import Visit, visiting
from spin_server.engine.tenancy.refusals import Refusals
from spin_server.policy.policy import Policy

REQUESTS, TOKENS = 4000, 2000
PROMPT = {"type": "token", "prompt_token_ids": list(range(5000))}
LIMITS = Limits(concurrent_requests=32, queued_tokens=2_000_000, context_tokens=524_288)


class Client:
    """An engine client that answers at once."""

    def __init__(self, running: int) -> None:
        names = [f"tenant-{index % TENANTS:04}.{index:024}" for index in range(running)]
        self.output_processor = SimpleNamespace(
            external_req_ids=dict.fromkeys(names),
            add_request=None,
            request_states={
                name: SimpleNamespace(is_prefilling=True, prompt_len=5000, external_req_id=name)
                for name in names
            },
        )

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[int]:
        for token in range(sampling_params.max_tokens):
            yield token

    async def encode(self, *_: Any) -> AsyncIterator[int]:
        yield 0


def params(max_tokens: int) -> Any:
    return SimpleNamespace(extra_args=None, n=1, max_tokens=max_tokens)


def scope(key: str) -> dict[str, Any]:
    headers = [(b"host", b"h"), (b"authorization", f"Bearer {key}".encode())]
    path = {"path": "/v1/completions", "root_path": "", "method": "POST"}
    return {"type": "http", "headers": headers, **path}


async def measure(administration: Administration, keys: list[NewKey]) -> dict[str, list[float]]:
    plain, guarded = Client(256), Client(256)
    ring = KeyRing(administration)
    gate = PolicyGate(SpinSettings())
    gate.name_rows({name: row for row, name in enumerate(administration.state.tenants, 1)}, {})
    gate.ask(ring)
    gate.guard(guarded)
    refusals = Refusals(SpinCollector("m", SpinSettings(), {}))
    door.set_porter(door.Porter(ring, refusals, max_tokens=524_288))

    async def app(client: Client) -> None:
        async for _ in client.generate(PROMPT, params(1), "r"):
            pass

    async def inner(*_: Any) -> None:
        await app(guarded)

    outer = door.TenantDoor(inner)

    async def nothing(*_: Any) -> Any:
        return {"type": "http.request", "body": b""}

    added = []
    for index in range(REQUESTS):
        given = scope(keys[index * 37 % KEYS].secret)
        times = []
        for run in ((app(plain), outer(given, nothing, nothing)))[:: 1 if index % 2 else -1]:
            started = time.perf_counter()
            await run
            times.append(time.perf_counter() - started)
        without, with_both = times[:: 1 if index % 2 else -1]
        added.append((with_both - without) * 1e6)

    async def tokens(client: Client) -> float:
        started = 0.0  # at the first token: what comes before is the request's
        async for _ in client.generate(PROMPT, params(TOKENS), "r"):
            started = started or time.perf_counter()
        return time.perf_counter() - started

    per_token = []
    for index in range(100):
        order = [plain, guarded][:: 1 if index % 2 else -1]
        with visiting(Visit(f"Bearer {keys[0].secret}")):
            times = [await tokens(client) for client in order][:: 1 if index % 2 else -1]
        per_token.append((times[1] - times[0]) / TOKENS * 1e9)
    return {
        "request, microseconds": [float(t) for t in np.percentile(added, [50, 95])],
        "token, nanoseconds": [float(t) for t in np.percentile(per_token, [50, 95])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/tenancy.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "admin.db")
        administration = Administration(store, Policy())
        keys = fill(administration, LIMITS)
        figures = asyncio.run(measure(administration, keys))
        store.close()
    print(f"{TENANTS:,} tenants, {KEYS:,} keys; added to each, median and 95%")
    for name, (median, high) in figures.items():
        print(f"| {name} | {median:.1f} | {high:.1f} |")
    row = {"commit": commit(), "cpu": cpu_name(), "tenants": TENANTS, "keys": KEYS, **figures}
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

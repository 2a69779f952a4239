"""The real admin application over a temporary store, and an engine that only remembers."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from spin_server.admin.administration import Administration
from spin_server.admin.applier import Applier
from spin_server.admin.engine_link import CanaryRow, Figures, RankReport
from spin_server.admin.first_key import KeyFile
from spin_server.admin.http.app import create_app
from spin_server.admin.http.context import Services
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.policy.policy import Policy


class RememberingEngine:
    """Stands in for the engine: holds what it was sent, and fails on request."""

    def __init__(self, capacity: int = 16, first_row: int = 1) -> None:
        self.capacity, self.first_row = capacity, first_row
        self.reserved = frozenset({"launched"})
        self.rows: dict[int, Policy] = {}
        self.names: dict[str, int] = {}
        self.canaries: dict[str, CanaryRow] = {}
        self.revision, self.writes = 0, 0
        self.fault: Exception | None = None

    def policy(self, tenant: str) -> Policy:
        """Get the policy that a tenant's requests would run with."""
        return self.rows[self.names[tenant]]

    def tried(self, name: str) -> tuple[Policy, int]:
        """Get the policy that a canary's requests would run with, and their percentage."""
        row, percent = self.canaries[name]
        return self.rows[row], percent

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[RankReport]:
        if self.fault is not None:
            raise self.fault
        self.rows.update(rows)
        self.revision = revision
        self.writes += 1
        return await self.reports()

    async def reports(self) -> list[RankReport]:
        if self.fault is not None:
            raise self.fault
        return [RankReport(0, rank, self.revision) for rank in (0, 1)]

    async def figures(self) -> dict[str, Figures]:
        return {
            "default": Figures(kept=70, explored=7, skipped=30, dense=20),
            "acme": Figures(kept=50, explored=5, skipped=50, dense=0),
        }

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, CanaryRow]) -> None:
        self.names, self.canaries = dict(rows), dict(canaries)


class AdminApp:
    """One serving process's admin API.

    Args:
        folder: of the store; another process on the same store names the same folder.
    """

    def __init__(self, folder: Path, launch: Policy | None = None) -> None:
        self.engine = RememberingEngine()
        self.offset = timedelta()
        self.store = SqliteStore(folder / "admin.db")
        self.administration = Administration(
            self.store, launch or Policy(), clock=lambda: datetime.now(UTC) + self.offset
        )
        key_file = folder / "admin.db.key"
        self.administration.bootstrap(KeyFile(key_file))
        self.key = key_file.read_text().strip()
        self.applier = Applier(
            self.administration, self.engine, period_seconds=0.02, pause_seconds=0.001
        )
        services = Services(self.administration, self.applier, self.engine)
        self.app: FastAPI = create_app(services, CollectorRegistry())
        self.app.router.lifespan_context = self._lifespan

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        applying = asyncio.create_task(self.applier.run())
        yield
        applying.cancel()

    @contextmanager
    def client(self) -> Iterator["Client"]:
        """Run it, and speak to it with the first key."""
        with TestClient(self.app, raise_server_exceptions=False) as http:
            yield Client(http, self.key)
        self.store.close()


class Client:
    """Speaks to an admin API with one key."""

    def __init__(self, http: TestClient, key: str | None) -> None:
        self.http, self.key = http, key

    def with_key(self, key: str | None) -> "Client":
        return Client(self.http, key)

    def __call__(
        self, method: str, path: str, json: Any = None, *, match: str | None = None, **more: Any
    ) -> Any:
        """Send a request; writes give `If-Match` as `match`."""
        headers = dict(more.pop("headers", {}))
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        if match is not None:
            headers["If-Match"] = match
        answer = self.http.request(method, path, json=json, headers=headers, **more)
        require_described(self.http.app, answer)
        return answer

    def new_key(self, **request: Any) -> "Client":
        """Make a key, and speak with it."""
        made = self("POST", "/v1/keys", request)
        assert made.status_code == 201, made.text
        return self.with_key(made.json()["key"])


def require_described(app: Any, answer: Any) -> None:
    """Refuse an answer in JSON that is not as the OpenAPI description says."""
    path = answer.request.url.path
    description = app.openapi()
    named = (
        operations
        for template, operations in description["paths"].items()
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
    )
    operation = next(named, {}).get(answer.request.method.lower())
    if operation is None:  # no such route, or one that is not described
        return
    described = operation["responses"][str(answer.status_code)]
    assert "etag" not in answer.headers or "ETag" in described["headers"], path
    ((_, content),) = described["content"].items()
    schema = {**content["schema"], "components": description["components"]}
    jsonschema.validate(answer.json(), schema)


def make_tenant(ask: Client, name: str = "acme", **fields: Any) -> None:
    made = ask("POST", "/v1/tenants", {"name": name, "policy": fields})
    assert made.status_code == 201, made.text


def audit(ask: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask("GET", "/v1/audit?limit=500").json()["items"]
    return found


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

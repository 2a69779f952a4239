"""Speaks to a real admin API through the command line, in this process."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from spin_server.admin.engine_link import CanaryRow, Figures, RankReport
from spin_server.admin.server import AdminServer
from spin_server.cli.main import main
from spin_server.policy.policy import Policy


class Engine:
    """An engine of one worker that takes every policy, unless it is out of order."""

    first_row, capacity, reserved = 1, 64, frozenset[str]()

    def __init__(self) -> None:
        self.rows: dict[int, Policy] = {}
        self.revision = 0
        self.broken = False

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[RankReport]:
        if self.broken:
            raise RuntimeError("out of order")
        self.rows.update(rows)
        self.revision = revision
        return await self.reports()

    async def reports(self) -> list[RankReport]:
        return [RankReport(0, 0, self.revision)]

    async def figures(self) -> dict[str, Figures]:
        return {"default": Figures(kept=70, explored=7, skipped=30, dense=1234)}

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, CanaryRow]) -> None:
        pass


@dataclass
class Api:
    """A running admin API, and what a test asks of it on the command line."""

    url: str
    key: str
    key_file: Path
    engine: Engine
    server: AdminServer
    capsys: pytest.CaptureFixture[str]
    secrets: list[str] = field(default_factory=list)  # keys that were printed when they were made

    def call(self, *argv: str, key_file: Path | None = None) -> tuple[int, str, str]:
        """Run a command: exit status, standard output, standard error. No key may be in either."""
        where = ["--url", self.url, "--key-file", str(key_file or self.key_file)]
        status = main([*argv, *where])
        out, err = self.capsys.readouterr()
        for secret in (self.key, *self.secrets):
            assert secret not in out + err
        if status:
            assert err.startswith("spin-server: ")
            assert err.count("\n") == 1
        return status, out, err

    def run(self, *argv: str, **more: Any) -> str:
        status, out, err = self.call(*argv, **more)
        assert (status, err) == (0, ""), (argv, err)
        return out

    def json(self, *argv: str, **more: Any) -> Any:
        out = self.run(*argv, "--json", **more)
        assert out.count("\n") == 1
        return json.loads(out)

    def refused(self, *argv: str, status: int = 2, **more: Any) -> str:
        got, out, err = self.call(*argv, **more)
        assert (got, out) == (status, ""), (argv, out, err)
        return err

    def make_key(self, folder: Path, *options: str) -> Path:
        """Make a key, and the file that holds it."""
        status, out, _ = self.call("key", "create", *options)
        assert (status, out.count("\n")) == (0, 1)
        self.secrets.append(out.strip())
        path = folder / f"{len(self.secrets)}.key"
        path.write_text(out)
        return path


@contextmanager
def running(store: str | Path, engine: Engine) -> Iterator[AdminServer]:
    """Run the admin API as `spin-server serve` does, in a thread's event loop."""
    ready: list[Any] = []
    done = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            server = AdminServer(str(store), "127.0.0.1", 0, Policy(), engine, CollectorRegistry())
            try:
                await server.start()
                ready.extend((server, asyncio.get_running_loop(), stop))
                done.set()
                await stop.wait()
            finally:
                await server.stop()
        finally:
            done.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert done.wait(30)
    server, loop, stop = ready
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


def speak_to(server: AdminServer, engine: Engine, capsys: pytest.CaptureFixture[str]) -> Api:
    assert server.first_key is not None
    key_file = Path(server.first_key)
    return Api(server.url, key_file.read_text().strip(), key_file, engine, server, capsys)


def lines(out: str) -> list[list[str]]:
    """The words of each line that has any: columns may be as wide as they like."""
    return [line.split() for line in out.splitlines() if line.strip()]


# status, policies, tenants

"""An admin API for the commands."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_commands import Api, Engine, running, speak_to

from spin_server.admin.server import AdminServer


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the machine's own."""
    for name in ("SPIN_ADMIN_URL", "SPIN_ADMIN_KEY", "SPIN_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    # A proxy would be asked for every host, if the commands looked for one.
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.fixture(scope="module")
def _quiet() -> Iterator[None]:
    """Without the server's log on standard error, which is another process's otherwise."""
    ours = logging.getLogger("spin_server.admin")
    ours.setLevel(logging.CRITICAL)
    yield
    ours.setLevel(logging.NOTSET)


@pytest.fixture
def api(tmp_path: Path, capsys: pytest.CaptureFixture[str], _quiet: None) -> Iterator[Api]:
    """A new server: it is at revision 1, which made its first key."""
    engine = Engine()
    with running(tmp_path / "store.db", engine) as server:
        yield speak_to(server, engine, capsys)


@pytest.fixture(scope="module")
def _one_server(tmp_path_factory: pytest.TempPathFactory, _quiet: None) -> Iterator[AdminServer]:
    with running(tmp_path_factory.mktemp("admin") / "store.db", Engine()) as server:
        yield server


@pytest.fixture
def used(_one_server: AdminServer, capsys: pytest.CaptureFixture[str]) -> Api:
    """A server that other tests use too: for what changes nothing, or nothing of theirs."""
    return speak_to(_one_server, Engine(), capsys)

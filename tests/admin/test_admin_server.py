"""What the admin API's own listener says at its start."""

from pathlib import Path

import pytest
from admin_app import RememberingEngine
from prometheus_client import CollectorRegistry

from spin_server.admin.server import AdminServer
from spin_server.policy.policy import Policy


def announced(store: Path, host: str = "127.0.0.1") -> list[str]:
    """What a server says; it is made, and does not listen."""
    server = AdminServer(str(store), host, 0, Policy(), RememberingEngine(), CollectorRegistry())
    server._socket.close()
    server._store.close()
    return server.announcement


def test_store_that_is_new_is_announced_once(tmp_path: Path) -> None:
    store = tmp_path / "admin.db"
    first, new = announced(store)
    assert first.endswith(f"; its first key is in {store}.key")
    assert new == f"{store} is a new store: it has no tenants, so the serving API needs no key"
    (again,) = announced(store)
    assert "key" not in again


@pytest.mark.parametrize(
    ("host", "warned"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("localhost", False), ("0.0.0.0", True)],
)
def test_address_that_others_reach_is_warned_of(tmp_path: Path, host: str, warned: bool) -> None:
    lines = announced(tmp_path / "admin.db", host)
    assert any(f"plain HTTP, and listens on {host}: " in line for line in lines) == warned

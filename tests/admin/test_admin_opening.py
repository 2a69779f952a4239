"""An `--admin-store` names a file, or a place on Kubernetes; anything else is refused early."""

import sys
from pathlib import Path

import pytest

from spin_server.admin.location import check_location
from spin_server.admin.opening import open_store
from spin_server.cli.admin_arguments import read_admin_arguments
from spin_server.errors import InputError


@pytest.mark.parametrize(
    "location",
    [
        "",
        "kubernetes://",
        "kubernetes://llm",
        "kubernetes://llm/",
        "kubernetes://llm/spin/more",
        "kubernetes://LLM/spin",
        "kubernetes://llm/-spin",
        "k8s://llm/spin",
        "sqlite:///admin.db",
        "postgres://host/db",
    ],
)
def test_location_that_is_none_is_refused(location: str) -> None:
    for refuse in (
        lambda: check_location(location),
        lambda: open_store(location),
        lambda: read_admin_arguments(["--admin-store", location]),
    ):
        with pytest.raises(InputError, match="expected FILE or kubernetes://NAMESPACE/NAME, got "):
            refuse()


@pytest.mark.parametrize("location", ["admin.db", "/data/admin.db", "kubernetes://llm/spin-admin"])
def test_location_is_read(location: str) -> None:
    arguments, _ = read_admin_arguments(["--admin-store", location])
    assert arguments is not None
    assert arguments.store == location


def test_file_is_opened_and_its_first_key_is_beside_it(tmp_path: Path) -> None:
    store, place = open_store(str(tmp_path / "admin.db"))
    assert store.revision() == 0
    assert place.shown == str(tmp_path / "admin.db.key")
    store.close()


def test_kubernetes_without_its_client_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.startswith("spin_server.admin.store.kubernetes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(InputError, match=r"pip install 'spin-server\[kubernetes\]' beforehand"):
        open_store("kubernetes://llm/spin")

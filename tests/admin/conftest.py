from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from admin_app import AdminApp, Client
from admin_support import Clock
from kube_api import KubeApi, kube_api

from spin_server.admin.administration import Administration
from spin_server.admin.store.interface import Store
from spin_server.admin.store.kubernetes import Cluster, KubernetesStore
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.policy.policy import Policy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin.db"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[[], SqliteStore]]:
    """Open the store once more, as another process or after a restart would."""
    opened: list[SqliteStore] = []

    def open_one() -> SqliteStore:
        opened.append(SqliteStore(path))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with kube_api() as api:
        yield api


@pytest.fixture
def open_kubernetes(api: KubeApi, tmp_path: Path) -> Iterator[Callable[[], KubernetesStore]]:
    """Open the store on Kubernetes once more, as another replica would."""
    opened: list[KubernetesStore] = []

    def open_one() -> KubernetesStore:
        opened.append(KubernetesStore(Cluster("llm", "spin", str(api.kubeconfig(tmp_path)))))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def kubernetes(open_kubernetes: Callable[[], KubernetesStore]) -> KubernetesStore:
    return open_kubernetes()


@pytest.fixture(params=["open_store", "open_kubernetes"])
def open_any(request: pytest.FixtureRequest) -> Callable[[], Store]:
    """Open a store of each kind."""
    opened: Callable[[], Store] = request.getfixturevalue(request.param)
    return opened


@pytest.fixture
def any_store(open_any: Callable[[], Store]) -> Store:
    return open_any()


@pytest.fixture
def store(open_store: Callable[[], SqliteStore]) -> SqliteStore:
    return open_store()


@pytest.fixture
def open_admin(open_store: Callable[[], SqliteStore], clock: Clock) -> Callable[[], Administration]:
    return lambda: Administration(open_store(), Policy(), clock=clock)


@pytest.fixture
def admin(open_admin: Callable[[], Administration]) -> Administration:
    return open_admin()


@pytest.fixture
def app(tmp_path: Path) -> AdminApp:
    return AdminApp(tmp_path)


@pytest.fixture
def ask(app: AdminApp) -> Iterator[Client]:
    with app.client() as client:
        yield client

"""Opens what an `--admin-store` names."""

from pathlib import Path

from spin_server import environment
from spin_server.admin.first_key import FirstKeyPlace, KeyFile
from spin_server.admin.location import KUBERNETES, check_location
from spin_server.admin.store.interface import Store
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.errors import InputError


def open_store(location: str) -> tuple[Store, FirstKeyPlace]:
    """Open a store, and find the place for its first key.

    Args:
        location: a file's path, or kubernetes://NAMESPACE/NAME.

    Raises:
        InputError: it is neither, or the client of Kubernetes is missing.
        StoreError: it cannot be read.
    """
    check_location(location)
    found = KUBERNETES.fullmatch(location)
    if found is None:
        path = Path(location)
        return SqliteStore(path), KeyFile(path.with_name(path.name + ".key"))
    try:
        from spin_server.admin.store.kubernetes import Cluster, KubernetesStore, SecretEntry
    except ModuleNotFoundError as error:
        raise InputError(
            "--admin-store", "pip install 'spin-server[kubernetes]' beforehand", error
        ) from None
    cluster = Cluster(found["namespace"], found["name"], environment.kubeconfig())
    store = KubernetesStore(cluster)
    return store, SecretEntry(store)

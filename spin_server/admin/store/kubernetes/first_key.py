"""The first key of a store on Kubernetes."""

from spin_server.admin.operations import NewKey
from spin_server.admin.store.kubernetes.store import KubernetesStore


class SecretEntry:
    """See `FirstKeyPlace`: an entry of the store's Secret, to be deleted once it has been read.

    Args:
        store: whose Secret.
    """

    NAME = "first-key"

    def __init__(self, store: KubernetesStore) -> None:
        self._store = store

    @property
    def shown(self) -> str:
        """See `FirstKeyPlace`."""
        return f"{self.NAME} of {self._store.secret}"

    def put(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""
        self._store.edit_secret(lambda data: data.update({self._aside(key): key.secret.encode()}))

    def show(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""
        self._store.edit_secret(lambda data: data.update({self.NAME: data.pop(self._aside(key))}))

    def withdraw(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""

        def remove(data: dict[str, bytes]) -> None:
            data.pop(self._aside(key), None)

        self._store.edit_secret(remove)

    def _aside(self, key: NewKey) -> str:
        return f"{self.NAME}.{key.key_id}"

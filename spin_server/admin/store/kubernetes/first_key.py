"""The first key of a store on Kubernetes."""

from collections.abc import Callable

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
        self._store.edit_secret(lambda data: _move(data, self._aside(key), self.NAME))

    def settle(self, is_stored: Callable[[str], bool]) -> None:
        """See `FirstKeyPlace`."""
        start = f"{self.NAME}."

        def settle(data: dict[str, bytes]) -> None:
            for name in [name for name in data if name.startswith(start)]:
                if is_stored(name.removeprefix(start)):
                    _move(data, name, self.NAME)
                else:
                    del data[name]

        if any(name.startswith(start) for name in self._store.secret_entries()):
            self._store.edit_secret(settle)

    def withdraw(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""

        def remove(data: dict[str, bytes]) -> None:
            data.pop(self._aside(key), None)

        self._store.edit_secret(remove)

    def _aside(self, key: NewKey) -> str:
        return f"{self.NAME}.{key.key_id}"


def _move(data: dict[str, bytes], name: str, to: str) -> None:
    """Rename an entry, unless that is done already."""
    if name in data:
        data[to] = data.pop(name)

"""Where a store's first key is put, for its owner's eyes alone."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from spin_server.admin.operations import NewKey
from spin_server.admin.store.interface import StoreError


class FirstKeyPlace(Protocol):
    """Keeps a key aside until it is in the store, and shows it then."""

    @property
    def shown(self) -> str:
        """Where its owner finds it."""
        ...

    def put(self, key: NewKey) -> None:
        """Keep it aside.

        Raises:
            StoreError: it cannot be kept.
        """
        ...

    def show(self, key: NewKey) -> None:
        """Put it where its owner finds it."""
        ...

    def settle(self, is_stored: Callable[[str], bool]) -> None:
        """Show, or forget, what a start that was cut short has kept aside.

        Args:
            is_stored: whether a key of this id is in the store.
        """
        ...

    def withdraw(self, key: NewKey) -> None:
        """Forget it: it is not in the store."""
        ...


class KeyFile:
    """See `FirstKeyPlace`: a file.

    Args:
        path: of the file; replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def shown(self) -> str:
        """See `FirstKeyPlace`."""
        return str(self._path)

    def put(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""
        try:
            if self._path.is_dir():
                raise IsADirectoryError(self._path)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            with open(os.open(self._aside(key), flags, 0o600), "w") as file:
                file.write(key.secret + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{self._path}: expected a writable file, got {error}") from error

    def show(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""
        self._aside(key).replace(self._path)

    def settle(self, is_stored: Callable[[str], bool]) -> None:
        """See `FirstKeyPlace`."""
        for aside in self._path.parent.glob(f"{self._path.name}.key-*"):
            if is_stored(aside.name.removeprefix(f"{self._path.name}.")):
                aside.replace(self._path)
            else:
                aside.unlink()

    def withdraw(self, key: NewKey) -> None:
        """See `FirstKeyPlace`."""
        self._aside(key).unlink()

    def _aside(self, key: NewKey) -> Path:
        return self._path.with_name(f"{self._path.name}.{key.key_id}")

"""Standard output that may be a full disk, or a pipe that nobody reads any more."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from spin_server.errors import InputError


class OutputError(InputError):
    """Standard output cannot be written.

    Args:
        reason: in the system's words.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        got = f"{reason}; a change may have been made all the same"
        super().__init__("standard output", "room for the answer", got)


class _Output:
    """A stream whose faults are its own; argparse, for one, passes over those of a file.

    Args:
        stream: what is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What could not be written would be tried again at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise OutputError(error.strerror or str(error)) from None


@contextmanager
def written_out() -> Iterator[None]:
    """See to it that all output is written.

    Raises:
        OutputError: it cannot be.
    """
    with redirect_stdout(cast(TextIO, _Output(sys.stdout))):
        try:
            yield
        finally:
            sys.stdout.flush()

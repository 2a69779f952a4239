"""Bounds on what a caller may send, ahead of everything that reads it."""

import asyncio
import json
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.admin.access import authenticate
from spin_server.admin.errors import UnauthorizedError
from spin_server.admin.http.context import Services
from spin_server.admin.http.problems import problem

MOST_BODY_BYTES = 2**20
_READ_SECONDS = 10.0


class _GoneError(Exception):
    """The caller left before his request was whole; what came of it is nothing."""


class _TwiceError(ValueError):
    """A member comes twice."""


class BodyLimit:
    """Refuses bodies of over a mebibyte, announced or not, and JSON without one meaning.

    Nobody behind sees a part of one. Of a caller without a key nothing is read: the event loop is
    the one that serves, and he must not hold it up.

    Args:
        app: what is behind.
        services: which know the keys.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._administration = app, services.administration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if announced != b"0" or b"transfer-encoding" in headers:
            try:
                self._require_key(headers.get(b"authorization"))
            except UnauthorizedError as error:
                await problem(error.status, error.title, str(error))(scope, receive, send)
                return
        body: bytes | None = None
        if announced.isdigit() and int(announced) <= MOST_BODY_BYTES:
            try:
                async with asyncio.timeout(_READ_SECONDS):
                    body = await _read(receive)
            except _GoneError:
                return
            except TimeoutError:
                detail = f"expected the whole body within {_READ_SECONDS:.0f} seconds"
                await problem(408, "Too slow", detail)(scope, receive, send)
                return
        if body is None:
            detail = f"expected a body of at most {MOST_BODY_BYTES:,} bytes"
            await problem(413, "Too large", detail)(scope, receive, send)
            return
        if body and b"json" in headers.get(b"content-type", b"").lower():
            fault = await run_in_threadpool(_fault, body)
            if fault is not None:
                await problem(422, "Not valid", f"body: {fault}")(scope, receive, send)
                return
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            message, whole = whole, None
            return await receive() if message is None else message

        await self._app(scope, replay, send)

    def _require_key(self, authorization: bytes | None) -> None:
        header = None if authorization is None else authorization.decode("latin-1")
        authenticate(self._administration.state, header, self._administration.clock())


async def _read(receive: Receive) -> bytes | None:
    """Read a body; None, if it is too large."""
    parts, total = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        part = message.get("body", b"")
        total += len(part)
        if total > MOST_BODY_BYTES:
            return None
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _fault(body: bytes) -> str | None:
    """Say what is wrong with a body of JSON, without what it holds."""
    if b"\0" in body:  # the library would take other encodings
        return "expected JSON in UTF-8, got another encoding"
    try:
        json.loads(body.decode(), object_pairs_hook=_once)
    except _TwiceError:
        return "expected each member of an object once, got one twice"
    except json.JSONDecodeError as error:
        return f"expected JSON, got something else at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError:
        return "expected JSON in UTF-8, got other bytes"
    except (ValueError, RecursionError):
        return "expected JSON of ordinary depth and numbers of ordinary length, got more"
    return None


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; the library lets the last of two members win."""
    found = dict(members)
    if len(found) != len(members):
        raise _TwiceError
    return found

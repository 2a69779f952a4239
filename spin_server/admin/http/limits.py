"""Bounds on what a caller may send, ahead of everything that reads it."""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.admin.http.problems import problem

MOST_BODY_BYTES = 2**20


class _GoneError(Exception):
    """The caller left before his request was whole; what came of it is nothing."""


class _TwiceError(ValueError):
    """A member comes twice."""


class BodyLimit:
    """Refuses bodies of over a mebibyte, announced or not, and JSON without one meaning.

    Nobody behind sees a part of one.

    Args:
        app: what is behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        body: bytes | None = None
        if announced.isdigit() and int(announced) <= MOST_BODY_BYTES:
            try:
                body = await _read(receive)
            except _GoneError:
                return
        if body is None:
            detail = f"expected a body of at most {MOST_BODY_BYTES:,} bytes"
            await problem(413, "Too large", detail)(scope, receive, send)
            return
        if body and b"json" in headers.get(b"content-type", b"").lower():
            fault = _fault(body)
            if fault is not None:
                await problem(422, "Not valid", f"body: {fault}")(scope, receive, send)
                return
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            message, whole = whole, None
            return await receive() if message is None else message

        await self._app(scope, replay, send)


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
    try:
        json.loads(body, object_pairs_hook=_once)
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

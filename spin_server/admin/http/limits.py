"""Bounds on what a caller may send, ahead of everything that reads it."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.admin.http.problems import problem

MOST_BODY_BYTES = 2**20


class _GoneError(Exception):
    """The caller left before his request was whole; what came of it is nothing."""


class BodyLimit:
    """Refuses bodies of over a mebibyte, announced or not; nobody behind sees a part of one.

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
        announced = dict(scope["headers"]).get(b"content-length", b"0")
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

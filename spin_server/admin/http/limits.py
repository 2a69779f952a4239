"""Bounds on what a caller may send, ahead of everything that reads it."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.admin.http.problems import problem

MOST_BODY_BYTES = 2**20


class _TooLargeError(Exception):
    """The body went over the bound while it was read."""


class BodyLimit:
    """Refuses bodies of over a mebibyte, announced or not.

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
        refusal = problem(413, "Too large", f"expected a body of at most {MOST_BODY_BYTES:,} bytes")
        if not announced.isdigit() or int(announced) > MOST_BODY_BYTES:
            await refusal(scope, receive, send)
            return
        total, begun = 0, False

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > MOST_BODY_BYTES:
                raise _TooLargeError
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLargeError:
            if not begun:
                await refusal(scope, receive, send)

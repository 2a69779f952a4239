"""HEAD, wherever GET is answered."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Answers HEAD as GET, without the body.

    Args:
        app: what is behind; knows no HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}

        async def without_body(message: Message) -> None:
            scope["route"] = inner.get("route")  # whoever counts requests wants to know
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(inner, receive, without_body)

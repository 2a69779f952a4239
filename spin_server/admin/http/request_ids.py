"""An id for every request, in its answer and in the audit log."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.key_text import blacked_out

HEADER = "X-Request-Id"
_GOOD = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_KEPT = "spin_server.request_id"


def request_id(scope: Scope) -> str:
    """Get a request's id: the caller's own, if it is short and plain and no key, or a new one."""
    if _KEPT not in scope:
        given = Headers(scope=scope).getlist(HEADER)
        good = len(given) == 1 and _GOOD.fullmatch(given[0]) and blacked_out(given[0]) == given[0]
        scope[_KEPT] = given[0] if good else uuid.uuid4().hex
    found: str = scope[_KEPT]
    return found


class RequestIds:
    """Puts each request's id into its answer.

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
        given = request_id(scope)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = given
            await send(message)

        await self._app(scope, receive, with_id)

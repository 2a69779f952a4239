"""The door of the server: no request comes in without its caller, once there are tenants.

Pure ASGI, around everything else of the application. vLLM makes middleware from its import path
alone, so who knows the keys is set beside it.
"""

from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.engine.tenancy.callers import (
    Authenticator,
    Caller,
    UnknownCallerError,
    calling,
)
from spin_server.engine.tenancy.routes import FREE, SERVED

MIDDLEWARE = "spin_server.engine.tenancy.door.TenantDoor"
MOST_BODY_BYTES = 64 * 2**20  # a million tokens, written as numbers, take seven
_RETRY_AFTER = (b"retry-after", b"1")  # seconds; a step takes less, and a long prefill more
_STRIPPED = frozenset({b"x-request-id"})

_authenticator: Authenticator | None = None


def set_authenticator(found: Authenticator | None) -> None:
    """Say who knows the keys; None: nobody, and every request comes in."""
    global _authenticator
    _authenticator = found


class _TooLargeError(Exception):
    """A body that goes on and on."""


class TenantDoor:
    """Finds the caller of every request.

    Args:
        app: what is behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or one websocket."""
        if (
            scope["type"] == "lifespan"
            or _authenticator is None
            or not _authenticator.configured()
            or _is_free(scope)
        ):
            await self._app(scope, receive, send)
            return
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            if len(keys) > 1:
                raise UnknownCallerError("expected one header Authorization")
            header = keys[0].decode("latin-1") if keys else None
            caller = _authenticator.caller(header)
        except UnknownCallerError as error:
            await _refuse(scope, receive, send, HTTPStatus.UNAUTHORIZED, str(error))
            return
        if _endpoint(scope) not in SERVED:
            await _refuse(
                scope, receive, send, HTTPStatus.FORBIDDEN, "expected a route that tenants may use"
            )
            return
        await self._serve_bounded(scope, receive, send, caller)

    async def _serve_bounded(
        self, scope: Scope, receive: Receive, send: Send, caller: Caller
    ) -> None:
        """Serve a request, and read no more of its body than is allowed."""
        begun, read = False, 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BODY_BYTES:
                raise _TooLargeError
            return message

        async def sent(message: Message) -> None:
            nonlocal begun
            if read > MOST_BODY_BYTES and not begun:
                return  # what is behind makes 500 or 400 of our exception; the answer is below
            begun = True
            if message["type"] == "http.response.start" and message["status"] == 429:
                message = {**message, "headers": [*message["headers"], _RETRY_AFTER]}
            await send(message)

        headers = [pair for pair in scope["headers"] if pair[0] not in _STRIPPED]
        told = next((value for name, value in headers if name == b"content-length"), b"0")
        try:
            if told.isdigit() and int(told) > MOST_BODY_BYTES:
                raise _TooLargeError
            with calling(caller):
                await self._app({**scope, "headers": headers}, bounded, sent)
            if read > MOST_BODY_BYTES and not begun:
                raise _TooLargeError
        except _TooLargeError:
            if begun:
                raise
            text = f"expected a body of at most {MOST_BODY_BYTES:,} bytes"
            await _refuse(scope, receive, send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)


def _endpoint(scope: Scope) -> tuple[str, str]:
    """Get method and path; a websocket's is none that anything is served at."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope.get("method", "websocket"), path


def _is_free(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    preflight = scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-method" for name, _ in scope["headers"]
    )
    return preflight or _endpoint(scope) in FREE


async def _refuse(
    scope: Scope, receive: Receive, send: Send, status: HTTPStatus, text: str
) -> None:
    """Answer as vLLM answers what it refuses."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
    error = {"message": text, "type": status.phrase, "param": None, "code": int(status)}
    await JSONResponse({"error": error}, int(status), headers)(scope, receive, send)

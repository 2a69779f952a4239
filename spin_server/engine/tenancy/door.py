"""The door of the server: no request comes in without its caller, once there are tenants.

Pure ASGI, around everything else of the application. vLLM makes middleware from its import path
alone, so what the door needs to know is set beside it.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.engine.tenancy.callers import Authenticator, UnknownCallerError, Visit, visiting
from spin_server.engine.tenancy.refusals import NOBODY, Refusals
from spin_server.engine.tenancy.routes import FREE, SERVED, TOKEN_COUNTS
from spin_server.errors import InputError

MIDDLEWARE = "spin_server.engine.tenancy.door.TenantDoor"
MOST_BODY_BYTES = 64 * 2**20  # a million tokens, written as numbers, take seven
# A token count happens between the others' tokens, and at once: no scheduler has it wait.
BYTES_PER_COUNTED_TOKEN = 8
BODY_SECONDS = 30.0  # between two pieces of a body
_RETRY_AFTER = "1"  # seconds; a step takes less, and a long prefill more
_STRIPPED = frozenset({b"x-request-id"})


@dataclass(frozen=True, slots=True)
class Porter:
    """What the door knows.

    Args:
        authenticator: knows the keys.
        refusals: counts who was sent away.
        max_tokens: of the longest context.
    """

    authenticator: Authenticator
    refusals: Refusals
    max_tokens: int
    counting: Counter[str] = field(default_factory=Counter)  # token counts that run, by tenant


_porter: Porter | None = None


def set_porter(found: Porter | None) -> None:
    """Say what the door knows; None: nothing, and every request comes in."""
    global _porter
    _porter = found


class _RefusedError(Exception):
    """A request that the door itself refuses."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class TenantDoor:
    """Finds the caller of every request.

    Args:
        app: what is behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or one websocket."""
        porter = _porter
        if scope["type"] == "lifespan" or porter is None or _is_free(scope):
            await self._app(scope, receive, send)
            return
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        visit = Visit(keys[0].decode("latin-1") if keys else None)
        passage = _Passage(porter, visit, scope, receive, send)
        whose: str | None = NOBODY
        try:
            if not porter.authenticator.configured():
                await passage.serve_anybody(self._app)
                return
            if len(keys) > 1:
                raise _RefusedError(HTTPStatus.UNAUTHORIZED, "expected one header Authorization")
            try:
                visit.caller = porter.authenticator.caller(visit.authorization)
            except UnknownCallerError as error:
                raise _RefusedError(HTTPStatus.UNAUTHORIZED, str(error)) from None
            whose = visit.caller.tenant
            await passage.serve(self._app)
        except _RefusedError as error:
            porter.refusals.count(whose, error.status)
            await _refuse(scope, receive, send, error.status, str(error))


class _Passage:
    """One request on its way in, and its answer on its way out.

    Nothing of the answer leaves before the engine was given the request, or the answer is complete:
    some routes begin a stream first, and what refuses the request then could not be told.
    """

    def __init__(
        self, porter: Porter, visit: Visit, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._porter, self._visit, self._scope = porter, visit, scope
        self._receive, self._send = receive, send
        self._endpoint = _endpoint(scope)
        self._most_bytes = MOST_BODY_BYTES
        if self._endpoint in TOKEN_COUNTS:
            most = 2**16 + BYTES_PER_COUNTED_TOKEN * porter.max_tokens
            self._most_bytes = min(self._most_bytes, most)
        self._read = 0
        self._is_read = self._begun = False
        self._held: list[Message] = []
        self._refused: _RefusedError | None = None

    async def serve_anybody(self, app: ASGIApp) -> None:
        """Serve it, where nobody needs a key, as vLLM does.

        Raises:
            _RefusedError: it is not served, and nothing was answered.
        """
        if self._endpoint in SERVED:
            await self._through(app, self._scope, self._receive)
            return
        with visiting(self._visit):
            await app(self._scope, self._receive, self._send)

    async def serve(self, app: ASGIApp) -> None:
        """Serve it to a known caller.

        Raises:
            _RefusedError: it is not served, and nothing was answered.
        """
        if self._endpoint not in SERVED:
            named = " ".join(self._endpoint)
            text = f"expected a route that tenants may use (docs/tenancy.md), got {named}"
            raise _RefusedError(HTTPStatus.FORBIDDEN, text)
        headers = [pair for pair in self._scope["headers"] if pair[0] not in _STRIPPED]
        told = next((value for name, value in headers if name == b"content-length"), b"0")
        if told.isdigit() and int(told) > self._most_bytes:
            raise self._too_large()
        self._count_tokens_in_turn()
        await self._through(app, {**self._scope, "headers": headers}, self._bounded)

    async def _through(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        try:
            with visiting(self._visit):
                await app(scope, receive, self._sent)
        except Exception as error:
            # What vLLM refuses itself comes as the cause of a stream that had begun.
            refusal = self._visit.refusal or error.__cause__
            self._refused = self._refused or _refusal_of(refusal)
            if self._begun or self._refused is None:
                raise
            raise self._refused from error
        finally:
            self._visit.end()
        if self._refused is not None and not self._begun:
            raise self._refused
        await self._let_out()

    def _count_tokens_in_turn(self) -> None:
        """Let no more token counts of a tenant run than requests.

        Raises:
            _RefusedError: 429.
        """
        caller, counting = self._visit.caller, self._porter.counting
        if self._endpoint not in TOKEN_COUNTS or caller is None or caller.tenant is None:
            return
        name = caller.tenant
        most = caller.limits.concurrent_requests if caller.limits else None
        if most is not None and counting[name] >= most:
            text = f"{counting[name]:,} of {most:,} token counts of the tenant run; try again"
            raise _RefusedError(HTTPStatus.TOO_MANY_REQUESTS, text)
        counting[name] += 1
        self._visit.at_end(lambda: counting.subtract({name: 1}))

    async def _bounded(self) -> Message:
        """Read on, as far and as long as is allowed.

        What is behind makes 500 or 400 of our exception, so it is noted for the answer.
        """
        if self._is_read:  # what comes now is that the client left
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self._receive()
        except TimeoutError:
            text = f"expected the next piece of the body within {BODY_SECONDS:g} seconds"
            self._refused = _RefusedError(HTTPStatus.REQUEST_TIMEOUT, text)
            raise self._refused from None
        self._read += len(message.get("body", b""))
        self._is_read = not message.get("more_body", False)
        if self._read > self._most_bytes:
            self._refused = self._too_large()
            raise self._refused
        if self._is_read and self._endpoint in TOKEN_COUNTS:
            self._ask_again()
        return message

    def _ask_again(self) -> None:
        """Ask for the key once the body has come; of all else the engine's gate asks again."""
        try:
            self._porter.authenticator.caller(self._visit.authorization)
        except UnknownCallerError as error:
            self._refused = _RefusedError(HTTPStatus.UNAUTHORIZED, str(error))
            raise self._refused from None

    def _too_large(self) -> _RefusedError:
        text = f"expected a body of at most {self._most_bytes:,} bytes"
        return _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)

    async def _sent(self, message: Message) -> None:
        if self._refused is not None and not self._begun:
            return
        if message["type"] == "http.response.start":
            caller = self._visit.caller
            self._porter.refusals.count(caller.tenant if caller else NOBODY, message["status"])
            if message["status"] == HTTPStatus.TOO_MANY_REQUESTS:
                retry = (b"retry-after", _RETRY_AFTER.encode())
                message = {**message, "headers": [*message["headers"], retry]}
        self._held.append(message)
        if self._visit.admitted:
            await self._let_out()

    async def _let_out(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._begun = True
            await self._send(message)


def _refusal_of(error: BaseException | None) -> _RefusedError | None:
    """Say with which status something was refused; None: it was a fault, or nothing."""
    from vllm.exceptions import VLLMClientError

    if isinstance(status := getattr(error, "http_status", None), int):
        return _RefusedError(HTTPStatus(status), str(error))
    if isinstance(error, InputError | VLLMClientError):
        return _RefusedError(HTTPStatus.BAD_REQUEST, str(error))
    return None


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
    headers = {
        HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
        HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": _RETRY_AFTER},
    }.get(status, {})
    error = {"message": text, "type": status.phrase, "param": None, "code": int(status)}
    await JSONResponse({"error": error}, int(status), headers)(scope, receive, send)

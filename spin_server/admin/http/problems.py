"""Refusals as RFC 9457 problems."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from spin_server.admin.errors import RefusedError, UnauthorizedError, UnavailableError
from spin_server.admin.http.request_ids import HEADER, request_id
from spin_server.admin.http.words import parameters, words
from spin_server.admin.store.interface import StoreError
from spin_server.errors import InputError
from spin_server.key_text import blacked_out

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_MOST_ERRORS = 20  # shown of one request


def problem(status: int, title: str, detail: str, **more: Any) -> JSONResponse:
    """Answer with a problem."""
    headers = {"Cache-Control": "no-store"}
    if status == UnauthorizedError.status:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    return JSONResponse(_without_keys(body), status, headers, MEDIA_TYPE)


def _without_keys(found: Any) -> Any:
    """Black out keys: a caller may have put one where it does not belong."""
    if isinstance(found, dict):
        return {name: _without_keys(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_without_keys(value) for value in found]
    return blacked_out(found) if isinstance(found, str) else found


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    return problem(error.status, error.title, str(error))


def _store(_: Request, error: Exception) -> JSONResponse:
    return problem(UnavailableError.status, UnavailableError.title, str(error))


def _input(_: Request, error: Exception) -> JSONResponse:
    return problem(422, "Not valid", str(error))


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    known = parameters(request)
    errors = [
        {"at": "/".join(map(str, found["loc"])), "message": words(found, known)}
        for found in error.errors()[:_MOST_ERRORS]
    ]
    # Whoever sent it knows what is a parameter, and what a part of the body.
    detail = "; ".join(f"{e['at'].partition('/')[2] or e['at']}: {e['message']}" for e in errors)
    return problem(422, "Not valid", detail, errors=errors)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    answer = problem(error.status_code, str(error.detail), str(error.detail))
    answer.headers.update(error.headers or {})
    if error.status_code == 405:  # the framework names the methods of one route only
        answer.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return answer


def _methods(request: Request) -> set[str]:
    """Get the methods that some route accepts for the request's path."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    return found | {"HEAD"} if "GET" in found else found


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    path = blacked_out(request.url.path)
    logger.exception("admin: %s %s failed", request.method, path, exc_info=error)
    answer = problem(500, "Internal error", "the server's log says more")
    answer.headers[HEADER] = request_id(request.scope)  # it is sent from outside of all else
    return answer


def install(app: FastAPI) -> None:
    """Answer every error of an application with a problem."""
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(StoreError, _store)
    app.add_exception_handler(InputError, _input)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)

"""Refusals as RFC 9457 problems."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from spin_server.admin.errors import RefusedError, UnauthorizedError
from spin_server.errors import InputError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


def problem(status: int, title: str, detail: str, **more: Any) -> JSONResponse:
    """Answer with a problem."""
    headers = {"Cache-Control": "no-store"}
    if status == UnauthorizedError.status:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    return JSONResponse(body, status, headers, MEDIA_TYPE)


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    return problem(error.status, error.title, str(error))


def _input(_: Request, error: Exception) -> JSONResponse:
    return problem(422, "Not valid", str(error))


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Never the values that came: a key may be among them.
    errors = [
        {
            "at": "/".join(map(str, found["loc"])),
            "message": found["msg"].removeprefix("Value error, "),
        }
        for found in error.errors()
    ]
    detail = "; ".join(f"{found['at']}: {found['message']}" for found in errors)
    return problem(422, "Not valid", detail, errors=errors)


def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    answer = problem(error.status_code, str(error.detail), str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.exception("admin: %s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "Internal error", "the server's log says more")


def install(app: FastAPI) -> None:
    """Answer every error of an application with a problem."""
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(InputError, _input)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)

"""The OpenAPI description: what FastAPI finds out, and the problems that it cannot see."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from spin_server.admin import errors
from spin_server.admin.http.problems import MEDIA_TYPE

_ALWAYS = (
    errors.UnauthorizedError,
    errors.ForbiddenError,
    errors.NotFoundError,
    errors.InvalidError,
    errors.UnavailableError,
)
MERGE_PATCH = "application/merge-patch+json"
_WRITES = (errors.ConflictError, errors.PreconditionError, errors.UnconditionalError)
_BODIES = {
    400: "Not JSON, or a header twice",
    408: "Too slow",
    413: "Too large",
    415: "Unsupported media type",
}
_REQUEST_ID = {
    "description": "the caller's own, or a new one; the audit log has it",
    "schema": {"type": "string"},
}


class Problem(BaseModel):
    """An RFC 9457 problem."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Changed meanwhile"])
    status: int = Field(examples=[412])
    detail: str = Field(
        description="one line: what was expected, what came",
        examples=['policy default: expected If-Match "7", got "6"'],
    )
    errors: list[dict[str, str]] | None = Field(
        default=None, description="where the values are that cannot be accepted, and why"
    )


def describe(app: FastAPI) -> dict[str, Any]:
    """Describe an application."""
    description = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = description["components"]["schemas"]
    schemas["Problem"] = Problem.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for operations in description["paths"].values():
        for method, operation in operations.items():
            titles = {error.status: error.title for error in _ALWAYS}
            if method != "get":
                titles |= {error.status: error.title for error in _WRITES} | _BODIES
            for status, title in titles.items():
                operation["responses"][str(status)] = {"description": title, "content": content}
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "if-match":  # required there, it would not be 428
                    schema = {"type": "string", "examples": ['"7"']}
                    parameter |= {"name": "If-Match", "required": True, "schema": schema}
            if method == "patch":
                body = operation["requestBody"]["content"]
                body[MERGE_PATCH] = body["application/json"]
            for answer in operation["responses"].values():
                answer.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID
            if "201" in operation["responses"]:
                operation["responses"]["200"]["description"] = "What a dry run would make"
    return description

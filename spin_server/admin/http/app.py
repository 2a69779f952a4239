"""The admin application."""

import functools
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from prometheus_client.registry import CollectorRegistry

from spin_server import __version__
from spin_server.admin.http import bulk, keys, policies, problems, revisions, status, tenants
from spin_server.admin.http.context import Services
from spin_server.admin.http.description import MERGE_PATCH, describe
from spin_server.admin.http.head import HeadAsGet
from spin_server.admin.http.limits import BodyLimit
from spin_server.admin.http.metrics import AdminMetrics, CountRequests
from spin_server.admin.http.request_ids import RequestIds

_DESCRIPTION = """\
Change a tenant's block sparsity and exploration share while the server runs.

Every answer about a document carries its revision as `ETag`; a write names it in `If-Match`, so
that nobody overwrites what he has not read. `?dryRun=All` answers with what would change. Errors
are `application/problem+json`.
"""


async def _no_store(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Keep keys and policies out of every cache, and patches to the media types that are theirs."""
    if request.method in ("PATCH", "POST"):
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        accepted = (
            ("application/json", MERGE_PATCH)
            if request.method == "PATCH"
            else ("application/json",)
        )
        empty = request.headers.get("content-length", "0") == "0" and not media
        if media not in accepted and not (empty and "transfer-encoding" not in request.headers):
            return problems.problem(
                415, "Unsupported media type", f"expected {' or '.join(accepted)}, got {media!r}"
            )
    response = await call_next(request)
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def create_app(services: Services, registry: CollectorRegistry) -> FastAPI:
    """Make the application.

    Args:
        services: what it speaks to.
        registry: its metrics are added here, and everything in it is exported.
    """
    app = FastAPI(
        title="spin-server admin API",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services, app.state.registry = services, registry
    for module in (policies, tenants, keys, revisions, bulk, status):
        app.include_router(module.router)
    problems.install(app)
    app.openapi = functools.cache(lambda: describe(app))  # type: ignore[method-assign]
    app.add_middleware(HeadAsGet)
    app.middleware("http")(_no_store)
    app.add_middleware(BodyLimit, services=services)
    app.add_middleware(CountRequests, metrics=AdminMetrics(registry, services))
    app.add_middleware(RequestIds)
    return app

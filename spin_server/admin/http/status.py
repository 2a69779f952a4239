"""How things are: status for people, probes and metrics for machines."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from spin_server.admin.documents import DEFAULT
from spin_server.admin.engine_link import Figures
from spin_server.admin.http import answers
from spin_server.admin.http.answers import described
from spin_server.admin.http.context import APPLY_SECONDS, Caller_, Read_, Services, Services_
from spin_server.admin.http.policies import show_policy
from spin_server.admin.state import State

router = APIRouter()

# An apply takes a step of the engine; one that takes longer than this is stuck.
READY_SECONDS = 5.0
_MOST_SHOWN = 100


def _trouble(services: Services, engine: str | None, own: str | None) -> dict[str, str | None]:
    store, applier = services.administration.trouble, services.applier
    tenants = applier.unserved_trouble()
    if own is not None:  # the texts may name other tenants
        store = store and "the store cannot be read or written"
        tenants = "no row for this tenant" if own in applier.unserved else None
        tenants = "no row for this tenant's canary" if own in applier.untried else tenants
    return {"store": store, "engine": engine, "tenants": tenants}


def _realized(figures: Figures) -> dict[str, Any]:
    sparse = figures.kept + figures.skipped
    return {
        "sparse_step_blocks": sparse,
        "dense_step_blocks": figures.dense,
        "realized_sparsity": figures.skipped / sparse if sparse else None,
        "realized_exploration": figures.explored / figures.kept if figures.kept else None,
    }


def _pending(state: State, own: str | None) -> dict[str, Any]:
    """Show what is not to last, or not everybody's yet."""
    names = {
        ref.name for ref in state.documents if ref.kind == "policy" and own in (None, ref.name)
    }
    limits = sorted((e.at, n) for n in names if (e := state.stored_policy(n).expires) is not None)
    canaries = [(name, percent) for name, percent in state.canaries.items() if name in names]
    return {
        "time_limits": [{"name": name, "ends_at": end} for end, name in limits[:_MOST_SHOWN]],
        "canaries": [
            {"name": name, "percent": percent} for name, percent in canaries[:_MOST_SHOWN]
        ],
    }


@router.get(
    "/v1/status",
    tags=["status"],
    summary="Read what is wanted and what is",
    **described(answers.Status, etag=True),
)
async def status(caller: Caller_, _: Read_, response: Response) -> dict[str, Any]:
    """The store's revision, every worker's, read back from it, and what SPIN did so far."""
    own, services = caller.principal.tenant, caller.services
    caller.principal.require("read", own)
    administration, applier = services.administration, services.applier
    state, engine_trouble = administration.in_force, applier.trouble
    ranks: list[dict[str, int]] = []
    realized: dict[str, Any] | None = None
    try:
        async with asyncio.timeout(APPLY_SECONDS):
            reports = await services.link.reports()
            figures = await services.link.figures()
        ranks = [{"engine": r.engine, "rank": r.rank, "revision": r.revision} for r in reports]
        parts = figures
        if own is not None:
            parts = {own: Figures(0, 0, 0, 0)} | {
                name: found for name, found in figures.items() if name.split("/")[0] == own
            }
        realized = {
            **_realized(Figures.total(parts.values())),
            "by_tenant": {name: _realized(part) for name, part in sorted(parts.items())},
        }
    except TimeoutError:
        engine_trouble = engine_trouble or f"no answer within {APPLY_SECONDS:.0f} seconds"
    except Exception as error:  # whatever the engine's client raises; the rest is still of use
        engine_trouble = engine_trouble or f"{type(error).__name__}: {error}"
    response.headers["ETag"] = f'"{state.revision}"'
    return {
        "desired_revision": state.revision,
        "applied_revision": applier.applied,
        "behind_seconds": round(applier.behind_seconds(), 3),
        "ranks": ranks,
        "default_policy": show_policy(state, DEFAULT) if own is None else None,
        "tenant_policy": show_policy(state, own) if own is not None else None,
        "realized": realized,
        **_pending(state, own),
        "serving_needs_key": bool(state.tenants),
        "tenants": len(state.tenants) if own is None else None,
        "keys": len(state.keys) if own is None else None,
        "trouble": _trouble(services, engine_trouble, own),
    }


@router.get("/livez", include_in_schema=False)
async def livez() -> PlainTextResponse:
    """Whether this process answers."""
    return PlainTextResponse("ok")


@router.get("/readyz", include_in_schema=False)
async def readyz(services: Services_) -> Response:
    """Whether the engine holds the stored policies."""
    applier, administration = services.applier, services.administration
    behind = applier.behind_seconds()
    if applier.applied is not None and behind < READY_SECONDS:
        return PlainTextResponse("ok")
    return JSONResponse(
        {
            "desired_revision": administration.state.revision,
            "applied_revision": applier.applied,
            "behind_seconds": round(behind, 3),
        },
        503,
    )


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Metrics, in Prometheus's text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)

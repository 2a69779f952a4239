"""What every route needs: the caller, the documents, and a way to make a change."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Query, Request, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from spin_server.admin.access import Principal, authenticate
from spin_server.admin.administration import Administration, Author, Outcome
from spin_server.admin.applier import Applier
from spin_server.admin.documents import came
from spin_server.admin.engine_link import EngineLink
from spin_server.admin.errors import InvalidError, MalformedError, UnauthorizedError
from spin_server.admin.http.request_ids import request_id
from spin_server.admin.operations import Operation, begin_anew, set_body, visible
from spin_server.admin.state import State
from spin_server.admin.store.interface import Change
from spin_server.admin.warnings import NO_TENANT_LEFT
from spin_server.key_text import blacked_out

_MOST_NAMES = 100
APPLY_SECONDS = 4.0  # less than the server's stop waits for open requests


@dataclass(frozen=True, slots=True)
class Services:
    """What the application is made of."""

    administration: Administration
    applier: Applier
    link: EngineLink
    # Writes wait here for each other, and not in threads: reads need those.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


def _plain(value: object) -> object:
    """Refuse what Python reads as a whole number and nobody means, such as 1_0 or +5."""
    if isinstance(value, str) and not re.fullmatch("[0-9]{1,16}", value):
        raise ValueError(f"expected a whole number, got {came(value)}")
    return value


WholeNumber = Annotated[int, BeforeValidator(_plain)]  # of a query


class WriteQuery(BaseModel):
    """Parameters of every write."""

    model_config = ConfigDict(extra="forbid")

    dry_run: Literal["All"] | None = Field(
        default=None, alias="dryRun", description="`All`: answer with what would change, only"
    )
    reason: str = Field(
        default="", max_length=500, description="why; kept in the audit log", examples=["INC-7"]
    )


class ReadQuery(BaseModel):
    """No parameters; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


IfMatch = Annotated[
    str | None,
    Header(description="ETag of the document that the change is based on", examples=['"7"']),
]

_scheme = HTTPBearer(scheme_name="key", auto_error=False)  # for the description only


class Caller:
    """A request with a valid key."""

    def __init__(self, services: Services, principal: Principal, request: Request) -> None:
        self.services, self.principal = services, principal
        self._action = f"{request.method} {request.url.path}"
        self._request_id = request_id(request.scope)

    @property
    def administration(self) -> Administration:
        """The documents."""
        return self.services.administration

    def author(self, reason: str) -> Author:
        """Say who asks for a change."""
        return Author(self.principal.key_id, self._action, blacked_out(reason), self._request_id)

    async def perform(self, operation: Operation, query: WriteQuery) -> Outcome:
        """Try or commit an operation, with a key that is still good when it is committed."""

        def checked(state: State) -> list[Change]:
            self.principal.renewed(state, self.administration.clock())
            return operation(state)

        author, dry_run = self.author(query.reason), query.dry_run is not None
        async with nullcontext() if dry_run else self.services.writing:
            return await run_in_threadpool(
                self.administration.perform, checked, author, dry_run=dry_run
            )

    async def applied(self, outcome: Outcome, names: set[str]) -> dict[str, Any]:
        """Wait until the engine holds what was written, and say which rank holds what.

        Args:
            names: of the policies that were written; others' troubles are none of the caller's.
        """
        applier, revision = self.services.applier, outcome.state.revision
        complete = await applier.reach(revision, APPLY_SECONDS)
        rowless = applier.unserved_trouble(names)
        late = None if complete else f"no answer of the engine within {APPLY_SECONDS:.0f} seconds"
        return {
            "complete": complete and rowless is None,
            "desired_revision": revision,
            "ranks": [
                {"engine": r.engine, "rank": r.rank, "revision": r.revision}
                for r in applier.reports
            ],
            "trouble": applier.trouble or rowless or late,
        }


# Dependencies are coroutines: others would wait for a thread, and all may be waiting for the store.
async def services(request: Request) -> Services:
    """Get what the application is made of."""
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


async def caller(
    request: Request,
    found: Annotated[Services, Depends(services)],
    _: Annotated[object, Security(_scheme)],
) -> Caller:
    """Find the caller by his key."""
    if len(request.headers.getlist("authorization")) > 1:
        raise UnauthorizedError("expected one header Authorization")
    authorization = request.headers.get("authorization")
    administration = found.administration
    principal = authenticate(administration.state, authorization, administration.clock())
    given = [name for name, _ in request.query_params.multi_items()]
    if len(given) != len(set(given)):
        raise InvalidError(f"query: expected each parameter once, got {', '.join(sorted(given))}")
    if request.method != "GET" and len(request.headers.getlist("if-match")) > 1:
        raise MalformedError("expected one header If-Match, got several")
    return Caller(found, principal, request)


Services_ = Annotated[Services, Depends(services)]
Caller_ = Annotated[Caller, Depends(caller)]
Write_ = Annotated[WriteQuery, Query()]
Read_ = Annotated[ReadQuery, Query()]


def show_changes(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Show what a commit does to each document."""
    return [
        {
            "kind": change.ref.kind,
            "name": change.ref.name,
            "before": visible(set_body(change.before)),
            "after": visible(set_body(change.after)),
        }
        for change in changes
    ]


def show_dry_run(outcome: Outcome, ended: Sequence[str] = ()) -> dict[str, Any]:
    """Show what an operation would do; nothing is clamped as long as there are no guard rails."""
    return {
        "dry_run": True,
        "changes": show_changes(outcome.changes),
        "clamps": [],
        "prefix_cache": show_prefix_cache(outcome),
        "warnings": warnings(outcome, ended),
    }


def warnings(outcome: Outcome, ended: Sequence[str] = ()) -> list[str]:
    """Say what may not have been meant.

    Args:
        ended: policies whose time limit has passed, which a revert does not bring back.
    """
    found = []
    if ended:
        more = len(ended) - _MOST_NAMES
        names = ", ".join(ended[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
        found.append(f"what was set until a time that has passed is not brought back: {names}")
    if outcome.before.tenants and not outcome.state.tenants:
        found.append(NO_TENANT_LEFT)
    return found


def show_prefix_cache(outcome: Outcome) -> dict[str, Any]:
    """Show whose cached prefixes are found no more: policies that begin or cease to skip blocks."""
    changed = {change.ref.name for change in outcome.changes if change.ref.kind == "policy"}
    found = begin_anew(outcome.before, outcome.state, changed)
    return {"begin_anew": found[:_MOST_NAMES], "count": len(found)}


def page(names: list[str], cursor: str, limit: int) -> tuple[list[str], str | None]:
    """Cut a page out of sorted names: those after the cursor, and the next cursor."""
    rest = [name for name in names if name > cursor]
    found = rest[:limit]
    return found, found[-1] if len(rest) > limit else None


class PageQuery(BaseModel):
    """Which part of a list."""

    model_config = ConfigDict(extra="forbid")

    limit: WholeNumber = Field(default=50, ge=1, le=500, description="items at most")
    cursor: str = Field(
        default="",
        pattern=r"^[a-z0-9-]{0,64}$",
        description="`next_cursor` of the page before; the first page without",
        examples=["search-team"],
    )


Page_ = Annotated[PageQuery, Query()]

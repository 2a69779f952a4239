"""What can be done to tenants."""

from datetime import datetime

from spin_server.admin.documents import (
    DEFAULT,
    Limits,
    TenantDocument,
    timestamp,
)
from spin_server.admin.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
)
from spin_server.admin.operations.base import Operation, dump, edit, require_match
from spin_server.admin.state import State
from spin_server.admin.store.interface import Change, Ref

MOST_TENANTS = 10_000


def require_tenant(state: State, name: str) -> TenantDocument:
    """Get a tenant, or refuse the name of none."""
    found = state.tenant(name)
    if found is None and name == DEFAULT:
        raise NotFoundError(
            f"no tenant {DEFAULT!r}: that is the policy of requests of no tenant, which have no "
            "limits and no description"
        )
    if found is None:
        raise NotFoundError(f"no tenant {name!r}")
    return found


def create_tenant(
    name: str,
    description: str,
    *,
    now: datetime,
    limits: Limits | None = None,
    most_tenants: int = MOST_TENANTS,
    reserved: frozenset[str] = frozenset(),
) -> Operation:
    """Make a tenant, with the default policy until something is set.

    Args:
        most_tenants: that there may be.
        reserved: names that mean something else to the engine.
    """

    def operate(state: State) -> list[Change]:
        if name == DEFAULT:
            raise InvalidError(
                f"tenant: expected another name than {DEFAULT!r}, the default policy's"
            )
        if name in reserved:
            raise ConflictError(f"tenant {name!r}: a policy of --spin-policies has this name")
        if state.tenant(name) is not None:
            raise ConflictError(f"tenant {name!r} exists")
        if len(state.tenants) >= most_tenants:
            raise ConflictError(
                f"tenants: expected at most {most_tenants:,}, as many as the policy table has rows"
            )
        tenant = TenantDocument(
            description=description, created_at=timestamp(now), limits=limits or Limits()
        )
        return edit(state, Ref("tenant", name), dump(tenant))

    return operate


def patch_tenant(
    name: str, if_match: str | None, *, description: str | None = None, limits: Limits | None = None
) -> Operation:
    """Change what is said about a tenant, and what it may have at once.

    Args:
        description: None: as it is.
        limits: a merge patch; None: as they are.
    """

    def operate(state: State) -> list[Change]:
        tenant = require_tenant(state, name)
        require_match(state, Ref("tenant", name), if_match)
        update = {
            "description": tenant.description if description is None else description,
            "limits": tenant.limits if limits is None else tenant.limits.patched(limits),
        }
        return edit(state, Ref("tenant", name), dump(tenant.model_copy(update=update)))

    return operate


def delete_tenant(name: str, if_match: str | None) -> Operation:
    """Delete a tenant, its policy and its keys."""

    def operate(state: State) -> list[Change]:
        require_tenant(state, name)
        require_match(state, Ref("tenant", name), if_match)
        gone = [Ref("tenant", name), Ref("policy", name)]
        gone += [Ref("key", n) for n in state.keys if (k := state.key(n)) and k.tenant == name]
        return [change for ref in gone for change in edit(state, ref, None)]

    return operate

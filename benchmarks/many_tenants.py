"""What the benchmarks of the admin API and of tenancy share: a store of many tenants and keys."""

from datetime import UTC, datetime

from spin_server.admin.administration import Administration, Author
from spin_server.admin.documents import Limits
from spin_server.admin.operations import NewKey, create_key, create_tenant, together

TENANTS, KEYS = 1000, 10_000
AUTHOR = Author("benchmark", "benchmark")
_AT_ONCE = 500


def fill(administration: Administration, limits: Limits | None = None) -> list[NewKey]:
    """Make tenants, all with these limits, and keys, every tenant's as many."""
    now, names = datetime.now(UTC), [f"tenant-{index:04}" for index in range(TENANTS)]
    made = [create_tenant(name, "", now=now, limits=limits) for name in names]
    keys = [NewKey.draw() for _ in range(KEYS)]
    for index, key in enumerate(keys):
        owner = {"tenant": names[index % TENANTS], "scopes": [], "description": ""}
        made.append(create_key(key, key.document(now=now, expires_at=None, **owner), now=now))
    for start in range(0, len(made), _AT_ONCE):
        administration.perform(together(made[start : start + _AT_ONCE]), AUTHOR)
    return keys

"""Who is asking, and what he may do."""

import hmac
from dataclasses import dataclass
from datetime import datetime

from spin_server.admin.documents import Scope
from spin_server.admin.errors import ForbiddenError, UnauthorizedError
from spin_server.admin.operations import hash_key
from spin_server.admin.state import State

_MOST_CHARACTERS = 200
_NO_KEY = "expected a key that is valid, got one that is unknown, revoked or expired"
_MAY: dict[Scope, str] = {
    "read": "read",
    "write": "write",
    "keys": "manage keys",
    "audit": "read the audit log",
}


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller with a valid key.

    Args:
        key_id: of his key.
        tenant: the only tenant that he may read and write; None: everything.
        scopes: what he may do.
    """

    key_id: str
    tenant: str | None
    scopes: frozenset[Scope]

    def require(self, scope: Scope, tenant: str | None = None) -> None:
        """Refuse what the key does not allow.

        Args:
            tenant: whose business it is; None: everybody's.

        Raises:
            ForbiddenError: the reason.
        """
        if scope not in self.scopes:
            raise ForbiddenError(f"this key may not {_MAY[scope]}: expected the scope {scope!r}")
        if self.tenant is not None and tenant != self.tenant:
            raise ForbiddenError(f"this key is bound to the tenant {self.tenant!r}")

    def require_grantable(
        self, scopes: set[Scope], tenant: str | None, doing: str = "grant"
    ) -> None:
        """Refuse to hand out more than the caller has, or to manage a key that may do more.

        Args:
            doing: what he wants to do with the scopes, or with a key that has them.
        """
        self.require("keys", tenant)
        if beyond := ", ".join(sorted(scopes - self.scopes)):
            what = beyond if doing == "grant" else f"a key that has {beyond}"
            raise ForbiddenError(f"this key cannot {doing} {what}: it does not have that itself")

    def renewed(self, state: State, now: datetime) -> None:
        """Refuse a key that has ended, or can do less, since the caller was found.

        Raises:
            UnauthorizedError: the reason.
        """
        key = state.key(self.key_id)
        if key is None or key.ended(now):
            raise UnauthorizedError(_NO_KEY)
        if self.scopes - set(key.scopes) or key.tenant != self.tenant:
            raise UnauthorizedError(_NO_KEY)


def authenticate(state: State, authorization: str | None, now: datetime) -> Principal:
    """Find the caller by his `Authorization: Bearer` header.

    Raises:
        UnauthorizedError: no key, or one that is unknown, revoked or expired: all told alike.
    """
    if not authorization:
        raise UnauthorizedError("expected the header Authorization: Bearer KEY")
    scheme, _, secret = authorization.partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not 0 < len(secret) <= _MOST_CHARACTERS:
        raise UnauthorizedError("expected the header Authorization: Bearer KEY")
    digest = hash_key(secret)
    key_id = state.key_ids.get(digest)
    key = state.key(key_id) if key_id is not None else None
    if key is None or key_id is None or not hmac.compare_digest(key.sha256, digest):
        raise UnauthorizedError(_NO_KEY)
    if key.ended(now):
        raise UnauthorizedError(_NO_KEY)
    return Principal(key_id, key.tenant, frozenset(key.scopes))

"""The engine's id of a request: its tenant's name, a character that no name has, a drawn number."""

import secrets

from spin_server.policy.policy import DEFAULT

_SEPARATOR = "."
_CHARACTERS = 24


def new_request_id(tenant: str | None) -> str:
    """Draw an id that says whose the request is."""
    return f"{tenant or DEFAULT}{_SEPARATOR}{secrets.token_hex(_CHARACTERS // 2)}"


def owner(request_id: str | None) -> str:
    """Say whose a request is, by its id; where there are no tenants that may be the client's."""
    name, _, drawn = (request_id or "").partition(_SEPARATOR)
    return name if len(drawn) == _CHARACTERS else DEFAULT

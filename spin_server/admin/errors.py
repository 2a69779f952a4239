"""What the admin layer refuses, and with which HTTP status.

SpinError
└── RefusedError          anything that a caller asked for and did not get
    ├── MalformedError       400  a request with two meanings
    ├── UnauthorizedError    401  no key, or one that is not valid (any more)
    ├── ForbiddenError       403  a valid key that may not do this
    ├── NotFoundError        404  no such tenant, key or revision
    ├── ConflictError        409  it exists already, or cannot be done as things are
    ├── PreconditionError    412  `If-Match` names an older revision
    ├── InvalidError         422  a value that cannot be accepted
    ├── UnconditionalError   428  a write without `If-Match`
    └── UnavailableError     503  the store or the engine does not answer
"""

from typing import ClassVar

from spin_server.errors import SpinError


class RefusedError(SpinError):
    """Base of what is refused; its text is one line for the caller."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Refused"


class MalformedError(RefusedError):
    """A request with two meanings, or none."""

    status, title = 400, "Not well-formed"


class UnauthorizedError(RefusedError):
    """No key, or one that is not valid; never says which."""

    status, title = 401, "No valid key"


class ForbiddenError(RefusedError):
    """A valid key that may not do this."""

    status, title = 403, "Not allowed"


class NotFoundError(RefusedError):
    """No such thing."""

    status, title = 404, "Not found"


class ConflictError(RefusedError):
    """It cannot be done as things are."""

    status, title = 409, "Conflict"


class PreconditionError(RefusedError):
    """The caller has not seen the newest revision."""

    status, title = 412, "Changed meanwhile"


class InvalidError(RefusedError):
    """A value that cannot be accepted."""

    status, title = 422, "Not valid"


class UnconditionalError(RefusedError):
    """A write that does not say what it is based on."""

    status, title = 428, "If-Match is missing"


class UnavailableError(RefusedError):
    """The store or the engine does not answer; nothing is lost, and asking again is right."""

    status, title = 503, "Not available now"

"""What a tenant may have open at once, so that the others get their turn."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """A tenant's; None: no limit.

    Args:
        concurrent_requests: sequences that wait or run.
        queued_tokens: prompt tokens of its requests that have no first token yet.
        context_tokens: prompt and answer of one request.
    """

    concurrent_requests: int | None = None
    queued_tokens: int | None = None
    context_tokens: int | None = None

"""What a tenant may have open at once, so that the others get their turn."""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from spin_server.errors import InputError

# The id of a tenant's request is its name, a character that no name has, and this many drawn ones.
SEPARATOR = "."
ID_CHARACTERS = 24


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


@dataclass(slots=True)
class _Open:
    sequences: int
    tokens: int
    begun: bool = False  # whether the engine was seen to have it


class OpenRequests:
    """The requests of tenants that have limits.

    A request is open from its admission until nobody holds vLLM's generator of it any more: nothing
    is wrapped around the tokens on their way out.

    Args:
        processor: vLLM's output processor, which knows the requests that the engine has.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._open: defaultdict[str, dict[str, _Open]] = defaultdict(dict)

    def check(self, tenant: str, limits: Limits, *, sequences: int, tokens: int) -> None:
        """Refuse a request that its tenant has no room for now.

        Args:
            sequences: that it asks for.
            tokens: of its prompt.

        Raises:
            vllm.exceptions.GracefulHTTPError: 429.
            InputError: there will never be room for it.
        """
        most = limits.concurrent_requests
        if most is not None:
            if sequences > most:
                raise InputError("request", f"at most {most:,} sequences of a tenant", sequences)
            if (running := self.count(tenant)) + sequences > most:
                raise _too_many(f"{running:,} of {most:,} requests of the tenant are open")
        most = limits.queued_tokens
        if most is not None:
            if tokens > most:
                raise InputError("prompt", f"at most {most:,} tokens queued by a tenant", tokens)
            if (queued := self.queued_tokens(tenant)) + tokens > most:
                raise _too_many(f"{queued:,} of {most:,} prompt tokens of the tenant are queued")

    def add(
        self, tenant: str, request_id: str, generator: Any, *, sequences: int, tokens: int
    ) -> None:
        """Note a request that was let in, until its generator is gone."""
        entries = self._open[tenant]
        entries[request_id] = _Open(sequences, tokens)
        weakref.finalize(generator, entries.pop, request_id, None).atexit = False

    def count(self, tenant: str) -> int:
        """Count the sequences that a tenant has open."""
        return sum(entry.sequences for entry in self._open[tenant].values())

    def queued_tokens(self, tenant: str) -> int:
        """Count the prompt tokens of a tenant's requests that have no first token yet."""
        prefix, known = tenant + SEPARATOR, self._processor.external_req_ids
        queued = sum(
            request.prompt_len
            for request in self._processor.request_states.values()
            if request.is_prefilling and request.external_req_id.startswith(prefix)
        )
        for request_id, entry in self._open[tenant].items():
            entry.begun = entry.begun or request_id in known
            queued += 0 if entry.begun else entry.tokens
        return int(queued)


def _too_many(text: str) -> Exception:
    from vllm.exceptions import GracefulHTTPError

    error: Exception = GracefulHTTPError(f"{text}; try again", HTTPStatus.TOO_MANY_REQUESTS)
    return error

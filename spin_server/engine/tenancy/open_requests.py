"""The requests that tenants with limits have open."""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from spin_server.engine.tenancy.callers import Visit
from spin_server.engine.tenancy.limits import Limits
from spin_server.engine.tenancy.request_ids import owner
from spin_server.errors import InputError


@dataclass(slots=True)
class _Open:
    sequences: int
    tokens: int
    begun: bool = False  # whether the engine was given it


class OpenRequests:
    """The requests of tenants that have limits.

    A request is open from its admission until nobody holds vLLM's generator of it any more, or its
    HTTP request is over, whichever is first: nothing is wrapped around the tokens on their way out.

    Args:
        processor: vLLM's output processor, which knows the requests that the engine has.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        # By tenant, HTTP request and the engine's id.
        self._open: defaultdict[str, dict[Visit, dict[str, _Open]]] = defaultdict(dict)
        add_request = processor.add_request

        def noted(request: Any, *rest: Any, **keywords: Any) -> Any:
            name = request.external_req_id
            for entries in self._open.get(owner(name), {}).values():
                if name in entries:
                    entries[name].begun = True
            return add_request(request, *rest, **keywords)

        processor.add_request = noted

    def check(
        self, tenant: str, limits: Limits, visit: Visit, *, sequences: int, tokens: int
    ) -> None:
        """Refuse a request that its tenant has no room for now.

        Args:
            visit: the HTTP request that it is a part of.
            sequences: that it asks for.
            tokens: of its prompt.

        Raises:
            vllm.exceptions.GracefulHTTPError: 429.
            InputError: there will never be room for it beside the rest of its HTTP request.
        """
        visits = self._open[tenant]
        for most, asked, what, state, count in (
            (limits.concurrent_requests, sequences, "sequences", "open", _sequences),
            (limits.queued_tokens, tokens, "prompt tokens", "queued", self._queued),
        ):
            if most is None:
                continue
            counted = {
                other: sum(count(name, entry) for name, entry in entries.items())
                for other, entries in visits.items()
            }
            own = asked + counted.pop(visit, 0)
            if own > most:
                text = f"at most {most:,} {what} of a tenant {state} at once"
                raise InputError("request", text, f"{own:,}")
            if (others := sum(counted.values())) + own > most:
                raise _too_many(f"{others:,} of {most:,} {what} of the tenant are {state}")

    def add(
        self,
        tenant: str,
        request_id: str,
        generator: Any,
        visit: Visit,
        *,
        sequences: int,
        tokens: int,
    ) -> None:
        """Note a request that was let in."""
        visits = self._open[tenant]
        if visit not in visits:
            visits[visit] = {}
            # A generator within a cycle would wait for Python's collector.
            visit.at_end(partial(visits.pop, visit, None))
        visits[visit][request_id] = _Open(sequences, tokens)
        weakref.finalize(generator, visits[visit].pop, request_id, None).atexit = False

    def _queued(self, request_id: str, entry: _Open) -> int:
        """Count a request's prompt tokens as long as a sequence of it has no first token."""
        states = self._processor.request_states
        if parts := self._processor.external_req_ids.get(request_id):
            return entry.tokens if any(states[part].is_prefilling for part in parts) else 0
        return 0 if entry.begun else entry.tokens


def _sequences(_: str, entry: _Open) -> int:
    return entry.sequences


def _too_many(text: str) -> Exception:
    from vllm.exceptions import GracefulHTTPError

    error: Exception = GracefulHTTPError(f"{text}; try again", HTTPStatus.TOO_MANY_REQUESTS)
    return error

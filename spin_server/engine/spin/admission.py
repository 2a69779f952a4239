"""Give every request its policy at the front end.

The policy's id travels in the sampling parameters' `extra_args`, which reach the workers. Clients
send those too (`vllm_xargs`), so what they send under our names is checked here. Where there are
tenants, the caller decides, and what else of a request would reach past his tenant is replaced:
everything that vLLM serves comes by here, whichever route it took.
"""

import copy
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from spin_server.engine.spin.settings import POLICY_ARGUMENT, SpinSettings
from spin_server.engine.tenancy.callers import (
    Authenticator,
    Caller,
    UnknownCallerError,
    Visit,
    current_visit,
)
from spin_server.engine.tenancy.open_requests import OpenRequests
from spin_server.engine.tenancy.request_ids import new_request_id
from spin_server.engine.tenancy.salts import PrefixSalts
from spin_server.errors import InputError
from spin_server.policy.policy import DEFAULT

_OURS = "spin_"
_TRANSFER = "kv_transfer_params"


class PolicyGate:
    """Decides which policy a request runs with.

    Args:
        settings: names of the policies, and whether clients may use them.
    """

    def __init__(self, settings: SpinSettings) -> None:
        self._ids = {DEFAULT: 0} | {n: i for i, n in enumerate(settings.policies, start=1)}
        self._tenants: dict[str, int] = {}
        self._canaries: dict[str, tuple[int, int]] = {}
        self._open = settings.allow_request_policy
        # A client may name its requests, and must not choose its side by it.
        self._salt = secrets.token_bytes(16)
        self._authenticator: Authenticator | None = None
        named = [settings.default, *settings.policies.values()]
        self.salts = PrefixSalts({row: given.policy() for row, given in enumerate(named)})

    def ask(self, authenticator: Authenticator) -> None:
        """Let callers be known by their keys from now on."""
        self._authenticator = authenticator

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, tuple[int, int]]) -> None:
        """Say which row of the table each tenant has; the names of the launch come first.

        Args:
            canaries: by policy, the row that some of its requests have instead, and how many of a
                hundred do.
        """
        for tenant in self._tenants.keys() - rows.keys():
            self.salts.forget(tenant)
        self._tenants, self._canaries = dict(rows), dict(canaries)
        self.salts.name_rows({row: name for name, row in rows.items()})
        self.salts.name_rows({row: name for name, (row, _) in canaries.items()})

    def admit(self, extra_args: dict[str, Any] | None, request_id: str) -> dict[str, Any]:
        """Replace what the client sent under our names by the policy's id.

        Args:
            request_id: decides whether the request is one of a canary's.

        Raises:
            InputError: an argument that the client may not send, or no such policy.
        """
        extra = _checked(extra_args)
        for name in extra:
            if name.startswith(_OURS) and name != POLICY_ARGUMENT:
                raise InputError(f"vllm_xargs.{name}", "no argument of this name", extra[name])
        name = extra.pop(POLICY_ARGUMENT, None)
        if name is not None and not self._open:
            raise InputError(
                f"vllm_xargs.{POLICY_ARGUMENT}",
                "absent, for this server does not let clients choose (--spin-allow-request-policy)",
                repr(name),
            )
        row = self._row(DEFAULT if name is None else name, request_id)
        if row is None:
            raise InputError(
                f"vllm_xargs.{POLICY_ARGUMENT}", f"one of {', '.join(self._ids)}", repr(name)
            )
        extra[POLICY_ARGUMENT] = row
        return extra

    def admit_caller(
        self, visit: Visit, caller: Caller, extra_args: dict[str, Any] | None, request_id: str
    ) -> dict[str, Any]:
        """Give a request its caller's policy; see `admit`.

        Args:
            visit: what it is a part of; the row of its first part will do for the others.

        Raises:
            InputError: an argument under our names.
            vllm.exceptions.GracefulHTTPError: 503, a tenant that this server has no row for.
        """
        extra = _checked(extra_args)
        for name in extra:
            if name.startswith(_OURS):
                text = "no such argument, for the key decides the policy"
                raise InputError(f"vllm_xargs.{name}", text, repr(extra[name]))
        if caller.tenant is None:
            row = self._row(DEFAULT, request_id)
        else:  # a policy of the launch that has its name is not the tenant's
            tried = self._tried(caller.tenant, request_id)
            row = self._tenants.get(caller.tenant) if tried is None else tried
        row = visit.row if row is None else row
        if row is None:
            raise _without_row(caller.tenant)
        extra[POLICY_ARGUMENT] = visit.row = row
        return extra

    def _row(self, name: object, request_id: str) -> int | None:
        """Find the row of a policy that a client may name: the default one, or the launch's."""
        if not isinstance(name, str) or name not in self._ids:
            return None
        tried = self._tried(name, request_id)
        return self._ids[name] if tried is None else tried

    def _tried(self, name: str, request_id: str) -> int | None:
        """Find the row of a policy's canary, if the request is one of those that try it."""
        if (canary := self._canaries.get(name)) is None:
            return None
        row, percent = canary
        return row if self._hundredth(name, request_id) < percent else None

    def _hundredth(self, name: str, request_id: str) -> int:
        """Draw 0 to 99 for a request, the same in the server's life, and another per policy."""
        text = f"{name}\0{request_id}".encode(errors="surrogatepass")
        digest = hashlib.blake2b(text, digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest) % 100

    def guard(self, engine_client: Any) -> None:
        """Make every request of a vLLM engine client pass this gate.

        Source: vllm/v1/engine/async_llm.py (generate, encode), which every serving endpoint calls.
        """
        generate, encode = engine_client.generate, engine_client.encode
        requests = OpenRequests(engine_client.output_processor)

        def guarded(
            prompt: Any, sampling_params: Any, request_id: str, *rest: Any, **keywords: Any
        ) -> Any:
            # A copy: several prompts of one request may share their parameters.
            admitted = copy.copy(sampling_params)
            given = sampling_params.extra_args
            with self._admission() as (visit, caller):
                if caller is None:
                    admitted.extra_args = self.admit(given, request_id)
                    return generate(prompt, admitted, request_id, *rest, **keywords)
                request_id = new_request_id(caller.tenant)
                admitted.extra_args = self.admit_caller(visit, caller, given, request_id)
                prompt = self._as_callers(caller, admitted.extra_args, prompt, keywords)
                if caller.tenant is None or caller.limits is None:
                    return generate(prompt, admitted, request_id, *rest, **keywords)
                size = {"sequences": admitted.n or 1, "tokens": _num_tokens(prompt)}
                _bound_context(admitted, caller.limits.context_tokens, size["tokens"])
                requests.check(caller.tenant, caller.limits, visit, **size)
                generator = generate(prompt, admitted, request_id, *rest, **keywords)
                requests.add(caller.tenant, request_id, generator, visit, **size)
                return generator

        def guarded_encode(
            prompt: Any, pooling_params: Any, request_id: str, *rest: Any, **keywords: Any
        ) -> Any:
            with self._admission() as (visit, caller):
                if caller is not None:
                    request_id = new_request_id(caller.tenant)
                    extra = self.admit_caller(visit, caller, None, request_id)
                    prompt = self._as_callers(caller, extra, prompt, keywords)
                return encode(prompt, pooling_params, request_id, *rest, **keywords)

        engine_client.generate, engine_client.encode = guarded, guarded_encode

    def _as_callers(
        self, caller: Caller, extra: dict[str, Any], prompt: Any, keywords: dict[str, Any]
    ) -> Any:
        """Take off a request what would reach past its caller's tenant; get its prompt."""
        keywords["priority"] = 0
        salt = self.salts.salt(caller.tenant, extra[POLICY_ARGUMENT], caller.since)
        return _salted(prompt, salt)

    @contextmanager
    def _admission(self) -> Iterator[tuple[Visit, Caller | None]]:
        """Find whose a request is, None where nobody needs a key, and note what becomes of it."""
        visit = current_visit() or Visit()
        try:
            if not visit.admitted:  # what has begun goes on to its end, whatever becomes of its key
                visit.caller = self._caller(current_visit())
            yield visit, visit.caller
        except Exception as error:
            visit.refusal = error
            raise
        visit.admitted = True

    def _caller(self, visit: Visit | None) -> Caller | None:
        """Ask once more, for a key may be over since its request came.

        Raises:
            InputError: it came by a door where nobody asked.
            vllm.exceptions.GracefulHTTPError: 401.
        """
        if self._authenticator is None or not self._authenticator.configured():
            return None
        if visit is None:
            raise InputError("request", "one with a key, since there are tenants", "none")
        try:
            return self._authenticator.caller(visit.authorization)
        except UnknownCallerError as error:
            from vllm.exceptions import GracefulHTTPError

            raise GracefulHTTPError(str(error), HTTPStatus.UNAUTHORIZED) from None


def _checked(extra_args: dict[str, Any] | None) -> dict[str, Any]:
    """Copy what a client sent, unless vLLM would fail over it.

    Raises:
        InputError: the argument that vLLM reads as an object is none.
    """
    extra = dict(extra_args or {})
    if not isinstance(found := extra.get(_TRANSFER, {}), dict | None):
        raise InputError(f"vllm_xargs.{_TRANSFER}", "an object", repr(found))
    return extra


def _without_row(tenant: str | None) -> Exception:
    """Refuse a tenant whose policy the engine does not hold: the operator's to mend."""
    from vllm.exceptions import GracefulHTTPError

    text = f"tenant {tenant!r} has no row among the engine's policies (--spin-capacity)"
    error: Exception = GracefulHTTPError(text, HTTPStatus.SERVICE_UNAVAILABLE)
    return error


def _num_tokens(prompt: dict[str, Any]) -> int:
    """Count the tokens of a rendered prompt."""
    found = prompt.get("prompt_token_ids")
    return len(prompt["prompt_embeds"] if found is None else found)


def _bound_context(sampling_params: Any, most: int | None, tokens: int) -> None:
    """Let the answer be no longer than a tenant's context allows.

    Raises:
        InputError: the prompt leaves no room for an answer.
    """
    if most is None:
        return
    if tokens >= most:
        raise InputError("prompt", f"fewer than {most:,} tokens, the tenant's context", tokens)
    asked = sampling_params.max_tokens
    sampling_params.max_tokens = most - tokens if asked is None else min(asked, most - tokens)


def _salted(prompt: Any, salt: str) -> Any:
    """Put a salt into a rendered prompt, over whatever the client sent.

    Raises:
        InputError: a prompt that is not rendered.
    """
    if not isinstance(prompt, dict):
        raise InputError("prompt", "a rendered one", type(prompt).__name__)
    return {**prompt, "cache_salt": salt}

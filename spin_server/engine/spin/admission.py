"""Give every request its policy at the front end.

The policy's id travels in the sampling parameters' `extra_args`, which reach the workers. Clients
send those too (`vllm_xargs`), so what they send under our names is checked here. Where there are
tenants, the caller decides, and what else of a request would reach past his tenant is replaced:
everything that vLLM serves comes by here, whichever route it took.
"""

import copy
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from spin_server.engine.spin.settings import POLICY_ARGUMENT, SpinSettings
from spin_server.engine.tenancy.callers import Authenticator, Caller, current_caller
from spin_server.engine.tenancy.limits import ID_CHARACTERS, SEPARATOR, OpenRequests
from spin_server.engine.tenancy.salts import PrefixSalts
from spin_server.errors import InputError
from spin_server.policy.policy import DEFAULT

_OURS = "spin_"


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
        extra = dict(extra_args or {})
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
        self, caller: Caller, extra_args: dict[str, Any] | None, request_id: str
    ) -> dict[str, Any]:
        """Give a request its caller's policy; see `admit`.

        Raises:
            InputError: an argument under our names, or a tenant that this server has no row for.
        """
        extra = dict(extra_args or {})
        for name in extra:
            if name.startswith(_OURS):
                raise InputError(
                    f"vllm_xargs.{name}", "absent: the key decides the policy", repr(extra[name])
                )
        if caller.tenant is None:
            row = self._row(DEFAULT, request_id)
        else:  # a policy of the launch that has its name is not the tenant's
            tried = self._tried(caller.tenant, request_id)
            row = self._tenants.get(caller.tenant) if tried is None else tried
        if row is None:
            raise InputError("tenant", "one that this server has a row for", repr(caller.tenant))
        extra[POLICY_ARGUMENT] = row
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
            caller = self._caller()
            if caller is None:
                admitted.extra_args = self.admit(given, request_id)
                return generate(prompt, admitted, request_id, *rest, **keywords)
            request_id = _new_id(caller)
            admitted.extra_args = self.admit_caller(caller, given, request_id)
            prompt = self._as_callers(caller, admitted.extra_args, prompt, keywords)
            if caller.tenant is None or caller.limits is None:
                return generate(prompt, admitted, request_id, *rest, **keywords)
            size = {"sequences": admitted.n or 1, "tokens": _num_tokens(prompt)}
            _bound_context(admitted, caller.limits.context_tokens, size["tokens"])
            requests.check(caller.tenant, caller.limits, **size)
            generator = generate(prompt, admitted, request_id, *rest, **keywords)
            requests.add(caller.tenant, request_id, generator, **size)
            return generator

        def guarded_encode(
            prompt: Any, pooling_params: Any, request_id: str, *rest: Any, **keywords: Any
        ) -> Any:
            if (caller := self._caller()) is not None:
                request_id = _new_id(caller)
                extra = self.admit_caller(caller, None, request_id)
                prompt = self._as_callers(caller, extra, prompt, keywords)
            return encode(prompt, pooling_params, request_id, *rest, **keywords)

        engine_client.generate, engine_client.encode = guarded, guarded_encode

    def _as_callers(
        self, caller: Caller, extra: dict[str, Any], prompt: Any, keywords: dict[str, Any]
    ) -> Any:
        """Take off a request what would reach past its caller's tenant; get its prompt."""
        keywords["priority"] = 0
        return _salted(prompt, self.salts.salt(caller.tenant, extra[POLICY_ARGUMENT]))

    def _caller(self) -> Caller | None:
        """Find whose request it is; None where there are no tenants.

        Raises:
            InputError: it came by a door where nobody asked.
        """
        if self._authenticator is None or not self._authenticator.configured():
            return None
        if (caller := current_caller()) is None:
            raise InputError("request", "one with a key, since there are tenants", "none")
        return caller


def _new_id(caller: Caller) -> str:
    """Draw an id that says whose the request is."""
    return f"{caller.tenant or DEFAULT}{SEPARATOR}{secrets.token_hex(ID_CHARACTERS // 2)}"


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

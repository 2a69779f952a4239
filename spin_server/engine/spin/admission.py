"""Give every request its policy at the front end.

The policy's id travels in the sampling parameters' `extra_args`, which reach the workers. Clients
send those too (`vllm_xargs`), so what they send under our names is checked here.
"""

import copy
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from spin_server.engine.spin.settings import POLICY_ARGUMENT, SpinSettings
from spin_server.errors import InputError

_OURS = "spin_"
_DEFAULT = "default"


class PolicyGate:
    """Decides which policy a request runs with.

    Args:
        settings: names of the policies, and whether clients may use them.
    """

    def __init__(self, settings: SpinSettings) -> None:
        self._ids = {_DEFAULT: 0} | {n: i for i, n in enumerate(settings.policies, start=1)}
        self._tenants: dict[str, int] = {}
        self._canaries: dict[str, tuple[int, int]] = {}
        self._open = settings.allow_request_policy
        # A client may name its requests, and must not choose its side by it.
        self._salt = secrets.token_bytes(16)

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, tuple[int, int]]) -> None:
        """Say which row of the table each tenant has; the names of the launch come first.

        Args:
            canaries: by policy, the row that some of its requests have instead, and how many of a
                hundred do.
        """
        self._tenants, self._canaries = dict(rows), dict(canaries)

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
        row = self._row(_DEFAULT if name is None else name, request_id)
        if row is None:
            kinds = " or a tenant" if self._tenants else ""
            raise InputError(
                f"vllm_xargs.{POLICY_ARGUMENT}", f"one of {', '.join(self._ids)}{kinds}", repr(name)
            )
        extra[POLICY_ARGUMENT] = row
        return extra

    def _row(self, name: object, request_id: str) -> int | None:
        if not isinstance(name, str):
            return None
        if name in self._canaries:
            row, percent = self._canaries[name]
            if self._hundredth(name, request_id) < percent:
                return row
        return self._ids.get(name, self._tenants.get(name))

    def _hundredth(self, name: str, request_id: str) -> int:
        """Draw 0 to 99 for a request, the same in the server's life, and another per policy."""
        text = f"{name}\0{request_id}".encode(errors="surrogatepass")
        digest = hashlib.blake2b(text, digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest) % 100

    def guard(self, engine_client: Any) -> None:
        """Make every request of a vLLM engine client pass this gate.

        Source: vllm/v1/engine/async_llm.py (generate), which every serving endpoint calls.
        """
        generate = engine_client.generate

        def guarded(prompt: Any, sampling_params: Any, *arguments: Any, **keywords: Any) -> Any:
            # A copy: several prompts of one request may share their parameters.
            admitted = copy.copy(sampling_params)
            request_id = keywords["request_id"] if "request_id" in keywords else arguments[0]
            admitted.extra_args = self.admit(sampling_params.extra_args, request_id)
            return generate(prompt, admitted, *arguments, **keywords)

        engine_client.generate = guarded

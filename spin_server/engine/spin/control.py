"""Change the policies of a running engine, and read back what its workers hold.

Rows are written between two steps, into tensors that keep their addresses: nothing is captured
again, and a request that is running takes its new policy at its next step.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.metrics import CANARY, SpinCollector
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.tenancy.callers import Authenticator
from spin_server.engine.tenancy.door import Porter, set_porter
from spin_server.engine.tenancy.refusals import Refusals
from spin_server.errors import StartupError
from spin_server.policy.policy import Policy

_RPC_SECONDS = 30.0  # a write waits for the step that runs, and a step for a long prefill


@dataclass(frozen=True, slots=True)
class WorkerRevision:
    """What one worker's table holds, read back from it.

    Args:
        engine: number of the engine.
        rank: of the worker.
        revision: of the policies.
    """

    engine: int
    rank: int
    revision: int


class EngineControl:
    """The policies of a running engine.

    Args:
        engine_client: vLLM's.
        settings: what the engine was started with.
        gate: which learns the tenants' rows.
        collector: which exports the wanted revision.
        refusals: which counts who is sent away.
    """

    def __init__(
        self,
        engine_client: Any,
        settings: SpinSettings,
        gate: PolicyGate,
        collector: SpinCollector,
        refusals: Refusals,
    ) -> None:
        self._client, self._gate, self._collector = engine_client, gate, collector
        self._refusals = refusals
        self._wanted = PolicyTable.of(settings)  # what every worker's table has to hold
        self._written: dict[int, Policy] = {}  # rows that it was told, over the launch's
        self._certain = True  # whether the workers hold all of it, as far as is known
        self._turn = asyncio.Lock()
        self.reserved = frozenset(settings.policies)
        self.first_row = 1 + len(settings.policies)
        self.capacity = settings.capacity

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[WorkerRevision]:
        """Write rows in place in every worker, and compare each table with what was meant.

        Raises:
            StartupError: a worker's table holds something else.
        """
        self._collector.desired_revision = revision
        self._collector.policies.update(rows)
        self._gate.salts.before_write(rows)
        async with self._turn:
            self._wanted.write_all(rows, revision)
            self._written.update(rows)
            # After a failure nobody knows which rows arrived, so all are sent.
            sent = rows if self._certain else self._written
            self._certain = False
            packed = {str(row): policy.pack() for row, policy in sent.items()}
            async with asyncio.timeout(_RPC_SECONDS):
                answers = await self._client.collective_rpc("spin_apply", args=(revision, packed))
            found = self._checked(answers)
            self._certain = True
            self._gate.salts.after_write(rows)
            return found

    async def reports(self) -> list[WorkerRevision]:
        """Read every worker's table back.

        Raises:
            StartupError: a worker's table holds something else than was written.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(_RPC_SECONDS):
                    return self._checked(await self._client.collective_rpc("spin_policies"))
            except StartupError:
                self._certain = False
                raise

    def _checked(self, answers: list[dict[str, Any]]) -> list[WorkerRevision]:
        digest, revision = self._wanted.digest(), self._wanted.revision
        for answer in answers:
            if "error" in answer:
                raise StartupError(f"worker {answer['rank']}: {answer['error']}")
            if (answer["digest"], answer["revision"]) != (digest, revision):
                raise StartupError(
                    f"worker {answer['rank']}: expected the policies of revision {revision}, got "
                    f"other values or another revision ({answer['revision']}) in its table"
                )
        return [WorkerRevision(0, answer["rank"], answer["revision"]) for answer in answers]

    def ask(self, authenticator: Authenticator) -> None:
        """Let every request's caller be known by his key, once there are tenants."""
        self._gate.ask(authenticator)
        max_tokens = self._client.model_config.max_model_len
        set_porter(Porter(authenticator, self._refusals, max_tokens))

    async def outcomes(self) -> dict[str, dict[str, int]]:
        """Count blocks by tenant, or the default policy's name, and outcome; see `snapshot`.

        Source: `WorkerSpin.snapshot`; every rank chooses the same, or `spin_ranks_agree` is 0.
        """
        reports = await self._client.collective_rpc("spin_snapshot")
        self._collector.take_ranks(reports)
        return {name: dict(counts) for name, counts in self._collector.tenants.items()}

    def name_rows(
        self, rows: Mapping[str, int], canaries: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """Say which row each tenant's requests run with.

        Args:
            rows: of the policy table, by tenant.
            canaries: by policy, the row that some of its requests run with instead, and how many
                of a hundred do. Their blocks are counted as the tenant `NAME/canary`.
        """
        canaries = canaries or {}
        tried = {name + CANARY: row for name, (row, _) in canaries.items()}
        self._collector.name_rows({**rows, **tried}, self.first_row)
        self._gate.name_rows(rows, canaries)

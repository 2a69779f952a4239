"""Policies of a running engine, written and read back over an RPC that may fail."""

import asyncio
from typing import Any

import pytest

from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.control import EngineControl, WorkerRevision
from spin_server.engine.spin.metrics import SpinCollector
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.tenancy.refusals import Refusals
from spin_server.engine.worker import SpinWorkerExtension
from spin_server.errors import StartupError
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio


class Client:
    """vLLM's client, and the worker behind it: the product's own methods."""

    def __init__(self) -> None:
        self.worker = SpinWorkerExtension()
        self.worker.rank = 0
        self.lost = 0  # answers that do not come back
        self.refused = 0  # calls that do not arrive

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.refused:
            self.refused -= 1
            raise ConnectionError("not sent")
        await asyncio.sleep(0)
        found = getattr(self.worker, name)(*args)
        if self.lost:
            self.lost -= 1
            raise ConnectionError("no answer")
        return [found]


def policy(sparsity: str) -> Policy:
    return Policy(sparsity=Ratio.parse("sparsity", sparsity))


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> EngineControl:
    settings = SpinSettings(capacity=8)
    monkeypatch.setattr(worker_spin(), "table", PolicyTable.of(settings))
    collector = SpinCollector("m", settings, {})
    gate, refusals = PolicyGate(settings), Refusals(collector)
    return EngineControl(Client(), settings, gate, collector, refusals)


def held(row: int) -> float:
    table = worker_spin().table
    assert table is not None
    return float(table.columns.sparsity[row]) / 1e9


def test_rows_are_written_and_read_back(control: EngineControl) -> None:
    found = asyncio.run(control.apply(7, {0: policy("0.2"), 3: policy("0.65")}))
    assert found == [WorkerRevision(0, 0, 7)]
    assert (held(0), held(3), held(1)) == (0.2, 0.65, 0.3)
    assert asyncio.run(control.reports()) == found


@pytest.mark.parametrize("fault", ["lost", "refused"])
def test_everything_is_sent_again_after_a_failure(control: EngineControl, fault: str) -> None:
    client: Any = control._client
    setattr(client, fault, 1)
    with pytest.raises(ConnectionError):
        asyncio.run(control.apply(1, {3: policy("0.9")}))
    # Nobody has the row any more, so nobody asks for it.
    assert asyncio.run(control.apply(2, {0: policy("0.4")})) == [WorkerRevision(0, 0, 2)]
    assert (held(0), held(3)) == (0.4, 0.9)


def test_table_that_changed_is_noticed_and_mended(control: EngineControl) -> None:
    asyncio.run(control.apply(1, {3: policy("0.9")}))
    table = worker_spin().table
    assert table is not None
    table.write_all({3: policy("0.1")}, 1)
    with pytest.raises(StartupError, match="got other values"):
        asyncio.run(control.reports())
    asyncio.run(control.apply(1, {}))
    assert held(3) == 0.9


def test_report_beside_a_write_sees_one_or_the_other(control: EngineControl) -> None:
    async def both() -> None:
        for revision in range(1, 30):
            await asyncio.gather(
                control.apply(revision, {1: policy(f"0.{revision:02}")}), control.reports()
            )

    asyncio.run(both())


def test_row_that_does_not_exist_is_refused_by_name(control: EngineControl) -> None:
    with pytest.raises(ValueError, match="policy id: expected 0 to 7, got 8"):
        asyncio.run(control.apply(1, {8: policy("0.5")}))

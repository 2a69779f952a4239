"""Worker methods of benchmarks/serving_cpu.py: switch a running engine between configurations.

Not part of the product. The bound keeps as many blocks as SPIN would and does none of SPIN's work:
no prediction, no history, the same evenly spread blocks at every step.
"""

from typing import Any

import torch
from bound import policy_of, spread_blocks
from torch import Tensor

from spin_server.engine.spin.layers import LayerPlan, SpinLayers
from spin_server.engine.spin.requests import StepRows
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.worker import SpinWorkerExtension

_plan, _learn = SpinLayers.plan, SpinLayers.learn
_cache: dict[tuple[int, int], LayerPlan] = {}


def _plan_without_work(
    self: SpinLayers, layer: int, rows: StepRows, num_slots: Tensor
) -> LayerPlan:
    sparsity = int(self.table.columns.sparsity[0])
    key = (int(num_slots.max()), sparsity)
    if key not in _cache:
        _cache.clear()
        blocks, length = spread_blocks(key[0], sparsity, self.options)  # one request
        _cache[key] = LayerPlan(
            blocks.int()[None],
            torch.tensor([length]),
            active=torch.zeros(0, dtype=torch.int64),
            fresh=torch.zeros(0, dtype=torch.bool),
        )
    return _cache[key]


class BenchWorker(SpinWorkerExtension):
    """`spin_server`'s worker methods, and one more."""

    def bench_switch(self, sparsity: str, exploration: str, with_work: bool) -> dict[str, Any]:
        """Change the default policy, and whether SPIN does its work; returns the snapshot."""
        table = worker_spin().table
        assert table is not None
        table.write(0, policy_of(sparsity, exploration))
        SpinLayers.plan = _plan if with_work else _plan_without_work  # type: ignore[method-assign]
        SpinLayers.learn = _learn if with_work else lambda *_: None  # type: ignore[method-assign]
        return worker_spin().snapshot()

"""Worker methods of benchmarks/serving_cpu.py: switch a running engine between configurations.

Not part of the product. The bound keeps as many blocks as SPIN would and does none of SPIN's work:
no prediction, no history, the same evenly spread blocks at every step.
"""

from typing import Any

import torch
from torch import Tensor

from spin_kernels.block_budget import block_budget, ceil_div, keep_count
from spin_kernels.block_list import block_list
from spin_server.engine.spin.layers import LayerPlan, SpinLayers
from spin_server.engine.spin.requests import StepRows
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.worker import SpinWorkerExtension
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

_plan, _learn = SpinLayers.plan, SpinLayers.learn
_cache: dict[tuple[int, int], LayerPlan] = {}


def _plan_without_work(
    self: SpinLayers, layer: int, rows: StepRows, num_slots: Tensor
) -> LayerPlan:
    sparsity = int(self.table._columns["sparsity"][0])
    key = (int(num_slots.max()), sparsity)
    if key not in _cache:
        _cache.clear()
        block_size = self.options.block_size
        num_blocks = ceil_div(num_slots, block_size)
        budget = block_budget(
            num_blocks,
            keep_count(num_blocks, torch.full_like(num_blocks, sparsity)),
            top_k=self.options.top_k,
            block_size=block_size,
        )
        mask = torch.zeros(len(num_slots), int(num_blocks.max()), dtype=torch.bool)
        for row, (blocks, kept) in enumerate(zip(num_blocks, budget, strict=True)):
            mask[row, torch.linspace(0, int(blocks) - 1, int(kept)).round().long()] = True
        listed, counts = block_list(mask)
        _cache[key] = LayerPlan(
            listed[:, : int(counts.max())],
            num_slots - (num_blocks - counts) * block_size,
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
        policy = Policy(
            sparsity=Ratio.parse("sparsity", sparsity),
            exploration=Ratio.parse("exploration", exploration),
        )
        table.write(0, policy)
        SpinLayers.plan = _plan if with_work else _plan_without_work  # type: ignore[method-assign]
        SpinLayers.learn = _learn if with_work else lambda *_: None  # type: ignore[method-assign]
        return worker_spin().snapshot()

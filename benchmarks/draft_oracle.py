"""What SPIN should choose under speculation, kept beside an engine on a GPU; of gpu_worker.py.

Every layer of every step is scored densely too, and every request's histories are kept once more,
by the algorithm in plain torch, with the verdicts that the engine itself came to.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import sparse_attn_indexer

from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import (
    StepInputs,
    StepPlan,
    commit_step,
    gather_scores,
    plan_step,
)
from spin_server.engine.spin.device_drafts import DraftedLayers
from spin_server.engine.spin.requests import StepRows
from spin_server.engine.spin.worker_state import worker_spin


@dataclass
class _Planned:
    """One request's step in one layer."""

    request: int
    policies: PolicyRows
    inputs: StepInputs
    plan: StepPlan
    scores: Tensor  # dense: [1, rows, slots]


@dataclass
class DraftOracle:
    """The histories of every request, in plain torch on the host.

    Args:
        layers: the engine's; what it is told and what it is asked is noted from now on.
    """

    layers: DraftedLayers
    state: SpinState = field(init=False)
    rows: StepRows | None = None
    planned: list[_Planned] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers = self.layers
        num_blocks = layers._plan.blocks.shape[2]
        slots = num_blocks * layers.options.block_size
        self.state = SpinState.zeros(
            len(layers.numbers) * layers.num_states,
            num_positions=slots,
            num_offsets=slots + 1,
            num_blocks=num_blocks,
            history=layers.options.history,
        )
        begin, judge = layers.begin, layers.judge

        def noted_begin(rows: StepRows | None, positions: Tensor | None = None) -> None:
            self.rows, self.planned = rows, []
            if rows is not None and len(rows.resets):
                first = torch.arange(len(layers.numbers))[:, None] * layers.num_states
                self.state.reset((first + rows.resets).flatten())
            begin(rows, positions)

        def noted_judge(num_sampled: Tensor) -> None:
            self._commit(num_sampled.tolist())
            judge(num_sampled)

        layers.begin, layers.judge = noted_begin, noted_judge  # type: ignore[method-assign]

    def check(
        self,
        indexer: Any,
        metadata: Any,
        q: Tensor,
        weights: Tensor,
        chosen: Tensor,
        found: Counter[str],
    ) -> None:
        """Compare one layer of a step with the definition, and with dense scores."""
        assert self.rows is not None
        layers, decode = self.layers, metadata.decode
        index = layers.numbers.index(indexer.layer_number)
        num_rows, num_requests = metadata.num_decode_tokens, metadata.num_decodes
        lists = indexer._num_lists(metadata)
        dense = sparse_attn_indexer.fp8_fp4_paged_mqa_logits(
            (q[:num_rows].reshape(lists, num_rows // lists, *q.shape[1:]), None),
            sparse_attn_indexer.kv_cache_as_quant_view(
                indexer.k_cache.kv_cache, indexer.head_dim, False
            ),
            weights[:num_rows],
            decode.seq_lens[:lists],
            decode.block_table,
            decode.schedule_metadata,
            max_model_len=indexer.max_model_len,
            clean_logits=False,
            indices=decode.indices,
        )
        num_slots = decode.seq_lens.reshape(-1)[:num_rows].long().cpu()
        starts = layers._drafts.starts.tolist()
        width = layers._plan.blocks.shape[2] * layers.options.block_size
        for request in range(num_requests):
            first, last = starts[request], starts[request + 1]
            count = int(layers._plan.counts[index, request])
            blocks = layers._plan.blocks[index, request, :count].long()
            slots = (blocks[:, None] * 64 + torch.arange(64, device=blocks.device)).flatten()
            scores = torch.full((1, last - first, width), torch.nan)
            for row in range(first, last):
                visible = slots[slots < int(num_slots[row])]
                scores[0, row - first, : int(num_slots[row])] = dense[row, : num_slots[row]].cpu()
                best = dense[row, visible].topk(min(indexer.topk_tokens, len(visible))).values
                top = chosen[row, : indexer.topk_tokens].long()
                top = top[top >= 0]
                found["rows"] += 1
                found["sparse rows"] += len(visible) < int(num_slots[row])
                exact = len(top) == len(best) and torch.equal(
                    dense[row, top].sort(descending=True).values, best
                )
                found["other top-K than exact"] += not exact
                found["top-K outside the blocks"] += not bool(torch.isin(top, visible).all())
            planned = self._plan(index, request, num_slots[first:last], scores)
            if planned is not None:
                wanted = planned.plan.blocks[0][planned.plan.blocks[0] >= 0].tolist()
                found["requests planned"] += 1
                found["other blocks than the definition"] += blocks.tolist() != wanted

    def _plan(self, index: int, request: int, num_slots: Tensor, scores: Tensor) -> _Planned | None:
        layers, rows = self.layers, self.rows
        assert rows is not None
        slot = int(rows.slots[request])
        if slot < 0 or int(num_slots[0]) <= layers.dense_slots:
            return None
        position = int(layers._rows.positions[request])
        queries = (position + torch.arange(len(num_slots)))[None] // layers.compress_ratio
        table = worker_spin().table
        assert table is not None
        policies = table.rows(rows.policies[request : request + 1].to(layers._device))
        columns = {f.name: getattr(policies, f.name).cpu() for f in fields(policies)}
        policies = PolicyRows(**columns)
        inputs = StepInputs(
            state_rows=torch.tensor([index * layers.num_states + slot]),
            query_positions=queries,
            num_slots=num_slots[None],
            request_keys=rows.keys[request : request + 1],
            layers=torch.tensor([layers.numbers[index]]),
            diagonal_positions=queries,
        )
        width = layers._plan.blocks.shape[2]
        plan = plan_step(layers.options, policies, self.state, inputs, width=width)
        planned = _Planned(request, policies, inputs, plan, scores)
        self.planned.append(planned)
        return planned

    def _commit(self, num_sampled: list[int]) -> None:
        for step in self.planned:
            compact = gather_scores(step.scores, step.plan.blocks, self.layers.options.block_size)
            accepted = torch.tensor([num_sampled[step.request] - 1])
            commit_step(
                self.layers.options,
                step.policies,
                self.state,
                step.inputs,
                step.plan,
                compact,
                accepted,
            )
        self.planned = []

"""SPIN's tensors and kernels on one GPU, under speculation.

A step verifies several rows of a request: its last token and its drafts. Each row chooses blocks,
and all of them score what any of them chose. What the first row scored is learnt at once; what the
drafts scored waits in a stash for the verdict, and the next step learns those that were accepted
before it plans. All of it lies in the captured graph but the verdict itself. Knows nothing of vLLM.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spin_kernels.arguments import DraftRows, Rows, Stash
from spin_kernels.compact_table.triton import compact_table
from spin_kernels.draft_stash.triton import draft_stash
from spin_kernels.history_update.triton import history_update
from spin_kernels.plan_union.triton import plan_union
from spin_kernels.row_predict.triton import row_predict
from spin_kernels.slot_remap.triton import slot_remap
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.layers import FALLBACKS
from spin_server.engine.spin.requests import NO_SLOT, StepRows


class DraftedLayers(DeviceLayers):
    """The histories of all layers on a GPU where requests have drafts; see `DeviceLayers`."""

    shared_lengths = False  # layers choose differently, and so their unions differ in size

    def __init__(self, layers: Sequence[int], *arguments: Any, **keywords: Any) -> None:
        super().__init__(layers, *arguments, **keywords)
        num_layers, num_requests, num_blocks = self._plan.blocks.shape
        num_rows = self._plan.lengths.shape[1]
        # vLLM builds its model with bfloat16 as the default.
        self._predicted = torch.zeros(
            num_layers, num_rows, num_blocks, dtype=torch.float32, device=self._device
        )
        self._first_slots = torch.zeros_like(self._plan.counts)
        self._stash = Stash.empty(
            num_layers,
            num_requests=num_requests,
            num_drafts=self.num_drafts,
            num_slots=num_blocks * self.options.block_size,
            device=self._device,
        )
        self._even = [
            DraftRows.even(num_requests, count, self._device)
            for count in range(1, self.num_drafts + 2)
        ]
        self._drafts, self._num_requests, self._rows_each = self._even[0], 0, 1
        self._places = torch.empty(0)  # of the step's requests, on the host

    @property
    def num_bytes(self) -> int:
        """Bytes of the histories and of everything beside them."""
        beside = self._stash.num_bytes + self._predicted.nbytes + self._first_slots.nbytes
        return super().num_bytes + beside

    def warm_up(self) -> None:
        """Launch every kernel once, for rows of nobody's, so that none compiles while it serves."""
        self.begin(None)
        capacity, device = self._plan.counts.shape[1], self._device
        num_rows = self._plan.lengths.shape[1]
        lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        pages = torch.zeros(self._tables.shape[1:], dtype=torch.int32, device=device)
        indices = torch.full((num_rows, self.options.top_k), -1, dtype=torch.int32, device=device)
        for table in (pages, pages[:capacity]):  # a table for each row, and for each request
            self.plan(lengths, table, num_requests=capacity)
        for dtype in self._score_types():
            scores = torch.zeros(num_rows, 64, dtype=dtype, device=device)
            for layer in self.numbers:
                self.remap(layer, indices)
                for beside in (False, True):
                    self.learn(layer, scores, beside=beside)
        for beside in (False, True):
            self._commit(range(len(self.numbers)), beside=beside)
        self.judge(torch.ones(capacity, dtype=torch.int32, device=device))

    def begin(self, rows: StepRows | None, positions: Tensor | None = None) -> None:
        """See `DeviceLayers`."""
        super().begin(rows, positions)
        self._places = torch.empty(0) if rows is None else rows.slots

    def _reset(self, slots: Tensor) -> None:
        super()._reset(slots)
        self._stash.drop(slots)

    def judge(self, num_sampled: Tensor) -> None:
        """Say how many tokens the step's requests gave, once it is known.

        Args:
            num_sampled: (int): [requests], in batch order; one more than the accepted drafts.
        """
        self._stash.judge(num_sampled)

    def note_unscored(self, num_requests: int) -> None:
        """Count the requests that hold a history and are scored as prompts, in every layer.

        Args:
            num_requests: whose rows are scored as decode rows, the first of the batch.
        """
        unscored = self._places[num_requests:] != NO_SLOT
        self.fallbacks[FALLBACKS.index("uneven_drafts")] += unscored.sum() * len(self.numbers)

    def plan(
        self,
        num_slots: Tensor,
        block_table: Tensor,
        *,
        num_requests: int | None = None,
        row_counts: Tensor | None = None,
        first: int = 0,
        count: int | None = None,
        beside: bool = False,
    ) -> None:
        """See `DeviceLayers`; learns first which drafts of the step before were accepted.

        Args:
            num_slots, block_table, num_requests, row_counts, first, count: see there.
            beside: leave most of the GPU to what runs at the same time.
        """
        assert num_requests is not None
        num_rows = len(num_slots)
        if row_counts is None:
            even = self._even[num_rows // num_requests - 1]
            drafts = DraftRows(even.starts[: num_requests + 1], even.owners[:num_rows])
        else:
            drafts = DraftRows.of(row_counts, num_rows)
        self._rows = replace(self._rows, num_slots=num_slots)
        self._drafts, self._num_requests = drafts, num_requests
        self._rows_each = 0 if row_counts is not None else num_rows // num_requests  # 0: uneven
        num_layers = len(self.numbers) if count is None else count
        self._commit(range(first, first + num_layers), beside=beside)
        layers = {"first_layer": first, "num_layers": num_layers}
        sizes = {
            "num_requests": num_requests,
            "dense_slots": self.dense_slots,
            "block_size": self.options.block_size,
            "compress_ratio": self.compress_ratio,
        }
        row_predict(self.histories, self._rows, drafts, self._predicted, **layers, **sizes)
        plan_union(
            self.histories,
            self._rows,
            drafts,
            self._columns,
            self._layers,
            self._predicted,
            self._plan,
            self._first_slots,
            top_k=self.options.top_k,
            seed=self.options.seed,
            row0=self.options.mask_sharing == "row0",
            **layers,
            **sizes,
        )
        self._list(block_table, first, num_layers)
        self._listed_from = block_table.data_ptr()

    def _list(self, block_table: Tensor, first: int, num_layers: int) -> None:
        compact_table(
            block_table,
            self._plan,
            self._tables,
            first_layer=first,
            num_layers=num_layers,
            num_rows=len(block_table),
            owners=self._owners(len(block_table)),
        )

    def _owners(self, num_rows: int) -> Tensor | None:
        """Whose list each row takes; None where there is a row for each request."""
        return None if num_rows == self._num_requests else self._drafts.owners

    def table(self, layer: int, block_table: Tensor) -> Tensor:
        """Get the pages of the blocks that a layer scores; see `DeviceLayers`.

        Args:
            layer: its number in the model.
            block_table: (int32): [requests, pages], or a row for each row.
        """
        index = self.numbers.index(layer)
        if block_table.data_ptr() != self._listed_from:  # another group of vLLM's KV caches
            self._list(block_table, index, 1)
        return self._tables[index, : len(block_table)]

    def remap(self, layer: int, indices: Tensor) -> None:
        """See `DeviceLayers`."""
        blocks = self._plan.blocks[self.numbers.index(layer)]
        owners = self._owners(len(indices))
        slot_remap(indices, blocks, block_size=self.options.block_size, owners=owners)

    def learn(self, layer: int, scores: Tensor, *, beside: bool = False) -> None:
        """Fold what a layer's first rows scored into its histories, and put the rest aside.

        Args:
            layer, scores, beside: see `DeviceLayers`.
        """
        index = self.numbers.index(layer)
        if self._rows_each:
            firsts = scores[:: self._rows_each]
        else:
            firsts = scores.index_select(0, self._drafts.starts[:-1])
        self._update(index, replace(self._rows, num_slots=self._first_slots[index]), firsts, beside)
        if self.options.update_rule == "prefix":
            draft_stash(
                self._stash,
                self._rows,
                self._drafts,
                self._plan,
                index,
                scores,
                num_requests=self._num_requests,
                block_size=self.options.block_size,
            )

    def _commit(self, layers: range, *, beside: bool) -> None:
        """Learn, in order, from the drafts of the step before that were accepted."""
        if self.options.update_rule == "row0":
            return
        stash = self._stash
        for index in layers:
            # The lists of the step before are still there: the layer is about to be planned.
            for draft in range(self.num_drafts):
                rows = Rows(
                    slots=stash.slots[index],
                    policies=stash.policies[index],
                    keys=stash.slots[index],  # not read
                    positions=stash.positions[index, draft],
                    num_slots=stash.num_slots[index, draft],
                )
                scores = stash.scores[index, :, draft]
                self._update(index, rows, scores, beside, draft=draft + 1)

    def _update(self, index: int, rows: Rows, scores: Tensor, beside: bool, draft: int = 0) -> None:
        steps = self._stash.step_numbers if draft else self._plan.step_numbers
        plan = replace(self._plan, step_numbers=steps)
        history_update(
            self.histories,
            rows,
            self._columns,
            plan,
            index,
            scores,
            num_rows=len(scores),
            block_size=self.options.block_size,
            compress_ratio=self.compress_ratio,
            beside=beside,
            accepted=self._stash.accepted if draft else None,
            draft=draft,
        )


def device_class(num_drafts: int) -> type[DeviceLayers]:
    """Get the class for as many drafts of each request."""
    return DraftedLayers if num_drafts else DeviceLayers

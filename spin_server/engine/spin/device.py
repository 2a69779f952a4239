"""SPIN's tensors and kernels on one GPU.

Everything is allocated once and written in place: a captured CUDA graph replays the launches and
never this Python. `begin` runs before every step, captured or not; `plan` and `learn` are launched
by the layers, and captured with them. Knows nothing of vLLM.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from spin_kernels.arguments import Histories, Rows, StepPlan
from spin_kernels.compact_table.triton import compact_table
from spin_kernels.history_update.triton import history_update
from spin_kernels.plan_blocks.triton import plan_blocks
from spin_kernels.slot_remap.triton import slot_remap
from spin_kernels.window_max.triton import window_max
from spin_server.algorithm.options import HistoryType, SpinOptions
from spin_server.engine.spin.digests import checksums, layer_checksums
from spin_server.engine.spin.layers import FALLBACKS, count_fallbacks
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import NO_SLOT, StepRows
from spin_server.policy.policy import Policy

_TABLE_ALIGNMENT = 4  # pages


def device_bytes(
    num_layers: int,
    *,
    num_states: int,
    num_rows: int,
    max_slots: int,
    num_policies: int,
    history: HistoryType = "float32",
    num_drafts: int = 0,
) -> int:
    """Say what a GPU worker takes for SPIN, without making it; see `DeviceLayers`."""
    from spin_server.engine.spin.device_drafts import device_class

    layers = device_class(num_drafts)(
        range(num_layers),
        SpinOptions(history=history),
        PolicyTable(num_policies, Policy(), "meta"),
        num_states=num_states,
        num_rows=num_rows,
        max_slots=max_slots,
        compress_ratio=1,
        dense_slots=0,
        num_drafts=num_drafts,
        device=torch.device("meta"),
    )
    return layers.num_bytes


class DeviceLayers:
    """The histories of all layers on a GPU, and the plan of the step that runs.

    Args:
        layers: their numbers in the model, part of the random draw's key, in running order.
        options: SPIN's choices.
        table: the policies, on the same device.
        num_states: requests that may hold a history at once.
        num_rows: requests of the largest decode batch, each of which has a row without drafts.
        max_slots: slots of the longest context.
        compress_ratio: tokens per slot.
        dense_slots: contexts of no more slots are scored densely; K or more.
        device: where.
        num_drafts: of each request, at most; `DraftedLayers` takes more than none.
    """

    shared_lengths = True  # whether a row scores as many slots in every layer

    def __init__(
        self,
        layers: Sequence[int],
        options: SpinOptions,
        table: PolicyTable,
        *,
        num_states: int,
        num_rows: int,
        max_slots: int,
        compress_ratio: int,
        dense_slots: int,
        device: torch.device,
        num_drafts: int = 0,
    ) -> None:
        self.numbers, self.num_states = tuple(layers), num_states
        self.num_drafts = num_drafts
        # DeepGEMM may read a block table by pairs of pages, so every layer's starts aligned.
        run = _TABLE_ALIGNMENT * options.block_size
        max_slots = -(-max_slots // run) * run
        self.options = options
        self._device = device
        self.compress_ratio, self.dense_slots = compress_ratio, dense_slots
        self._layers = torch.tensor(self.numbers, device=device)
        self.histories = Histories.zeros(
            len(layers),
            num_states=num_states,
            num_slots=max_slots,
            block_size=options.block_size,
            device=device,
            dtype=getattr(torch, options.history),
        )
        num_blocks = self.histories.vertical_max.shape[1]
        self._plan = StepPlan.empty(
            len(layers),
            num_rows=num_rows,
            num_blocks=num_blocks,
            num_policies=table.capacity,
            device=device,
            num_lengths=num_rows * (1 + num_drafts),
        )
        table_shape = (len(layers), num_rows * (1 + num_drafts), num_blocks)
        self._tables = torch.zeros(table_shape, dtype=torch.int32, device=device)
        self._listed_from = 0  # address of the block table that the tables were made of
        self._staged = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self._staged[0] = NO_SLOT
        self._rows = Rows(
            slots=self._staged[0],
            policies=self._staged[1],
            keys=self._staged[2],
            positions=self._staged[3],
            num_slots=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )
        self._columns = table.columns
        self.fallbacks = torch.zeros(len(FALLBACKS), dtype=torch.int64, device="cpu")

    @property
    def outcomes(self) -> Tensor:
        """Blocks by outcome, (int64): [layers, outcomes]; reading it waits for the device."""
        return self._plan.outcomes.sum(1)

    @property
    def policy_outcomes(self) -> Tensor:
        """Blocks by outcome, (int64): [policies, outcomes]; reading it waits for the device."""
        return self._plan.outcomes.sum(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the histories and of everything beside them."""
        beside = self._plan.num_bytes + self._tables.nbytes + self._staged.nbytes
        return int(self.histories.num_bytes + beside)

    def warm_up(self) -> None:
        """Launch every kernel once, for rows of nobody's, so that none compiles while it serves."""
        device = self._device
        self.begin(None)
        lengths = torch.zeros(len(self._rows.slots), dtype=torch.int32, device=device)
        pages = torch.zeros(self._tables.shape[1:], dtype=torch.int32, device=device)
        indices = torch.full(
            (len(lengths), self.options.top_k), -1, dtype=torch.int32, device=device
        )
        self.plan(lengths, pages)
        for layer in self.numbers:
            self.remap(layer, indices)
            for dtype, beside in product(self._score_types(), (False, True)):
                scores = torch.zeros(len(lengths), 64, dtype=dtype, device=device)
                self.learn(layer, scores, beside=beside)

    def _score_types(self) -> tuple[torch.dtype, ...]:
        """What DeepGEMM's scores may be: one type on Hopper, and either on Blackwell."""
        device = self._device
        on_blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
        return (torch.float32, torch.bfloat16) if on_blackwell else (torch.float32,)

    def begin(self, rows: StepRows | None, positions: Tensor | None = None) -> None:
        """Tell the device whose rows come next, before anything of the step is launched.

        Args:
            rows: of the step, in batch order; None for a step of nobody's, such as a capture.
            positions: (int64): [requests]; of each request's first row, as the device knows them,
                where the host guesses.
        """
        if rows is None:
            self._staged[0].fill_(NO_SLOT)
            return
        if len(rows.resets):
            self._reset(self._send(rows.resets))
        self.fallbacks += count_fallbacks(
            rows, dense_slots=self.dense_slots, compress_ratio=self.compress_ratio
        ) * len(self.numbers)
        staged = torch.stack([rows.slots, rows.policies, rows.keys, rows.positions])
        num_rows = staged.shape[1]
        self._staged[:, :num_rows].copy_(self._send(staged))
        self._staged[0, num_rows:].fill_(NO_SLOT)
        if positions is not None:
            self._staged[3, :num_rows].copy_(positions)

    def _reset(self, slots: Tensor) -> None:
        self.histories.reset(slots)

    def _send(self, tensor: Tensor) -> Tensor:
        """Copy to the device without waiting for it."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def plan(
        self,
        num_slots: Tensor,
        block_table: Tensor,
        *,
        num_requests: int | None = None,
        row_counts: Tensor | None = None,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Choose the blocks that layers score in this step, and list their pages.

        Args:
            num_slots: (int32): [rows]; slots visible to each decode row; must stay where it is
                until the step ends.
            block_table: (int32): [rows, pages], or with drafts [requests, pages].
            num_requests, row_counts: how many requests the rows are of, and (int32): [requests] how
                many are of each, if not as many; without drafts, rows are requests.
            first, count: which layers, in running order; all, unless they are given.
        """
        num_rows = len(num_slots)
        self._rows = replace(self._rows, num_slots=num_slots)
        layers = {
            "first_layer": first,
            "num_layers": len(self.numbers) if count is None else count,
            "num_rows": num_rows,
        }
        sizes = {
            "dense_slots": self.dense_slots,
            "block_size": self.options.block_size,
            "compress_ratio": self.compress_ratio,
        }
        window_max(self.histories, self._rows, **layers, **sizes)
        plan_blocks(
            self.histories,
            self._rows,
            self._columns,
            self._layers,
            self._plan,
            top_k=self.options.top_k,
            seed=self.options.seed,
            **layers,
            **sizes,
        )
        compact_table(
            block_table,
            self._plan,
            self._tables,
            first_layer=first,
            num_layers=layers["num_layers"],
            num_rows=num_rows,
        )
        self._listed_from = block_table.data_ptr()

    def lengths(self, layer: int, shape: torch.Size) -> Tensor:
        """Get how many slots each row scores.

        Args:
            layer: its number in the model, which must be planned.
            shape: of vLLM's lengths: [rows, 1], or [requests, rows of each].

        Returns:
            (int32): shape; with `shared_lengths` the same in every layer.
        """
        return self._plan.lengths[self.numbers.index(layer), : shape.numel()].view(shape)

    def table(self, layer: int, block_table: Tensor) -> Tensor:
        """Get the pages of the blocks that a layer scores.

        Args:
            layer: its number in the model.
            block_table: (int32): [rows, pages].

        Returns:
            (int32): [rows, pages]; valid until the layer is planned again.
        """
        index, num_rows = self.numbers.index(layer), len(block_table)
        if block_table.data_ptr() != self._listed_from:  # another group of vLLM's KV caches
            compact_table(
                block_table,
                self._plan,
                self._tables,
                first_layer=index,
                num_layers=1,
                num_rows=num_rows,
            )
        return self._tables[index, :num_rows]

    def remap(self, layer: int, indices: Tensor) -> None:
        """Turn a layer's compact top-K indices into slots, in place.

        Args:
            layer: its number in the model.
            indices: (int32): [rows, k]; -1 stays.
        """
        blocks = self._plan.blocks[self.numbers.index(layer)]
        slot_remap(indices, blocks, block_size=self.options.block_size)

    def learn(self, layer: int, scores: Tensor, *, beside: bool = False) -> None:
        """Fold what a layer scored into its histories.

        Args:
            layer: its number in the model.
            scores: (float): [rows, at least the longest row's slots]; compact.
            beside: leave most of the GPU to what runs at the same time.
        """
        history_update(
            self.histories,
            self._rows,
            self._columns,
            self._plan,
            self.numbers.index(layer),
            scores,
            num_rows=len(scores),
            block_size=self.options.block_size,
            compress_ratio=self.compress_ratio,
            beside=beside,
        )

    def digest(self, *, histories: bool = True) -> dict[str, list[int]]:
        """Hash what the last step chose for its rows with a history; waits for the device.

        Args:
            histories: whether to hash these too.

        Returns:
            `choices` and `histories`, layer by layer; see `SpinLayers.digest`.
        """
        plan, held = self._plan, self.histories
        live = self._rows.slots != NO_SLOT  # other rows hold an earlier step's plan
        place = torch.arange(plan.blocks.shape[2], device=self._device)
        found: dict[str, list[int]] = {"choices": []}
        for blocks, counts in zip(plan.blocks, plan.counts, strict=True):
            listed = place < (counts * live)[:, None]
            found["choices"] += checksums(blocks.where(listed, -1)[None])
        if histories:
            tensors = (held.vertical, held.diagonal, held.last_observed, held.steps)
            found["histories"] = layer_checksums(len(self.numbers), *tensors)
        return found

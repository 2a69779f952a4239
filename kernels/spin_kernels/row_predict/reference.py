"""Predicted block scores of the rows of a step with drafts, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import DraftRows, Histories, Rows
from spin_kernels.block_predict import block_predict


def row_predict(
    histories: Histories,
    rows: Rows,
    drafts: DraftRows,
    predicted: Tensor,
    *,
    first_layer: int,
    num_layers: int,
    num_requests: int,
    dense_slots: int,
    block_size: int,
    compress_ratio: int,
) -> None:
    """Predict every block's score from V and D, as each row of a request sees them.

    The rows of a step look from different places, and after a rejection the next step's from
    earlier ones; so no maxima are kept from step to step, and both histories are read whole.

    Args:
        histories: read.
        rows: of the step: `positions` are those of each request's first row, `num_slots` all rows'.
        drafts: which rows are whose.
        predicted: (float32): [L, T, W]; written for visible blocks.
        first_layer, num_layers: which layers.
        num_requests: of this step.
        dense_slots: requests whose first row sees no more slots are left alone.
        block_size: slots per block.
        compress_ratio: tokens per slot.

    Source: SPIN, predicted slot score, pooled by its largest (arXiv 2610.09025).
    """
    width = predicted.shape[2]
    starts = drafts.starts.tolist()
    for request in range(num_requests):
        first, last = starts[request], starts[request + 1]
        slot = int(rows.slots[request])
        if slot < 0 or first == last or int(rows.num_slots[first]) <= dense_slots:
            continue
        count = last - first
        device = histories.vertical.device
        positions = int(rows.positions[request]) + torch.arange(count, device=device)
        for layer in range(first_layer, first_layer + num_layers):
            state = layer * histories.num_states + slot
            predicted[layer, first:last] = block_predict(
                histories.vertical.float(),
                histories.diagonal.float(),
                torch.full((count,), state, device=device),
                positions // compress_ratio,
                rows.num_slots[first:last].long(),
                num_blocks=width,
                block_size=block_size,
                pooling="max",
            )

"""The update of a layer's histories as one Triton kernel."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import Histories, PolicyColumns, Rows, StepPlan


@dataclass(frozen=True, slots=True)
class Shape:
    """How many programs share the work, of how many warps, in tiles of how many blocks."""

    programs: int
    warps: int
    blocks: int


ALONE = Shape(programs=132 * 16, warps=4, blocks=8)  # fills a GPU
# A program takes a whole multiprocessor, and leaves the others to the model's kernels. More, or
# smaller ones that spread over all, delay those by as much as they save (docs/log.md).
BESIDE = Shape(programs=24, warps=32, blocks=64)


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """Round float32 to what a type can hold, to the even one of two that are as near.

    Triton's interpreter would cut off instead, where it stores bfloat16.
    """
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        values = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _ordered(bits):
    """Turn a float32's bits into an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _block_max(values):
    """Give every lane of a block its largest value: [parts, blocks, lanes] to [1, blocks, 1].

    As integers: a GPU has one instruction for those, and ten for floats.
    """
    bits = tl.max(values, 0, keep_dims=True).to(tl.int32, bitcast=True)
    largest = tl.max(_ordered(bits), 2, keep_dims=True)
    return _ordered(largest).to(tl.float32, bitcast=True)


@triton.jit
def _read_tile(
    block,
    listed,
    column,
    num_slots,
    query,
    num_offsets,
    scores,
    vertical,
    diagonal,
    inner,
    BLOCK_SIZE: tl.constexpr,
):
    """Start to read the scores, V and D of some blocks; the lowest float where no slot is seen."""
    lowest = -float("inf")
    start = block * BLOCK_SIZE
    visible = inner < tl.where(listed, num_slots - start, 0)
    offset = query - start - inner
    stored = visible & (offset >= 0) & (offset < num_offsets)
    # A slot that D has no place for counts as zero.
    absent = tl.where(visible, 0.0, lowest).to(diagonal.dtype.element_ty)
    z = tl.load(scores + column, mask=visible, other=lowest)
    v = tl.load(vertical + (start + inner), mask=visible, other=lowest)
    d = tl.load(diagonal + offset, mask=stored, other=absent)
    return z, v, d


@triton.jit
def _fold_tile(
    block,
    listed,
    z,
    v,
    d,
    query,
    num_offsets,
    step,
    decay,
    gain,
    vertical,
    diagonal,
    vertical_max,
    diagonal_max,
    last_observed,
    inner,
    is_first_lane,
    BLOCK_SIZE: tl.constexpr,
):
    """Fold what was read into V and D, and store the blocks' maxima."""
    start = block * BLOCK_SIZE
    offset = query - start - inner
    z, v, d = z.to(tl.float32), v.to(tl.float32), d.to(tl.float32)
    observed = tl.abs(z) < float("inf")  # NaN compares false
    stored = observed & (offset >= 0) & (offset < num_offsets)
    gained = gain * z
    v = tl.where(observed, _rounded(decay * v + gained, vertical.dtype.element_ty), v)
    d = tl.where(stored, _rounded(decay * d + gained, diagonal.dtype.element_ty), d)
    tl.store(vertical + (start + inner), v, mask=observed)
    tl.store(diagonal + offset, d, mask=stored)
    put = is_first_lane & listed
    tl.store(vertical_max + block, _block_max(v), mask=put)
    tl.store(diagonal_max + block, _block_max(d), mask=put)
    seen = tl.max(tl.max(observed.to(tl.int32), 0, keep_dims=True), 2, keep_dims=True)
    tl.store(last_observed + block, step, mask=put & (seen > 0))


# One binary for all layers and batches: a graph is captured layer by layer, and must not compile.
# Strides of no known alignment give every lane one slot: then all warps work for themselves, where
# lanes of four slots would exchange theirs with D's, which runs backwards, through shared memory.
@triton.jit(
    do_not_specialize=[
        "first_state",
        "num_rows",
        "draft",
        "scores_stride",
        "max_slots",
        "num_offsets",
        "max_blocks",
        "one",
    ]
)
def _update_kernel(
    vertical_ptr,
    diagonal_ptr,
    vertical_max_ptr,
    diagonal_max_ptr,
    last_observed_ptr,
    slots_ptr,
    policies_ptr,
    positions_ptr,
    num_slots_ptr,
    decay_ptr,
    gain_ptr,
    blocks_ptr,
    counts_ptr,
    step_numbers_ptr,
    accepted_ptr,
    scores_ptr,
    scores_stride,
    first_state,
    num_rows,
    draft,
    max_slots,
    num_offsets,
    max_blocks,
    one,
    COMPRESS_RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    # All rows' tiles in one line, and of those this program's share, however long the rows are.
    numbers = tl.arange(0, ROWS)
    exists = numbers < num_rows
    counts = tl.load(counts_ptr + numbers, mask=exists, other=0)
    learning = tl.load(step_numbers_ptr + numbers, mask=exists, other=-1) >= 0
    if DRAFTS:
        learning &= tl.load(accepted_ptr + numbers, mask=exists, other=0) >= draft
    tiles = tl.where(learning, (counts + BLOCKS - 1) // BLOCKS, 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0).to(tl.int64)
    share, shares = tl.program_id(0), tl.num_programs(0)
    tile = (total * share // shares).to(tl.int32)
    last = (total * (share + 1) // shares).to(tl.int32)
    row = tl.sum((ends <= tile).to(tl.int32), 0)
    places = (tl.arange(0, BLOCKS) * one)[None, :, None]
    inner = (tl.arange(0, PARTS) * LANES)[:, None, None] + tl.arange(0, LANES)[None, None, :]
    is_first_lane = tl.arange(0, LANES)[None, None, :] == 0
    while tile < last:
        end = tl.sum(tl.where(numbers == row, ends, 0), 0)
        first = end - tl.sum(tl.where(numbers == row, tiles, 0), 0)
        step = tl.load(step_numbers_ptr + row)
        count = tl.load(counts_ptr + row)
        state = (first_state + tl.load(slots_ptr + row)).to(tl.int64)
        query = (tl.load(positions_ptr + row) // COMPRESS_RATIO).to(tl.int32)
        num_slots = tl.load(num_slots_ptr + row)
        policy = tl.load(policies_ptr + row)
        decay = tl.load(decay_ptr + policy)
        gain = tl.load(gain_ptr + policy)
        vertical = vertical_ptr + state * max_slots
        diagonal = diagonal_ptr + state * num_offsets
        vertical_max = vertical_max_ptr + state * max_blocks
        diagonal_max = diagonal_max_ptr + state * max_blocks
        last_observed = last_observed_ptr + state * max_blocks
        blocks = blocks_ptr + row.to(tl.int64) * max_blocks
        scores = scores_ptr + row.to(tl.int64) * scores_stride
        start = (tile - first) * BLOCKS
        stop = (tl.minimum(end, last) - first) * BLOCKS
        everywhere = places + tl.zeros([1, BLOCKS, LANES], tl.int32)
        # Read a tile ahead, and the numbers of its blocks two: a program alone on its
        # multiprocessor has nobody else to hide what it waits for.
        # A row without a history has no tile (start is stop), and its state is another row's.
        most = tl.minimum(count, stop)
        listed = start + everywhere < most
        block = tl.load(blocks + start + everywhere, mask=listed, other=0)
        column = (start + places) * BLOCK_SIZE + inner
        z, v, d = _read_tile(
            block,
            listed,
            column,
            num_slots,
            query,
            num_offsets,
            scores,
            vertical,
            diagonal,
            inner,
            BLOCK_SIZE,
        )
        ahead = start + BLOCKS + everywhere
        following = tl.load(blocks + ahead, mask=ahead < most, other=0)
        for place in range(start, stop, BLOCKS):
            ahead = place + BLOCKS + everywhere
            next_listed = ahead < most
            column = (place + BLOCKS + places) * BLOCK_SIZE + inner
            next_z, next_v, next_d = _read_tile(
                following,
                next_listed,
                column,
                num_slots,
                query,
                num_offsets,
                scores,
                vertical,
                diagonal,
                inner,
                BLOCK_SIZE,
            )
            ahead += BLOCKS
            after = tl.load(blocks + ahead, mask=ahead < most, other=0)
            _fold_tile(
                block,
                listed,
                z,
                v,
                d,
                query,
                num_offsets,
                step,
                decay,
                gain,
                vertical,
                diagonal,
                vertical_max,
                diagonal_max,
                last_observed,
                inner,
                is_first_lane,
                BLOCK_SIZE,
            )
            block, listed, following = following, next_listed, after
            z, v, d = next_z, next_v, next_d
        tile = tl.minimum(end, last)
        row += 1


def history_update(
    histories: Histories,
    rows: Rows,
    policies: PolicyColumns,
    plan: StepPlan,
    layer_index: int,
    scores: Tensor,
    *,
    num_rows: int,
    block_size: int,
    compress_ratio: int,
    beside: bool = False,
    accepted: Tensor | None = None,
    draft: int = 0,
) -> None:
    """See `spin_kernels.history_update.reference`; bit for bit the same histories."""
    max_blocks = histories.vertical_max.shape[1]
    shape = BESIDE if beside else ALONE
    _update_kernel[(min(shape.programs, num_rows * triton.cdiv(max_blocks, shape.blocks)),)](
        histories.vertical,
        histories.diagonal,
        histories.vertical_max,
        histories.diagonal_max,
        histories.last_observed,
        rows.slots,
        rows.policies,
        rows.positions,
        rows.num_slots,
        policies.decay,
        policies.gain,
        plan.blocks[layer_index],
        plan.counts[layer_index],
        plan.step_numbers[layer_index],
        plan.step_numbers if accepted is None else accepted,
        scores,
        scores.stride(0),
        layer_index * histories.num_states,
        num_rows,
        draft,
        histories.vertical.shape[1],
        histories.diagonal.shape[1],
        max_blocks,
        1,
        COMPRESS_RATIO=compress_ratio,
        BLOCK_SIZE=block_size,
        BLOCKS=shape.blocks,
        ROWS=triton.next_power_of_2(plan.counts.shape[1]),
        LANES=min(block_size, 32),
        PARTS=triton.cdiv(block_size, 32),
        DRAFTS=accepted is not None,
        num_warps=shape.warps,
        # A fused multiply-add rounds once where the definition rounds twice.
        enable_fp_fusion=False,
    )

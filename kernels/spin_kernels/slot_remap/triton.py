"""Compact indices back to slots, as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _remap_kernel(
    indices_ptr,
    indices_stride,
    blocks_ptr,
    blocks_stride,
    owners_ptr,
    num_indices,
    OWNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < num_indices
    at = indices_ptr + row * indices_stride + place
    index = tl.load(at, mask=inside, other=-1)
    found = index >= 0
    owner = row
    if OWNED:
        owner = tl.load(owners_ptr + row).to(tl.int64)
    block = tl.load(blocks_ptr + owner * blocks_stride + index // BLOCK_SIZE, mask=found, other=0)
    tl.store(at, block * BLOCK_SIZE + index % BLOCK_SIZE, mask=found)


def slot_remap(
    indices: Tensor, blocks: Tensor, *, block_size: int, owners: Tensor | None = None
) -> None:
    """See `spin_kernels.slot_remap.reference`."""
    _remap_kernel[(len(indices),)](
        indices,
        indices.stride(0),
        blocks,
        blocks.stride(0),
        blocks if owners is None else owners,
        indices.shape[1],
        OWNED=owners is not None,
        BLOCK_SIZE=block_size,
        WIDTH=triton.next_power_of_2(indices.shape[1]),
        num_warps=4,
    )

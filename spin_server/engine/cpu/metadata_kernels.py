"""Torch versions of five Triton kernels that vLLM 0.32.0 launches to serve DeepSeek-V4 on a CPU.

vLLM has no CPU fallback for them. `OVERRIDES` is for vllm.triton_utils.dispatcher.register_kernels,
which calls an override by keyword where its parameters are named as the kernel's: hence the names,
and parameters (strides, Triton block sizes) that torch does not need.

Every query_start_loc ascends from 0, and padding requests repeat its last value, as vLLM builds it:
request i has the tokens query_start_loc[i] to query_start_loc[i + 1] - 1, the newest of its
seq_lens[i] positions. What a kernel leaves unwritten stays unwritten here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spin_server.errors import UnsupportedError


def _owner(bounds: Tensor, item: Tensor) -> Tensor:
    """Return each item's i for which bounds[i] <= item < bounds[i + 1]; empty spans own none."""
    return torch.searchsorted(bounds[1:], item, right=True)


def _position(query_start_loc: Tensor, seq_lens: Tensor, token: Tensor, request: Tensor) -> Tensor:
    """Return each token's position in its request, counting the tokens computed earlier."""
    return token + (seq_lens - query_start_loc[1:])[request]


def _refuse_dcp(world_size: int) -> None:
    if world_size > 1:
        raise UnsupportedError(
            f"decode context parallelism: the CPU engine serves a world size of 1, got {world_size}"
        )


def token_request_mapping(
    query_start_loc: Tensor,
    output: Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    num_warps: int = 4,
) -> None:
    """Name the request of each token.

    Args:
        query_start_loc (int32): [num_reqs + 1]
        output (int32): [>= num_tokens], of which the first num_tokens are written.
        num_reqs: requests, padding included.
        num_mapped: tokens from here on are padding and get request 0.
        num_tokens: tokens, padding included.
        num_warps: a launch option, which vLLM passes on to this one; unused.

    Source: vllm/v1/attention/ops/metadata.py (_token_request_mapping_kernel)
    """
    token = torch.arange(num_tokens, dtype=query_start_loc.dtype)
    request = _owner(query_start_loc[: num_reqs + 1], token).clamp_(max=num_reqs - 1)
    output[:num_tokens] = torch.where(token < num_mapped, request, 0)


def compressed_slot_mapping(
    compressed_slot_mapping_ptr: Tensor,
    slot_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    block_size: int,
    dcp_world_size: int,
    cp_interleave: int,
    COMPRESS_RATIO: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Give the last of every COMPRESS_RATIO tokens the slot of the state that they share.

    The other tokens, and those that have no slot of their own (replayed ones), get PAD_ID.

    Args:
        compressed_slot_mapping_ptr (int64): [>= tokens], of which the requests' tokens are written.
        slot_mapping_ptr (int64): [>= tokens], the tokens' own slots or PAD_ID.
        query_start_loc_ptr (int32): [>= num_reqs + 1]
        seq_lens_ptr (int32): [>= num_reqs]
        block_table_ptr (int32): [num_reqs, blocks], blocks of compressed states.
        block_table_stride: unused.
        block_size: compressed states per block.
        dcp_world_size: 1.
        cp_interleave: unused in a world of 1.
        COMPRESS_RATIO: tokens per compressed state.
        PAD_ID: what marks the absence of a slot.
        TRITON_BLOCK_SIZE: unused.

    Raises:
        UnsupportedError: dcp_world_size is above 1.

    Source: vllm/v1/attention/backends/mla/compressor_utils.py (CompressedSlotMappingKernel)
    """
    _refuse_dcp(dcp_world_size)
    num_reqs = block_table_ptr.shape[0]
    query_start_loc = query_start_loc_ptr[: num_reqs + 1]
    num_tokens = int(query_start_loc[-1])
    token = torch.arange(num_tokens, dtype=query_start_loc.dtype)
    request = _owner(query_start_loc, token)
    position = _position(query_start_loc, seq_lens_ptr[:num_reqs], token, request)
    completes = (position + 1) % COMPRESS_RATIO == 0
    completes &= slot_mapping_ptr[:num_tokens] != PAD_ID
    state = position // COMPRESS_RATIO
    # Block 0 stands in where there is no state: its block may lie past the table.
    block = block_table_ptr[request, torch.where(completes, state // block_size, 0)]
    slot = block.long() * block_size + state % block_size
    compressed_slot_mapping_ptr[:num_tokens] = torch.where(completes, slot, PAD_ID)


def prefill_chunk_metadata(
    query_start_loc_ptr: Tensor,
    uncompressed_seq_lens_ptr: Tensor,
    cu_compressed_seq_lens_ptr: Tensor,
    row_start_cu_compressed_seq_lens_ptr: Tensor,
    token_to_seq_ptr: Tensor,
    cu_compressed_seq_len_ks_ptr: Tensor,
    cu_compressed_seq_len_ke_ptr: Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    COMPRESS_RATIO: int,
) -> None:
    """Bound the keys that each query token of a prefill chunk sees among the chunk's packed keys.

    Args:
        query_start_loc_ptr (int32): [num_reqs + 1], from 0 within the chunk.
        uncompressed_seq_lens_ptr (int32): [num_reqs]
        cu_compressed_seq_lens_ptr (int32): [num_reqs + 1], where each request's keys begin.
        row_start_cu_compressed_seq_lens_ptr (int32): [>= num_reqs], the same in a world of 1.
        token_to_seq_ptr (int32): [>= keys], set to each key's request.
        cu_compressed_seq_len_ks_ptr (int32): [slice], set to the token's first key.
        cu_compressed_seq_len_ke_ptr (int32): [slice], set to one past its last key.
        query_slice_start: the chunk's first token that is described.
        query_slice_stop: one past the last one.
        DCP_RANK: unused in a world of 1.
        DCP_WORLD: 1.
        DCP_INTERLEAVE: unused in a world of 1.
        BLOCK_SIZE: unused.
        COMPRESS_RATIO: tokens per key.

    Raises:
        UnsupportedError: DCP_WORLD is above 1.

    Source: vllm/v1/attention/backends/mla/indexer.py (BuildPrefillChunkMetadataKernel)
    """
    _refuse_dcp(DCP_WORLD)
    stop = min(query_slice_stop, int(query_start_loc_ptr[-1]))
    token = torch.arange(query_slice_start, stop, dtype=query_start_loc_ptr.dtype)
    request = _owner(query_start_loc_ptr, token)
    position = _position(query_start_loc_ptr, uncompressed_seq_lens_ptr, token, request)
    row_start = row_start_cu_compressed_seq_lens_ptr[request]
    cu_compressed_seq_len_ks_ptr[: len(token)] = row_start
    cu_compressed_seq_len_ke_ptr[: len(token)] = row_start + (position + 1) // COMPRESS_RATIO

    num_keys = int(cu_compressed_seq_lens_ptr[-1])
    key = torch.arange(num_keys, dtype=cu_compressed_seq_lens_ptr.dtype)
    token_to_seq_ptr[:num_keys] = _owner(cu_compressed_seq_lens_ptr, key)


# On a CPU nobody reads what the next two compute: DeepseekV4CPUAttention.forward_mqa
# (vllm/models/deepseek_v4/cpu/cpu_sparse.py) derives its windows from `positions`.


def prefill_gather_lens(
    prefill_gather_lens_ptr: Tensor,
    seq_lens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    replay_start_ptr: Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Count the keys that a prefill request's sliding windows reach.

    Args:
        prefill_gather_lens_ptr (int32): [>= num_prefills], of which num_prefills are written.
        seq_lens_ptr (int32): [>= num_decodes + num_prefills]
        query_start_loc_ptr (int32): [>= num_decodes + num_prefills + 1]
        replay_start_ptr (int32): [>= num_decodes + num_prefills], the first position whose key
            is held.
        num_prefills: prefill requests, which follow the decodes.
        num_decodes: decode requests.
        window_size: positions a token sees, itself included.
        BLOCK_SIZE: unused.

    Source: vllm/v1/attention/backends/mla/sparse_swa.py (ComputePrefillMetadataKernel)
    """
    end = num_decodes + num_prefills
    query_lens = query_start_loc_ptr[num_decodes : end + 1].diff()
    held = seq_lens_ptr[num_decodes:end] - query_lens - replay_start_ptr[num_decodes:end]
    prefill_gather_lens_ptr[:num_prefills] = query_lens + held.clamp_(min=0, max=window_size - 1)


def swa_indices_and_lens(
    swa_indices_ptr: Tensor,
    swa_indices_stride: int,
    swa_lens_ptr: Tensor,
    window_size: int,
    index_width: int,
    left_visible_ptr: Tensor,
    right_visible_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    token_to_req_indices_ptr: Tensor,
    is_valid_token_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    block_size: int,
    replay_start_ptr: Tensor,
    token_offset: int,
    HAS_IMAGE: bool,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """List the slots in each token's sliding window, oldest first, padded with -1.

    vLLM does not pass its launch grid on, so every token of the batch from token_offset on for
    which the outputs have a row is written: after the decode tokens' rows, those of the prefill
    tokens too, which vLLM cuts off.

    Args:
        swa_indices_ptr (int32): [rows, ..., index_width], row r for token token_offset + r.
        swa_indices_stride: elements from one row of it to the next.
        swa_lens_ptr (int32): [rows], set to the slots in the window, or 0 for an invalid token.
        window_size: positions a token sees, itself included.
        index_width: slots listed per token, at least window_size.
        left_visible_ptr: unused without images.
        right_visible_ptr: unused without images.
        query_start_loc_ptr (int32): [num_reqs + 1]
        seq_lens_ptr (int32): [num_reqs]
        token_to_req_indices_ptr (int32): [tokens]
        is_valid_token_ptr (bool): [>= tokens]
        block_table_ptr (int32): [num_reqs, blocks]
        block_table_stride: unused.
        block_size: slots per block.
        replay_start_ptr (int32): [>= num_reqs], the first position whose key is held.
        token_offset: the token of row 0.
        HAS_IMAGE: False.
        TRITON_BLOCK_SIZE: unused.

    Raises:
        UnsupportedError: HAS_IMAGE is set.

    Source: vllm/v1/attention/backends/mla/sparse_swa.py (_compute_swa_indices_and_lens_kernel)
    """
    if HAS_IMAGE:
        raise UnsupportedError("images: the CPU engine serves text alone, got image spans")
    num_tokens = min(token_to_req_indices_ptr.shape[0], is_valid_token_ptr.shape[0])
    rows = min(swa_lens_ptr.shape[0], num_tokens - token_offset)
    token = torch.arange(token_offset, token_offset + rows)
    valid = is_valid_token_ptr[token]
    request = torch.where(valid, token_to_req_indices_ptr[token], 0)
    position = _position(query_start_loc_ptr, seq_lens_ptr, token, request)
    start = (position - (window_size - 1)).clamp_(min=0).maximum(replay_start_ptr[request])
    length = torch.where(valid, position + 1 - start, 0)
    swa_lens_ptr[:rows] = length

    offset = torch.arange(index_width)
    visible = offset < length[:, None]  # [rows, index_width]
    # Position 0 stands in where nothing is visible: its block may lie past the table.
    seen = torch.where(visible, start[:, None] + offset, 0)
    slot = block_table_ptr[request[:, None], seen // block_size] * block_size + seen % block_size
    indices = swa_indices_ptr.as_strided((rows, index_width), (swa_indices_stride, 1))
    indices.copy_(torch.where(visible, slot, -1))


_MLA = "vllm.v1.attention.backends.mla"
OVERRIDES: dict[str, Callable[..., None]] = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": token_request_mapping,
    f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slot_mapping,
    f"{_MLA}.indexer.BuildPrefillChunkMetadataKernel.kernel": prefill_chunk_metadata,
    f"{_MLA}.sparse_swa.ComputePrefillMetadataKernel.kernel": prefill_gather_lens,
    f"{_MLA}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": swa_indices_and_lens,
}

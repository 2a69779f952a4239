"""The `spin_cpu` plugin: what lets vLLM 0.32.0 serve DeepSeek-V4 on a CPU.

vLLM calls `register` in the front end, in the engine core and in every worker. It does nothing
where the platform is not a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from spin_server.engine.presence import active_plugins, mark_active

NAME = "spin_cpu"

# Below this the matrix products gain nothing over vLLM's kernel (docs/log.md).
_MIN_ROWS_PER_REQUEST = 8


def register() -> None:
    """Install the shims in this process; calling it again changes nothing.

    Source: vLLM's plugin group `vllm.general_plugins` (vllm/plugins/__init__.py).
    """
    from vllm.platforms import current_platform

    if NAME in active_plugins() or not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    from spin_server.engine.lifetime import die_with_parent

    die_with_parent()
    _keep_chunked_prefill(CpuPlatform)
    _extend_kernel_overrides(CpuPlatform)
    mark_active(NAME)


def _keep_chunked_prefill(platform: Any) -> None:
    """Let DeepSeek-V4 have chunked prefill and prefix caching without AMX.

    Its CPU kernels run on AVX-512; vLLM's AMX test merely switches the two off. Source:
    vllm/platforms/cpu.py (check_and_update_config, amx_mla_or_dsv4_enabled).
    """
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        model = vllm_config.model_config
        if model is None or getattr(model.hf_config, "model_type", None) != "deepseek_v4":
            original(cls, vllm_config)
            return
        has_amx = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            original(cls, vllm_config)
        finally:
            torch.cpu._is_amx_tile_supported = has_amx

    platform.check_and_update_config = classmethod(check_and_update_config)


def _extend_kernel_overrides(platform: Any) -> None:
    """Replace more Triton kernels where vLLM replaces its own.

    Only workers launch kernels, and vLLM calls this in workers only. Source:
    vllm/platforms/cpu.py (register_triton_kernel_overrides).
    """
    original = platform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls: Any) -> None:
        original(cls)
        from vllm.triton_utils import HAS_TRITON
        from vllm.triton_utils.dispatcher import register_kernels

        if not HAS_TRITON:
            from spin_server.engine.cpu.metadata_kernels import OVERRIDES

            register_kernels(OVERRIDES)
        _complete_tile_scheduler()
        _allow_prompts_without_slots()
        _allow_seeds_beside_chunks()
        _speed_up_prefill()

    platform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


def _complete_tile_scheduler() -> None:
    """Return every key that the caller reads; the CPU builder returns three of five.

    Source: vllm/v1/attention/backends/mla/sparse_swa.py (build) reads C1A and C2A too, and
    vllm/models/deepseek_v4/cpu/cpu_mla.py (build_tile_scheduler) leaves them out: a KeyError.
    """
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.v1.attention.backends.mla import sparse_swa

    keys = (
        sparse_swa._LAYER_TYPE_SWAONLY,
        sparse_swa._LAYER_TYPE_C4A,
        sparse_swa._LAYER_TYPE_C128A,
        sparse_swa._LAYER_TYPE_C1A,
        sparse_swa._LAYER_TYPE_C2A,
    )

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(keys)

    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = build_tile_scheduler


def _allow_prompts_without_slots() -> None:
    """Let prompts of two or three tokens share a step with long contexts.

    So short a prompt has no compressed slot. That does no harm until a context of over 2,052 tokens
    makes the step call the indexer. Where no prompt of the step has a slot, vLLM builds no chunk,
    and the indexer's assertion ends the engine. Where the last one has none, its rows begin where
    the chunk's keys end, so that the search for their request runs past the block table; one row
    more, which rows of length zero never read, keeps it inside.

    Source: vllm/v1/attention/backends/mla/indexer.py (build skips a chunk without slots),
    vllm/model_executor/layers/sparse_attn_indexer.py (forward_cpu asserts that there is one, and
    looks the rows' requests up in it).
    """
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUIndexerMetadataBuilder
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerPrefillChunkMetadata

    original = DeepseekV4CPUIndexerMetadataBuilder.build

    def build(self: Any, *arguments: Any, **keywords: Any) -> Any:
        metadata = original(self, *arguments, **keywords)
        if metadata.prefill is None:
            return metadata
        for chunk in metadata.prefill.chunks:
            table = chunk.block_table
            chunk.block_table = torch.cat([table, table[-1:]])
        if not metadata.prefill.chunks:
            nothing = torch.empty(0, dtype=torch.int32)
            metadata.prefill.chunks.append(
                DeepseekV32IndexerPrefillChunkMetadata(
                    block_table=nothing,
                    cu_seqlen_ks=nothing,
                    cu_seqlen_ke=nothing,
                    cu_seq_lens=nothing,
                    token_to_seq=nothing,
                    total_seq_lens=0,
                    token_start=metadata.num_decode_tokens,
                    token_end=metadata.num_decode_tokens,
                    num_reqs=0,
                    local_total_seq_lens=0,
                )
            )
        return metadata

    DeepseekV4CPUIndexerMetadataBuilder.build = build


def _allow_seeds_beside_chunks() -> None:
    """Let a request have a seed and a prompt of more than one chunk.

    vLLM samples for every row, and moves the generator of a row that is not complete back by one
    draw. A CPU's generator cannot be moved, and the error ends the engine; so its state is put back
    here, and nobody moves it.

    Source: vllm/v1/worker/gpu_model_runner.py (_sample, _bookkeeping_sync).
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original_sample, original_sync = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def _sample(self: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs]
        states = {i: g.get_state() for i, g in batch.generators.items() if discarded[i]}
        output = original_sample(self, *arguments, **keywords)
        for index, state in states.items():
            batch.generators[index].set_state(state)
        return output

    def _bookkeeping_sync(self: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return original_sync(self, *arguments, **keywords)
        finally:
            batch.generators = generators

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = _sample, _bookkeeping_sync


def _speed_up_prefill() -> None:
    """Score prompts with matrix products; decode keeps vLLM's kernel.

    Source: vllm/model_executor/layers/sparse_attn_indexer.py (forward_cpu) calls the op through
    this module attribute, once for all prefill rows and once for all decode rows.
    """
    from vllm import _custom_ops

    from spin_server.engine.cpu.prefill_scoring import paged_mqa_logits_gemm

    per_row = _custom_ops.fp8_paged_mqa_logits_cpu

    def fp8_paged_mqa_logits_cpu(
        q_fp8: Tensor,
        kvcache_fp8: Tensor,
        weight: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        block_size: int,
        max_seq_len: int,
    ) -> Tensor:
        score = paged_mqa_logits_gemm if _rows_share_requests(page_table) else per_row
        logits: Tensor = score(
            q_fp8, kvcache_fp8, weight, seq_lens, page_table, block_size, max_seq_len
        )
        return logits

    _custom_ops.fp8_paged_mqa_logits_cpu = fp8_paged_mqa_logits_cpu


def _rows_share_requests(page_table: Tensor) -> bool:
    """Tell prefill rows, many per request, from decode rows, one per request.

    Rows of one request have the same pages; two requests never do, for the last page of each is
    its own.
    """
    changes = (page_table[1:] != page_table[:-1]).any(1).sum()
    return len(page_table) >= _MIN_ROWS_PER_REQUEST * (int(changes) + 1)


def missing_kernels() -> list[str]:
    """Name the metadata kernels that still have no replacement in this worker."""
    from vllm.triton_utils import HAS_TRITON, dispatcher

    from spin_server.engine.cpu.metadata_kernels import OVERRIDES

    return [] if HAS_TRITON else sorted(OVERRIDES.keys() - dispatcher._registry.keys())

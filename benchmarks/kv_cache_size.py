"""What one request of DeepSeek-V4-Flash takes of a KV cache, by vLLM's own grouping of its layers.

Runs on any machine with vLLM: the layers' caches are described as vllm/models/deepseek_v4 describes
them on CUDA (fp8_ds_mla), and vLLM packs them into blocks.

    python benchmarks/kv_cache_size.py --tokens 544768 --batched-tokens 8192
"""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
import transformers.models.auto.tokenization_auto  # noqa: F401  # before vLLM, which imports it in a circle
from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_layout import KVCacheLayout

GIB = 2**30
LAYERS = 43
RATIOS = [0, 0] + [4 if i % 2 == 0 else 128 for i in range(LAYERS - 2)]
CSA = 4
BATCHES_UNDER_WAY = 2  # async scheduling


def describe_layers() -> dict[str, KVCacheSpec]:
    """Describe every cache of the model.

    Source: get_kv_cache_spec in vllm/models/deepseek_v4/{attention,compressor}.py and
    vllm/v1/attention/backends/mla/sparse_swa.py.
    """
    common: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    packed: dict[str, Any] = {
        **common,
        **{"head_size": 512, "dtype": torch.uint8, "state_content_bytes": 584},
        **{"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"},
    }
    specs: dict[str, KVCacheSpec] = {}
    for layer, ratio in enumerate(RATIOS):
        window = {"block_size": 64, "sliding_window": 128}
        specs[f"{layer}.swa"] = SlidingWindowMLASpec(**window, **packed)
        if not ratio:
            continue
        specs[f"{layer}.attn"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **packed)
        overlap = 2 if ratio == CSA else 1
        state: dict[str, Any] = {
            **common,
            **{"dtype": torch.float32, "sliding_window": overlap * ratio},
            "block_size": 4 if ratio == CSA else 8,
        }
        specs[f"{layer}.state"] = SlidingWindowMLASpec(head_size=2 * overlap * 512, **state)
        if ratio == CSA:
            specs[f"{layer}.indexer"] = MLAAttentionSpec(
                block_size=256, head_size=132, dtype=torch.uint8, tokens_per_state=CSA, **common
            )
            specs[f"{layer}.indexer.state"] = SlidingWindowMLASpec(
                head_size=2 * overlap * 128, **state
            )
    return specs


def count_blocks(tokens: int, under_way: int) -> tuple[int, int]:
    """Count the blocks of one request, and a block's bytes."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLNHC),
        model_config=SimpleNamespace(
            max_model_len=tokens, hf_config=SimpleNamespace(model_type="deepseek_v4")
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=under_way,
    )
    groups = kv_cache_utils._get_packed_kv_cache_groups(config, describe_layers())
    assert groups is not None
    blocks = sum(
        cdiv(g.kv_cache_spec.max_memory_usage_bytes(config), g.kv_cache_spec.page_size_bytes)
        for g in groups
    )
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return blocks, kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=544768)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    args = parser.parse_args()
    for when, under_way in (
        ("while it decodes", BATCHES_UNDER_WAY),
        ("while it is all of two batches under way", BATCHES_UNDER_WAY * args.batched_tokens),
    ):
        blocks, size = count_blocks(args.tokens, under_way)
        print(
            f"{args.tokens:,} tokens, {when}: {blocks:,} blocks of {size:,} bytes, "
            f"{blocks * size / GIB:.2f} GiB on every rank"
        )


if __name__ == "__main__":
    main()

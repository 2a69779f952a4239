"""config.json of what serving_gpu.py serves: some layers of some TP8/EP8 ranks of a model.

A rank holds an eighth of the attention heads and experts, and all of the indexer, whose geometry is
the model's own. Everything else is the model's too, but for the number of layers.
"""

from typing import Any

_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
# What DeepSeek-V3.2 and GLM-5 share, and vLLM's one implementation of them on CUDA reads.
_PER_TOKEN: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {**_FP8, "scale_fmt": "ue8m0"},
}


def deepseek_v4_flash(num_layers: int, ranks: int = 1) -> dict[str, Any]:
    """Sliding-window, CSA and HCA layers; one slot per 4 tokens."""
    from spin_server.tiny_model.config import tiny_config

    ratios = [0, 0] + [4 if i % 2 == 0 else 128 for i in range(num_layers - 2)] + [0]
    base = tiny_config({"num_hidden_layers": num_layers, "compress_ratios": ratios})
    return {
        **base,
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_attention_heads": 8 * ranks,
        "q_lora_rank": 1024,
        "o_groups": ranks,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 32 * ranks,
        "num_hash_layers": 3,
        "expert_dtype": "fp8",
        "quantization_config": _FP8,
    }


def deepseek_v32(num_layers: int, ranks: int = 1) -> dict[str, Any]:
    """An indexer in every layer; one slot per token."""
    return {
        **_PER_TOKEN,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_hidden_layers": num_layers,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 2304 * ranks,
        "num_attention_heads": 16 * ranks,
        "num_key_value_heads": 16 * ranks,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 32 * ranks,
        "n_group": 8,
        "topk_group": 4,
        "index_n_heads": 64,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }


def glm_5(num_layers: int, ranks: int = 1) -> dict[str, Any]:
    """As GLM-5.2: past the first two, one layer in four has an indexer, and three reuse it."""
    return {
        **_PER_TOKEN,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": num_layers,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 1536 * ranks,
        "num_attention_heads": 8 * ranks,
        "num_key_value_heads": 8 * ranks,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 32 * ranks,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
    }


MODELS = {"v4": deepseek_v4_flash, "v32": deepseek_v32, "glm5": glm_5}

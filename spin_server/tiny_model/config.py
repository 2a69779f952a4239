"""The tiny model's config.json."""

import json
from typing import Any

from spin_server.errors import InputError

# Sizes that vLLM 0.32.0's CPU kernels fix: head_dim 512, index_head_dim 128, index_topk 512,
# experts 64, 128 or 256, 6 or 8 of them per token, at least one shared expert, hc_mult from 2.
_DEFAULTS: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 258,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    # Per layer: 0 attends to the sliding window alone, 4 is CSA (with an indexer), 128 is HCA.
    # The last entry belongs to the MTP layer, which this checkpoint leaves out.
    "compress_ratios": [0, 4, 128, 0],
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 1,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 32,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


_KINDS = {
    int: "a whole number, 0 or more",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def tiny_config(overrides: dict[str, Any]) -> dict[str, Any]:
    """Build the config, with some entries replaced.

    Raises:
        InputError: an entry that the config does not have, or a layer list of the wrong length.
    """
    for key in overrides:
        if key not in _DEFAULTS:
            raise InputError(f"--set {key}", "an entry of the tiny model's config.json", key)
        expected, got = type(_DEFAULTS[key]), overrides[key]
        if expected is float and type(got) is int:
            got = float(got)
        if type(got) is not expected or (expected is int and not 0 <= got < 2**31):
            raise InputError(f"--set {key}", f"{_KINDS[expected]}", repr(got))
    config = {**_DEFAULTS, **overrides}
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    ratios = config["compress_ratios"]
    if not isinstance(ratios, list) or len(ratios) != layers:
        raise InputError(
            "compress_ratios",
            f"{layers} entries: one per layer, and one per MTP layer",
            ratios,
        )
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """Split KEY=JSON.

    Raises:
        InputError: no equals sign, or a value that is not JSON.
    """
    key, separator, value = text.partition("=")
    try:
        if not separator:
            raise ValueError
        return key, json.loads(value)
    except ValueError:
        raise InputError("--set", "KEY=JSON, such as index_n_heads=64", text) from None

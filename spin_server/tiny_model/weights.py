"""Seeded random weights, in the names and layouts of DeepSeek's own checkpoints."""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from spin_server.tiny_model.tokenizer import PRINTABLE_IDS

Init = Literal["linear", "norm", "embedding", "wide", "half", "head", "hash", "router_bias"]


class TensorSpec(NamedTuple):
    """One tensor of the checkpoint: its name, shape, dtype and how it is drawn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    init: Init


_BF16, _F32, _I32 = torch.bfloat16, torch.float32, torch.int32


def _compressor(prefix: str, ratio: int, hidden: int, head_dim: int) -> Iterator[TensorSpec]:
    # CSA (ratio 4) compresses with overlapping windows, which takes two projections in one.
    width = head_dim * (2 if ratio == 4 else 1)
    yield TensorSpec(f"{prefix}.ape", (ratio, width), _F32, "wide")
    yield TensorSpec(f"{prefix}.norm.weight", (head_dim,), _BF16, "norm")
    yield TensorSpec(f"{prefix}.wgate.weight", (width, hidden), _BF16, "linear")
    yield TensorSpec(f"{prefix}.wkv.weight", (width, hidden), _BF16, "linear")


def _attention(prefix: str, ratio: int, c: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    rank, groups, o_rank = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    yield TensorSpec(f"{prefix}.attn_sink", (heads,), _F32, "embedding")
    yield TensorSpec(f"{prefix}.kv_norm.weight", (dim,), _BF16, "norm")
    yield TensorSpec(f"{prefix}.q_norm.weight", (rank,), _BF16, "norm")
    yield TensorSpec(f"{prefix}.wkv.weight", (dim, hidden), _BF16, "linear")
    yield TensorSpec(f"{prefix}.wq_a.weight", (rank, hidden), _BF16, "linear")
    yield TensorSpec(f"{prefix}.wq_b.weight", (heads * dim, rank), _BF16, "linear")
    per_group = heads * dim // groups
    yield TensorSpec(f"{prefix}.wo_a.weight", (groups * o_rank, per_group), _BF16, "linear")
    yield TensorSpec(f"{prefix}.wo_b.weight", (hidden, groups * o_rank), _BF16, "linear")
    if ratio == 0:
        return
    yield from _compressor(f"{prefix}.compressor", ratio, hidden, dim)
    if ratio == 4:
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        yield from _compressor(f"{prefix}.indexer.compressor", ratio, hidden, index_dim)
        shape = (index_heads * index_dim, rank)
        yield TensorSpec(f"{prefix}.indexer.wq_b.weight", shape, _BF16, "linear")
        shape = (index_heads, hidden)
        yield TensorSpec(f"{prefix}.indexer.weights_proj.weight", shape, _BF16, "linear")


def _experts(prefix: str, hashed: bool, c: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    yield TensorSpec(f"{prefix}.gate.weight", (experts, hidden), _BF16, "linear")
    if hashed:
        # The first layers route by token id instead of by score.
        shape = (c["vocab_size"], c["num_experts_per_tok"])
        yield TensorSpec(f"{prefix}.gate.tid2eid", shape, _I32, "hash")
    else:
        yield TensorSpec(f"{prefix}.gate.bias", (experts,), _F32, "router_bias")
    names = [f"{prefix}.experts.{i}" for i in range(experts)]
    sizes = [inner] * experts
    names.append(f"{prefix}.shared_experts")
    sizes.append(inner * c["n_shared_experts"])
    for name, size in zip(names, sizes, strict=True):
        yield TensorSpec(f"{name}.w1.weight", (size, hidden), _BF16, "linear")
        yield TensorSpec(f"{name}.w2.weight", (hidden, size), _BF16, "linear")
        yield TensorSpec(f"{name}.w3.weight", (size, hidden), _BF16, "linear")


def _hyper_connection(prefix: str, streams: int, hidden: int) -> Iterator[TensorSpec]:
    mixes = (2 + streams) * streams  # read, write and stream-to-stream weights
    yield TensorSpec(f"{prefix}_base", (mixes,), _F32, "wide")
    yield TensorSpec(f"{prefix}_fn", (mixes, streams * hidden), _F32, "linear")
    yield TensorSpec(f"{prefix}_scale", (3,), _F32, "half")


def tensor_specs(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """List every tensor of the checkpoint, in a fixed order."""
    hidden, vocab, streams = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    yield TensorSpec("embed.weight", (vocab, hidden), _BF16, "embedding")
    for layer in range(config["num_hidden_layers"]):
        prefix, ratio = f"layers.{layer}", config["compress_ratios"][layer]
        yield from _attention(f"{prefix}.attn", ratio, config)
        yield TensorSpec(f"{prefix}.attn_norm.weight", (hidden,), _BF16, "norm")
        yield from _experts(f"{prefix}.ffn", layer < config["num_hash_layers"], config)
        yield TensorSpec(f"{prefix}.ffn_norm.weight", (hidden,), _BF16, "norm")
        yield from _hyper_connection(f"{prefix}.hc_attn", streams, hidden)
        yield from _hyper_connection(f"{prefix}.hc_ffn", streams, hidden)
    yield TensorSpec("hc_head_base", (streams,), _F32, "wide")
    yield TensorSpec("hc_head_fn", (streams, streams * hidden), _F32, "linear")
    yield TensorSpec("hc_head_scale", (1,), _F32, "half")
    yield TensorSpec("norm.weight", (hidden,), _BF16, "norm")
    yield TensorSpec("head.weight", (vocab, hidden), _BF16, "head")


def _draw(spec: TensorSpec, generator: torch.Generator, config: dict[str, Any]) -> Tensor:
    def normal() -> Tensor:
        return torch.randn(spec.shape, generator=generator)

    if spec.init == "half":
        return torch.full(spec.shape, 0.5)
    if spec.init == "hash":
        experts = config["n_routed_experts"]
        order = torch.rand((spec.shape[0], experts), generator=generator).argsort(-1)
        return order[:, : spec.shape[1]]
    if spec.init == "head":
        weight = normal() / math.sqrt(spec.shape[-1])
        # Greedy text stays printable and never ends early: other tokens' logits are zero.
        keep = torch.zeros(spec.shape[0], 1)
        keep[[i for i in PRINTABLE_IDS if i < spec.shape[0]]] = 1.0
        return weight * keep
    scale = {"wide": 0.5, "norm": 0.1, "embedding": 1.0, "router_bias": 0.02}.get(
        spec.init, 1 / math.sqrt(spec.shape[-1])
    )
    return normal() * scale + (1.0 if spec.init == "norm" else 0.0)


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Draw all weights; the same config and seed give the same tensors on every machine.

    Args:
        config: from `tiny_config`.
        seed: any non-negative integer.

    Returns:
        Tensors by name, ready for safetensors.

    Source: names and layouts as vllm/models/deepseek_v4/cpu/model.py loads them.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: _draw(spec, generator, config).to(spec.dtype).contiguous()
        for spec in tensor_specs(config)
    }

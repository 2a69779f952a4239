"""The CPU shims, each against what vLLM does without it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from spin_server.engine.cpu import plugin
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config

# In a process of its own: the shims patch vLLM's classes for good.
SCRIPT = """
import json, sys, torch
torch.cpu._is_amx_tile_supported = lambda: False   # as on a machine without AMX
from vllm.engine.arg_utils import EngineArgs
from spin_server.engine.cpu import plugin

def switches():
    config = EngineArgs(model=sys.argv[1], enforce_eager=True).create_engine_config()
    scheduler, cache = config.scheduler_config, config.cache_config
    return [scheduler.enable_chunked_prefill, cache.enable_prefix_caching]

def tile_scheduler_keys():
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    return sorted(DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler(None, 1))

result = {"without": switches(), "keys_without": len(tile_scheduler_keys())}
plugin.register()
plugin.register()
result["with"] = switches()
result["amx_after"] = torch.cpu._is_amx_tile_supported()
from vllm.platforms import current_platform
from vllm import _custom_ops
original = _custom_ops.fp8_paged_mqa_logits_cpu
result["missing_before"] = len(plugin.missing_kernels())
current_platform.register_triton_kernel_overrides()
result["missing"] = plugin.missing_kernels()
result["keys"] = len(tile_scheduler_keys())
result["fast_prefill"] = _custom_ops.fp8_paged_mqa_logits_cpu is not original
rows = torch.tensor([[1, 2], [3, 4]])
result["decode_is_prefill"] = plugin._rows_share_requests(rows.repeat(32, 1))
result["prefill_is_prefill"] = plugin._rows_share_requests(rows.repeat_interleave(32, 0))
print("RESULT", json.dumps(result))
"""


def test_only_deepseek_v4_is_told_that_amx_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        answers: ClassVar[list[bool]] = []

        @classmethod
        def check_and_update_config(cls, vllm_config: object) -> None:
            cls.answers.append(torch.cpu._is_amx_tile_supported())

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    plugin._keep_chunked_prefill(Platform)
    for model_type in ("llama", "deepseek_v4"):
        model = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
        Platform.check_and_update_config(SimpleNamespace(model_config=model))
    Platform.check_and_update_config(SimpleNamespace(model_config=None))
    assert Platform.answers == [False, True, False]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(model, tiny_config({}), 0)
    return run(model)


def run(model: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "VLLM_PLUGINS": "", "HOME": str(model.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    found: dict[str, object] = json.loads(line.removeprefix("RESULT "))
    return found


def test_chunked_prefill_and_prefix_caching_survive_without_amx(result: dict[str, object]) -> None:
    assert result["without"] == [False, False]
    assert result["with"] == [True, True]


def test_amx_test_answers_the_truth_afterwards(result: dict[str, object]) -> None:
    assert result["amx_after"] is False


def test_tile_scheduler_has_all_five_layer_types(result: dict[str, object]) -> None:
    assert result["keys_without"] == 3
    assert result["keys"] == 5


def test_every_metadata_kernel_is_replaced_where_vllm_replaces_its_own(
    result: dict[str, object],
) -> None:
    assert result["missing_before"] == 5
    assert result["missing"] == []


def test_prefill_and_decode_rows_are_told_apart(result: dict[str, object]) -> None:
    assert result["fast_prefill"] is True
    assert result["prefill_is_prefill"] is True
    assert result["decode_is_prefill"] is False

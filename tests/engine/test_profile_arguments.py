"""Profiles before vLLM's own parser and configuration: all that needs no GPU."""

import argparse
import json
from itertools import pairwise
from typing import Any

import pytest

from spin_server.engine import server_arguments
from spin_server.errors import InputError
from spin_server.profiles.profile import Profile, profile_names, read_profile
from spin_server.tiny_model.config import tiny_config

# SPIN's own, which never reach vLLM.
OURS = ("--spin-", "--no-spin-", "--admin-")
GPU = [name for name in profile_names() if name != "cpu-demo"]
# Inter-token latencies in ms, of the runs that a dashboard must tell apart.
MEASURED = (15.36, 15.59, 16.28, 16.94, 17.78)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config.json of DeepSeek-V4-Flash's sizes, without weights."""
    layers = 43
    ratios = [0, 0, *(4 if i % 2 == 0 else 128 for i in range(layers - 2)), 0]
    config = {
        **tiny_config({"num_hidden_layers": layers, "compress_ratios": ratios}),
        **{"vocab_size": 129280, "hidden_size": 4096, "num_attention_heads": 64},
        **{"q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_hash_layers": 3},
    }
    folder = tmp_path_factory.mktemp("flash")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def for_vllm(name: str) -> Profile:
    arguments = (a for a in read_profile(name).arguments if not a.startswith(OURS))
    return Profile(name, "", tuple(arguments))


def parse(model: str, profile: Profile, *given: str, on_cpu: bool = False) -> argparse.Namespace:
    arguments = [*profile.arguments, "--skip-tokenizer-init", *given]
    return server_arguments.parse(model, arguments, on_cpu=on_cpu, profile=profile)


def configure(model: str, name: str) -> Any:
    """Make vLLM's configuration, on a CPU: what depends on the device is the CPU's."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    args = parse(model, for_vllm(name))
    return AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )


def graph_sizes(config: Any, largest: int) -> list[int]:
    """Ask vLLM for the sizes that it would capture on a GPU."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = None
    compilation.max_cudagraph_capture_size = largest
    config.model_config.enforce_eager = False
    config._set_cudagraph_sizes()
    sizes: list[int] = compilation.cudagraph_capture_sizes
    return sizes


@pytest.mark.parametrize(
    ("name", "ranks", "requests", "drafts"),
    [
        ("b300-tp8ep8", 8, 96, 0),
        ("b300-tp8ep8-mtp", 8, 96, 3),
        ("h200-tp8ep8", 8, 32, 0),
        ("h200-tp8ep8-mtp", 8, 32, 3),
        ("single-gpu", 1, 16, 0),
    ],
)
def test_vllm_configures_what_a_profile_says(
    flash: str, name: str, ranks: int, requests: int, drafts: int
) -> None:
    config = configure(flash, name)
    parallel, scheduler = config.parallel_config, config.scheduler_config
    assert (parallel.tensor_parallel_size, parallel.enable_expert_parallel) == (ranks, ranks > 1)
    assert (parallel.data_parallel_size, parallel.pipeline_parallel_size) == (1, 1)
    assert (scheduler.max_num_seqs, config.num_speculative_tokens) == (requests, drafts)
    assert config.cache_config.cache_dtype == "fp8"
    assert config.cache_config.enable_prefix_caching
    # A cached prefix, a new part and an answer fit; and a new part fits one step.
    assert config.model_config.max_model_len >= 519_168 + 5_120 + 16_384
    assert scheduler.max_num_batched_tokens >= 5_120 + requests * (1 + drafts)
    # The largest batch of decode steps is one graph, and so is every number of requests by eights.
    rows = 1 + drafts
    args = parse(flash, for_vllm(name))
    sizes = graph_sizes(config, args.max_cudagraph_capture_size)
    assert max(sizes) == requests * rows
    assert {n * rows for n in range(8, requests + 1, 8)} <= set(sizes)


def test_every_profile_but_the_demos_is_configured_above() -> None:
    mark = test_vllm_configures_what_a_profile_says.pytestmark[0]
    assert [case[0] for case in mark.args[1]] == GPU


@pytest.mark.parametrize("name", GPU)
def test_buckets_tell_latencies_around_15_ms_apart(flash: str, name: str) -> None:
    from vllm.v1.metrics.buckets import INTER_TOKEN_LATENCY_BUCKETS, histogram_buckets

    overrides = parse(flash, for_vllm(name)).custom_histogram_buckets
    buckets = histogram_buckets("inter_token_latency", overrides=overrides)
    assert set(INTER_TOKEN_LATENCY_BUCKETS) < set(buckets)
    within = [sum(bound * 1000 < value for bound in buckets) for value in MEASURED]
    assert len(set(within)) == len(MEASURED)
    widths = [b - a for a, b in pairwise(buckets) if a >= 0.01 and b <= 0.02]
    assert max(widths) <= 0.001001


def test_demo_is_what_make_serve_passed_before_there_were_profiles(flash: str) -> None:
    before = ("--served-model-name", "tiny", "--max-model-len", "65536")
    before += ("--kv-cache-memory-bytes", "1073741824")
    nothing = Profile("none", "", ())
    assert parse(flash, for_vllm("cpu-demo"), on_cpu=True) == parse(
        flash, nothing, *before, on_cpu=True
    )
    assert read_profile("cpu-demo").arguments[-1:] == ("--spin-allow-request-policy",)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["-tp", "4"], "tensor_parallel_size", 4),
        (["--tensor-parallel-size=4"], "tensor_parallel_size", 4),
        (["--tensor_parallel_size", "4"], "tensor_parallel_size", 4),
        (["--no-enable-expert-parallel"], "enable_expert_parallel", False),
        (["--no_enable_expert_parallel"], "enable_expert_parallel", False),
        (["--max-num-seqs", "7"], "max_num_seqs", 7),
        (["--custom-histogram-buckets", "None"], "custom_histogram_buckets", None),
        (
            ["--custom-histogram-buckets.inter_token_latency", "[1]"],
            "custom_histogram_buckets",
            {"inter_token_latency": [1]},
        ),
        (["-sc", "None"], "speculative_config", None),
        (["--speculative-config.method", "ngram"], "speculative_config", {"method": "ngram"}),
    ],
)
def test_command_line_wins_however_it_is_spelled(
    flash: str, given: list[str], name: str, value: object
) -> None:
    profile = for_vllm("b300-tp8ep8-mtp")
    args, plain = parse(flash, profile, *given), parse(flash, profile)
    assert getattr(args, name) == value
    assert getattr(plain, name) != value
    setattr(args, name, getattr(plain, name))
    assert args == plain  # argument by argument


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-num-seq=8", "unrecognized arguments: --max-num-seq=8"),  # no abbreviations
        ("--no-headless", "unrecognized arguments: --no-headless"),
        ("--spin-places=8", "unrecognized arguments: --spin-places=8"),
        ("--max-num-seqs=many", "argument --max-num-seqs: invalid .*'many'"),
        ("--max-num-seqs", "argument --max-num-seqs: expected one argument"),
        ("--enforce-eager=1", "argument --enforce-eager/--no-enforce-eager: ignored explicit"),
        ("--kv-cache-dtype=fp99", "argument --kv-cache-dtype: invalid choice: 'fp99'"),
        ("--speculative-config=3x", "argument --speculative-config"),
    ],
)
def test_mistake_in_a_profile_is_one_line_with_its_name(
    flash: str, argument: str, message: str
) -> None:
    profile = Profile("mine.yaml", "", ("--port=1", argument))
    with pytest.raises(InputError, match=message) as caught:
        parse(flash, profile)
    assert str(caught.value).startswith("profile mine.yaml: expected arguments that vLLM takes")
    assert "\n" not in str(caught.value)

"""Examine a machine, a model and a running server: what `spin-server serve` would meet."""

import http.client
import json
import platform
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from spin_server import environment
from spin_server.engine import preflight
from spin_server.engine.model_support import (
    IndexerGeometry,
    indexer_geometry,
    read_local_config,
    read_whole,
    require_cpu_kernels,
)
from spin_server.engine.presence import (
    PLUGIN_GROUP,
    active_plugins,
    allow_plugins,
    required_plugins,
)
from spin_server.engine.ranks import check_ranks
from spin_server.engine.server_arguments import refuse_on_gpu
from spin_server.engine.spin.settings import DEFAULT_CAPACITY, SpinSettings
from spin_server.engine.versions import TORCH_VERSION, installed_vllm
from spin_server.errors import InputError, SpinError

_PROBE_SECONDS = 120
_PROBE = "from spin_server.engine.doctor import probe; probe()"
_GIB = 2**30
_GPU_SHARE = 0.92  # vLLM's default for --gpu-memory-utilization


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        name: what was examined.
        ok: False where serving would fail or go without SPIN.
        text: what was found, and the fix where it is not ok.
    """

    name: str
    ok: bool
    text: str


def examine(
    model: str | None,
    *,
    max_model_len: int | None,
    max_num_seqs: int | None,
    url: str | None,
    ranks: int | None = None,
    steps: int = 0,
) -> Iterator[Finding]:
    """Examine everything that can be told, in the order in which it would fail.

    Args:
        model: a model folder, or None.
        max_model_len: tokens; None for the model's own limit.
        max_num_seqs: requests that may be live at once; None for vLLM's own limit.
        url: of a running server, or None.
        ranks: of an engine that is run to compare what they choose, or None.
        steps: of that engine.
    """
    yield _python()
    yield _checked("engine", lambda: " ".join(installed_vllm()))
    yield _torch()
    found: dict[str, Any] | None
    try:
        found = _load_plugins()
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        text = f"vLLM does not import ({_last_line(error)}); install it anew: `make setup`"
        yield Finding("plugins", False, text)
        found = None
    if found is not None:
        yield from _device(found)
        yield from _plugins(found)
    if model is not None:
        yield from _model(model, max_model_len, max_num_seqs, found)
    if ranks is not None and found is not None:
        yield _ranks(model, ranks, steps, on_cpu=found["is_cpu"])
    if url is not None:
        yield from _running(url)


def _checked(name: str, check: Callable[[], str]) -> Finding:
    """Turn a check that raises into a finding."""
    try:
        return Finding(name, True, check())
    except SpinError as error:
        return Finding(name, False, str(error))


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info < (3, 14)
    text = f"{platform.python_version()} at {sys.executable}"
    return Finding("python", ok, text if ok else f"expected 3.11, 3.12 or 3.13, got {text}")


def _torch() -> Finding:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Finding("torch", False, f"expected {TORCH_VERSION}, got none; run `make setup`")
    ok = found.split("+")[0] == TORCH_VERSION
    text = f"expected {TORCH_VERSION}, got {found}; install torch=={TORCH_VERSION}"
    return Finding("torch", ok, found if ok else text)


def probe() -> None:
    """Load vLLM's plugins as its processes do, and print what came of it as JSON."""
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    allow_plugins(on_cpu=is_cpu)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    defaults = AsyncEngineArgs.get_batch_defaults(1)[1]
    found = {
        "is_cpu": is_cpu,
        "max_num_seqs": defaults[UsageContext.OPENAI_API_SERVER],
        "active": active_plugins(),
    }
    print("\n" + json.dumps(found))


def _load_plugins() -> dict[str, Any]:
    """Probe in a process of its own: plugins change vLLM for good."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
        check=True,
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _last_line(error: Exception) -> str:
    """Say what a process that failed said last."""
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _device(found: dict[str, Any]) -> Iterator[Finding]:
    if not found["is_cpu"]:
        yield _checked("device", _gpu)
        return

    def check() -> str:
        preflight.check_cpu()
        return "CPU with AVX-512 BF16, and libnuma"

    yield _checked("device", check)


def _gpu() -> str:
    environment.prepare_engine()
    found = preflight.check_gpu()
    refuse_on_gpu(SpinSettings())
    return found


def _plugins(found: dict[str, Any]) -> Iterator[Finding]:
    required = required_plugins(on_cpu=found["is_cpu"])
    times = Counter(entry.name for entry in entry_points(group=PLUGIN_GROUP))
    twice = [name for name in required if times[name] > 1]
    missing = sorted(set(required) - set(found["active"]))
    if twice:
        text = f"{', '.join(twice)} installed twice; remove stale *.egg-info folders"
    elif missing:
        text = (
            f"expected {', '.join(required)} to load, but {', '.join(missing)} does not; "
            "reinstall spin-server in this environment"
        )
    else:
        text = f"{', '.join(required)} load in a fresh process"
    yield Finding("plugins", not twice and not missing, text)


def _model(
    model: str,
    max_model_len: int | None,
    max_num_seqs: int | None,
    engine: dict[str, Any] | None,
) -> Iterator[Finding]:
    """Examine a model; what depends on the engine, only where that loads."""
    try:
        config = read_local_config(model)
        if config is None:
            raise InputError("MODEL", "a model folder on this machine", repr(model))
        geometry = indexer_geometry(config)
        if engine is not None and engine["is_cpu"]:
            require_cpu_kernels(geometry)
        tokens = max_model_len or read_whole(config, "max_position_embeddings")
    except SpinError as error:
        yield Finding("model", False, str(error))
        return
    yield Finding("model", True, _describe(geometry))
    if engine is not None:
        requests = max_num_seqs or engine["max_num_seqs"]
        on_cpu = engine["is_cpu"]
        yield _checked("memory", lambda: _memory(model, geometry, tokens, requests, on_cpu=on_cpu))


def _describe(geometry: IndexerGeometry) -> str:
    return (
        f"SPIN applies: indexers in {len(geometry.layers)} layers, {geometry.num_heads} index "
        f"heads, top {geometry.top_k}; tokens per slot: {geometry.compress_ratio}"
    )


def _memory(
    model: str, geometry: IndexerGeometry, tokens: int, requests: int, *, on_cpu: bool
) -> str:
    num_layers = len(geometry.layers)
    sizes: dict[str, Any] = {
        "num_states": requests,
        "max_slots": tokens // geometry.compress_ratio,
    }
    if on_cpu:
        from spin_server.engine.spin.layers import history_bytes

        spin_bytes = history_bytes(num_layers, **sizes)
    else:
        from spin_server.engine.spin.device import device_bytes

        spin_bytes = device_bytes(
            num_layers, num_rows=requests, num_policies=DEFAULT_CAPACITY, **sizes
        )
    taken = f"SPIN takes {spin_bytes / _GIB:.2f} GiB for {requests} requests of {tokens:,} tokens"
    if not on_cpu:
        # How many share the weights is not known here: at best, all GPUs of the machine do.
        weights = preflight.weight_bytes(model) // max(1, preflight.num_gpus())
        return f"{taken}; {preflight.check_gpu_memory(spin_bytes, weights, _GPU_SHARE)}"
    return f"{taken}; {preflight.check_memory(model, None, spin_bytes)}"


def _ranks(model: str | None, ranks: int, steps: int, *, on_cpu: bool) -> Finding:
    def check() -> str:
        preflight.check_ranks_fit(ranks, on_cpu=on_cpu)
        return check_ranks(model, ranks, steps, on_cpu=on_cpu)

    return _checked("ranks", check)


def _running(url: str) -> Iterator[Finding]:
    """Read a running server's own metrics."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=10) as response:
            text = response.read().decode()
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        processes: dict[str, list[str]] = {}
        for sample in samples:
            if sample.name == "spin_plugin_active":
                processes.setdefault(sample.labels["process"], []).append(sample.labels["plugin"])
        agree = [bool(s.value) for s in samples if s.name == "spin_ranks_agree"]
        limits = [int(s.value) for s in samples if s.name == "spin_min_context_tokens"]
        outcomes: Counter[str] = Counter()
        for sample in samples:
            if sample.name == "spin_kv_blocks_total":
                outcomes[sample.labels["outcome"]] += int(sample.value)
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        text = f"{url}: expected a running spin-server, got {error!r}; start one, or mend --url"
        yield Finding("server", False, text)
        return
    if not processes:
        text = f"{url}: expected spin_ metrics, got none: this is not spin-server; mend --url"
        yield Finding("server", False, text)
        return
    for process, plugins in processes.items():
        yield Finding(f"server: {process}", True, f"plugins {', '.join(plugins)} active")
    if agree:  # off, or no snapshot yet
        apart = "they differ: serve on one rank or with --spin-off; examine the model with --ranks"
        text = "every rank chooses alike" if all(agree) else apart
        yield Finding("server: ranks", all(agree), text)
    sparse = sum(outcomes.values()) - outcomes["dense"]
    dense = f" (contexts of up to {limits[0]:,} tokens are scored densely)" if limits else ""
    shown = f"{outcomes['skipped'] / sparse:.1%}" if sparse else f"no sparse step yet{dense}"
    yield Finding("server: realized sparsity", True, shown)

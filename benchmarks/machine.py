"""What the benchmarks share: the machine's name, and an engine that they step themselves."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """Name the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    """Name the commit that is measured, empty where there is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


def driven_engine(plugins: Sequence[str], settings: Any, **arguments: Any) -> Any:
    """vLLM's own engine as `spin-server serve` configures it, stepped by this process.

    An engine core in its own process runs ahead of the outputs that are read here, and past a
    switch of configurations.

    Args:
        plugins: ours, by entry-point name.
        settings: SPIN's.
        arguments: of vLLM's EngineArgs.
    """
    from spin_server import environment
    from spin_server.engine.spin.settings import CONFIG_KEY

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # SPIN explores by the request's id: two runs of the same requests choose alike with the same.
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    environment.prepare_engine()
    if "spin_cpu" in plugins:
        environment.prepare_cpu_engine()
    else:
        # vLLM 0.32.0 sets it once this process has imported the model's module, which reads it:
        # graphs in pieces would hold the attention.
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    environment.allow_plugins(plugins, plugins)
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            additional_config={CONFIG_KEY: settings.model_dump(mode="json")},
            disable_log_stats=True,
            **arguments,
        )
    )

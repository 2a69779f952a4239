"""vLLM's engine with SPIN, stepped by this process instead of serving.

A server's batches depend on when requests arrive; here whoever calls decides. Plugins change vLLM
for good, so this belongs in a process of its own.
"""

from typing import Any

from spin_server import environment
from spin_server.engine import presence
from spin_server.engine.spin.settings import CONFIG_KEY, SpinSettings

WORKER_EXTENSION = "spin_server.engine.worker.SpinWorkerExtension"


def stepped_engine(
    model: str,
    settings: SpinSettings,
    *,
    ranks: int = 1,
    worker_extension: str = WORKER_EXTENSION,
    **arguments: Any,
) -> Any:
    """Start an engine as `spin-server serve` configures it.

    Args:
        model: a folder, or a name for vLLM to look up.
        settings: SPIN's.
        ranks: of tensor parallelism.
        worker_extension: class whose methods every worker gets.
        arguments: of vLLM's EngineArgs.

    Returns:
        vLLM's LLMEngine.
    """
    environment.prepare_engine()
    environment.prepare_stepped_engine()
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        environment.prepare_cpu_engine(ranks)
    presence.allow_plugins(on_cpu=on_cpu)
    from vllm import EngineArgs, LLMEngine

    if on_cpu:
        arguments = {"enforce_eager": True, "kv_cache_memory_bytes": 2**29} | arguments
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            tensor_parallel_size=ranks,
            worker_extension_cls=worker_extension,
            additional_config={CONFIG_KEY: settings.model_dump(mode="json")},
            **arguments,
        )
    )

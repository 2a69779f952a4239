"""The `spin` plugin: SPIN in front of the indexer, in every worker."""

from spin_server.engine.presence import active_plugins, mark_active

NAME = "spin"


def register() -> None:
    """Let workers install SPIN; calling it again changes nothing.

    Source: vLLM's plugin group `vllm.general_plugins` (vllm/plugins/__init__.py).
    """
    if NAME in active_plugins():
        return
    from spin_server.engine.lifetime import die_with_parent

    die_with_parent()
    _install_in_workers()
    mark_active(NAME)


def _install_in_workers() -> None:
    """Install where a process becomes a worker: before its model is built, and nowhere else.

    A worker loads its plugins within init_worker, so only what that calls afterwards can be
    replaced. Source: vllm/v1/worker/worker_base.py (WorkerWrapperBase.init_worker).
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls: type) -> None:
        original(cls)
        # Importing an indexer registers it with vLLM.
        if current_platform.is_cpu():
            from spin_server.engine.spin import indexer_cpu, v1_runner  # noqa: F401

            v1_runner.install()
        else:
            from spin_server.engine.spin import indexer_cuda, v2_runner  # noqa: F401

            v2_runner.install()

    platform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)

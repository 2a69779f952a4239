"""The `spin` plugin: SPIN in front of the indexer, in every worker."""

from spin_server.engine.presence import active_plugins, mark_active

NAME = "spin"


def register() -> None:
    """Let workers install SPIN; calling it again changes nothing.

    Source: vLLM's plugin group `vllm.general_plugins` (vllm/plugins/__init__.py).
    """
    if NAME in active_plugins():
        return
    from vllm.platforms import current_platform

    from spin_server.engine.lifetime import die_with_parent

    die_with_parent()
    if current_platform.is_cpu():
        _install_in_workers(type(current_platform))
    mark_active(NAME)


def _install_in_workers(platform: type) -> None:
    """Install where vLLM replaces kernels: in workers, before the model is built.

    Source: vllm/v1/worker/worker_base.py (init_worker).
    """
    original = platform.register_triton_kernel_overrides.__func__  # type: ignore[attr-defined]

    def register_triton_kernel_overrides(cls: type) -> None:
        original(cls)
        from spin_server.engine.spin import indexer, v1_runner  # noqa: F401  registers the class

        v1_runner.install()

    platform.register_triton_kernel_overrides = classmethod(  # type: ignore[attr-defined]
        register_triton_kernel_overrides
    )

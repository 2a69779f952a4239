"""Which of our plugins an engine needs, and which are active in this process.

vLLM logs and skips a plugin that fails to import, and would then serve without it. So each
plugin marks itself here once it is in place, and the launcher asks every process.
"""

import sys
from importlib.metadata import entry_points

from spin_server import environment

PLUGIN_GROUP = "vllm.general_plugins"

_active: set[str] = set()


def required_plugins(*, on_cpu: bool) -> list[str]:
    """Name the plugins without which an engine is not ours."""
    return ["spin", "spin_cpu"] if on_cpu else ["spin"]


def allow_plugins(*, on_cpu: bool) -> list[str]:
    """Make every vLLM process that this one starts load our plugins, beside what is installed.

    Returns:
        The names of ours.
    """
    required = required_plugins(on_cpu=on_cpu)
    environment.allow_plugins(required, [e.name for e in entry_points(group=PLUGIN_GROUP)])
    return required


def mark_active(plugin: str) -> None:
    """Note that a plugin is in place in this process, and let an engine core report it."""
    _active.add(plugin)
    # Only the engine's own process has loaded this module when plugins register; see
    # vllm/v1/engine/core.py (EngineCore.__init__). There the launcher's question arrives as a
    # utility call, which looks its method up on the engine core.
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        core.EngineCore.spin_plugins = lambda self: active_plugins()


def active_plugins() -> list[str]:
    """Name the active plugins, sorted."""
    return sorted(_active)

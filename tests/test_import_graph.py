"""The doors between the rooms stay shut (CONTRIBUTING.md)."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for top in ("spin_server", "kernels/spin_kernels") for path in (ROOT / top).rglob("*.py")
)
STDLIB = sys.stdlib_module_names


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def uses(path: Path, *packages: str) -> set[str]:
    return {
        name
        for name in imports(path)
        if any(name == package or name.startswith(package + ".") for package in packages)
    }


# room -> packages that it must not import
SHUT = {
    "spin_kernels": ("spin_server", "vllm"),
    "spin_server.policy": ("torch", "vllm", "spin_kernels", "spin_server.engine"),
    "spin_server.algorithm": (
        "vllm",
        "spin_server.engine",
        "spin_server.cli",
        "spin_server.replay",
    ),
    "spin_server.replay": ("vllm", "spin_server.engine", "spin_server.cli"),
    "spin_server.tiny_model": ("vllm", "spin_server.engine", "spin_server.cli"),
    "spin_server.profiles": (
        "torch",
        "vllm",
        "spin_server.engine",
        "spin_server.cli",
        "spin_server.admin",
    ),
    "spin_server.admin": ("torch", "vllm", "spin_server.engine"),
    "spin_server.engine": ("spin_server.cli", "spin_server.admin"),
}


@pytest.mark.parametrize("room", SHUT)
def test_room_imports_nothing_behind_a_shut_door(room: str) -> None:
    for path in SOURCES:
        if module_name(path) == room or module_name(path).startswith(room + "."):
            assert not uses(path, *SHUT[room]), path


def test_every_room_that_exists_has_a_rule() -> None:
    # So that a new room is not forgotten here.
    rooms = {p.parent.name for p in (ROOT / "spin_server").glob("*/__init__.py")}
    assert {f"spin_server.{room}" for room in rooms} - SHUT.keys() == {"spin_server.cli"}


def test_vllm_is_imported_by_the_engine_and_cli_only() -> None:
    for path in SOURCES:
        if not module_name(path).startswith(("spin_server.engine", "spin_server.cli")):
            assert not uses(path, "vllm"), path


def test_engine_is_imported_by_itself_and_cli_only() -> None:
    for path in SOURCES:
        if not module_name(path).startswith(("spin_server.engine", "spin_server.cli")):
            assert not uses(path, "spin_server.engine"), path


def test_kernels_import_torch_and_triton_only() -> None:
    for path in SOURCES:
        if module_name(path).startswith("spin_kernels"):
            tops = {name.split(".")[0] for name in imports(path)}
            assert tops <= STDLIB | {"torch", "triton", "spin_kernels"}, path
            if path.stem == "reference":
                assert "triton" not in tops, path


def test_environment_is_read_in_one_module() -> None:
    for path in SOURCES:
        if module_name(path) == "spin_server.environment":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv", "putenv"), path


def test_kernels_folder_is_no_package() -> None:
    # Hugging Face ships a package called `kernels`, and transformers probes for it.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_transformers_imports_from_the_repository_root() -> None:
    # With this folder first on the path, `kernels` is at most an empty namespace.
    import subprocess

    subprocess.run(
        [sys.executable, "-c", "from transformers import DeepseekV4ForCausalLM"],
        cwd=ROOT,
        check=True,
    )

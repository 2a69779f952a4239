"""Profiles: files of arguments, and the command lines that they stand for."""

import tomllib
from pathlib import Path

import pytest

from spin_server.errors import InputError
from spin_server.profiles.profile import profile_names, read_profile

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_every_kind_of_value_is_spelled_as_on_a_command_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
description: mine
arguments:
  max_num_seqs: 8
  gpu-memory-utilization: 0.5
  kv-cache-memory-bytes: 1G
  enforce-eager: true
  enable-prefix-caching: false
  cudagraph-capture-sizes: [1, 2]
  speculative-config: {method: mtp, num_speculative_tokens: 3}
  lora-modules: [{name: a, path: b}, c=d]
  port: -1
""",
    )
    profile = read_profile(path)
    assert (profile.name, profile.description) == (path, "mine")
    assert profile.arguments == (
        "--max-num-seqs=8",
        "--gpu-memory-utilization=0.5",
        "--kv-cache-memory-bytes=1G",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--cudagraph-capture-sizes", "1", "2"),
        '--speculative-config={"method": "mtp", "num_speculative_tokens": 3}',
        *("--lora-modules", '{"name": "a", "path": "b"}', "c=d"),
        "--port=-1",
    )


def test_what_a_file_says_wins_over_its_base(tmp_path: Path) -> None:
    base = read_profile("b300-tp8ep8").arguments
    path = write(
        tmp_path,
        "{description: mine, base: b300-tp8ep8, arguments: {max_num_seqs: 4, port: 9}}",
    )
    mine = read_profile(path).arguments
    assert "--max-num-seqs=96" in base
    assert set(mine) ^ set(base) == {"--max-num-seqs=96", "--max-num-seqs=4", "--port=9"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", r"expected a mapping with description and arguments, got \['a'\]"),
        ("", "expected a mapping with description and arguments, got None"),
        ("a: [", "expected YAML"),
        ("{description: a, arguments: {}, arguments: {}}", "the key 'arguments' comes twice"),
        ("arguments: {}", "description: expected .*got none"),
        ("description: a", "arguments: expected .*got none"),
        ("{description: 1, arguments: {}}", "description: expected a valid string, got 1"),
        ('{description: "a\\nb", arguments: {}}', "description: expected "),
        ("{description: a, arguments: [b]}", r"arguments: expected .*got \['b'\]"),
        (
            "{description: a, argumnets: {}, arguments: {}}",
            "expected one of description, base, arguments, got argumnets",
        ),
        (
            "{description: a, base: nope, arguments: {}}",
            "base: expected one of b300-tp8ep8.*'nope'",
        ),
        ("{description: a, base: ./b.yaml, arguments: {}}", "base: expected one of b300-tp8ep8"),
        ("{description: a, arguments: {yes: 1}}", "arguments.*: expected a valid string, got True"),
        ("{description: a, arguments: {--port: 1}}", "such as port, got '--port'"),
        ("{description: a, arguments: {compilation-config.mode: 3}}", "such as compilation-config"),
        ("{description: a, arguments: {'': 3}}", "such as an argument, got ''"),
        (
            "{description: a, arguments: {model: m}}",
            "model: expected this on the command line only",
        ),
        ("{description: a, arguments: {config: m}}", "config: expected this on the command line"),
        ("{description: a, arguments: {profile: m}}", "profile: expected this on the command line"),
        ("{description: a, arguments: {help: true}}", "help: expected this on the command line"),
        (
            "{description: a, arguments: {no-enforce-eager: true}}",
            "expected enforce-eager, true or false, got 'no-enforce-eager'",
        ),
        (
            "{description: a, arguments: {max-num-seqs: 1, max_num_seqs: 2}}",
            "expected every argument once, got max-num-seqs twice",
        ),
        ("{description: a, arguments: {port: }}", "port: expected .*not empty, got None"),
        ("{description: a, arguments: {port: []}}", r"port: expected .*not empty, got \[\]"),
        ("{description: a, arguments: {port: {}}}", "port: expected .*not empty, got {}"),
        ("{description: a, arguments: {port: [[1]]}}", r"port: expected .*got \[1\]"),
        ("{description: a, arguments: {port: [true]}}", "port: expected .*got True"),
        ("{description: a, arguments: {port: 2026-01-01}}", "port: expected .*datetime.date"),
        ("{description: a, arguments: {port: {a: 2026-01-01}}}", "port: expected .*datetime.date"),
        ("{description: a, arguments: {port: &a {b: *a}}}", "port: expected "),
    ],
)
def test_file_that_makes_no_sense_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"profile {path}")
    assert "\n" not in str(caught.value)


def test_name_that_is_none_is_answered_with_those_that_are() -> None:
    with pytest.raises(InputError) as caught:
        read_profile("b200")
    assert str(caught.value) == (
        f"--profile: expected one of {', '.join(profile_names())}, or a path to a YAML file, "
        "got 'b200'"
    )


@pytest.mark.parametrize("path", ["./none", "none.yaml", "none.yml"])
def test_path_where_nothing_is_is_named(path: str) -> None:
    with pytest.raises(InputError, match=f"profile {path}: expected a readable file, got No such"):
        read_profile(path)


def test_profile_of_each_kind_of_machine_is_there() -> None:
    assert {"b300-tp8ep8", "h200-tp8ep8", "single-gpu", "cpu-demo"} <= set(profile_names())


def test_file_in_the_documentation_reads(tmp_path: Path) -> None:
    example = (ROOT / "docs/profiles.md").read_text().split("```yaml\n")[1].split("```")[0]
    arguments = read_profile(write(tmp_path, example)).arguments
    assert {"--tensor-parallel-size=8", "--max-num-seqs=48"} <= set(arguments)


def test_profiles_are_in_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "spin_server"
    shipped = {f for p in setuptools["package-data"]["spin_server"] for f in package.glob(p)}
    assert {f"{name}.yaml" for name in profile_names()} == {
        file.name for file in shipped if file.parent.name == "profiles"
    }

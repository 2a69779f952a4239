"""`spin-server serve --profile`, and `spin-server profiles`."""

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spin_server.cli.main import main
from spin_server.cli.serve import main as serve
from spin_server.engine.spin.settings import SpinSettings
from spin_server.errors import InputError
from spin_server.profiles.profile import profile_names, read_profile


class Served:
    """What the engine was asked to serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        monkeypatch.setattr("spin_server.engine.server.serve", self._serve)
        monkeypatch.setattr(
            "spin_server.engine.lifetime.stop_on_signals_during_start", lambda: None
        )

    def _serve(
        self, model: str, rest: Sequence[str], settings: SpinSettings, guest: Any, *, profile: Any
    ) -> bool:
        self.rest, self.settings, self.guest, self.profile = rest, settings, guest, profile
        return True

    def __call__(self, *arguments: str) -> None:
        assert serve(["OWNER/NAME", "--port", str(self._port), *arguments]) == 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def write(folder: Path, arguments: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(f"description: mine\narguments: {arguments}\n")
    return str(path)


def test_profile_stands_before_what_the_command_line_says(served: Served) -> None:
    served("-tp", "4", "--profile", "b300-tp8ep8", "--profiler-config.profiler", "torch")
    profile = read_profile("b300-tp8ep8").arguments
    assert served.rest[: len(profile)] == list(profile)
    assert served.rest[len(profile) :][2:] == ["-tp", "4", "--profiler-config.profiler", "torch"]
    assert served.profile.name == "b300-tp8ep8"
    assert served.profile.arguments == profile


def test_command_line_without_a_profile_is_passed_on_as_it_is(served: Served) -> None:
    served("-tp", "4")
    assert (served.rest[2:], served.profile) == (["-tp", "4"], None)


def test_own_arguments_of_a_profile_count_and_the_command_line_wins(
    served: Served, tmp_path: Path
) -> None:
    path = write(
        tmp_path,
        "{spin-sparsity: 0.5, spin_places: 4, spin-allow-request-policy: true, spin-off: yes, "
        f"seed: 3, admin-store: {tmp_path}/admin.db, admin-port: 9}}",
    )
    on = ("--no-spin-off", "--spin-places", "7", "--no-spin-allow-request-policy")
    served("--profile", path, *on, "--admin-port=10")
    assert served.settings.enabled
    assert not served.settings.allow_request_policy
    assert (served.settings.places, served.settings.default.sparsity) == (7, "0.5")
    assert served.guest.port == 10
    assert served.profile.arguments == ("--seed=3",)
    assert served.rest[0] == "--seed=3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{spin-place: 3}", "expected one of SPIN's arguments .*got --spin-place=3"),
        ("{spin-places: many}", "argument --spin-places: invalid int value: 'many'"),
        ("{spin-off: 1}", "argument --spin-off/--no-spin-off: ignored explicit argument '1'"),
        ("{admin-prot: 3}", "expected one of the admin API's arguments .*got --admin-prot=3"),
    ],
)
def test_mistake_in_own_arguments_is_told_by_the_profile(
    served: Served, tmp_path: Path, arguments: str, message: str
) -> None:
    path = write(tmp_path, arguments)
    with pytest.raises(InputError, match=f"^profile {path}: .*{message}") as caught:
        served("--profile", path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "nope"], "--profile: expected one of b300-tp8ep8"),
        (["--profile"], "--profile: expected a name, or a file"),
        (["--profile", "cpu-demo", "--profile=single-gpu"], "got cpu-demo, single-gpu"),
        (["--profile", "cpu-demo", "--config", "a.yaml"], "--config: expected no --profile"),
        (["--config=a.yaml", "--profile", "cpu-demo"], "--config: expected no --profile"),
    ],
)
def test_profile_that_cannot_be_meant_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        serve(["OWNER/NAME", *arguments])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_profiles_lists_each_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines)
    assert list(listed) == profile_names()
    assert listed["single-gpu"] == read_profile("single-gpu").description


def test_profiles_show_prints_what_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, '{cudagraph-capture-sizes: [1, 2], hf-overrides: {a: "it\'s"}}')
    for name in ("b300-tp8ep8-mtp", path):
        assert main(["profiles", "show", name]) == 0
        shown = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
        assert shown == ["spin-server", "serve", "MODEL", *read_profile(name).arguments]


def test_profiles_show_of_what_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "show", "nope"]) == 2
    assert capsys.readouterr().err.startswith("spin-server: --profile: expected one of b300")

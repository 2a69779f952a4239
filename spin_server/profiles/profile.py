"""What a profile is: a file of arguments, and the command line that it stands for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spin_server.errors import InputError
from spin_server.yaml_file import read_yaml

_FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")
# What a command line names once, or what would end it.
_NOT_HERE = ("config", "help", "model", "profile")


class _File(BaseModel):
    """A profile, as it is written in YAML."""

    model_config = ConfigDict(extra="forbid")

    description: str = Field(pattern=r"^\S[^\n]*$", description="what it is for, in one line")
    base: str | None = Field(
        default=None, description="a profile by name; what this file does not say is its"
    )
    arguments: dict[str, Any] = Field(
        description="arguments of `spin-server serve`, without the dashes in front: a flag is true "
        "or false, a list gives several values, a mapping becomes JSON"
    )


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile, read.

    Args:
        name: as it was asked for: a name, or a path.
        description: what it is for, in one line.
        arguments: the command line that it stands for; what comes behind it wins.
    """

    name: str
    description: str
    arguments: tuple[str, ...]


def profile_names() -> list[str]:
    """List the profiles that have a name."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def read_profile(name: str) -> Profile:
    """Read a profile.

    Args:
        name: of one that comes with spin-server, or a path: anything that has a slash or ends in
            .yaml or .yml.

    Raises:
        InputError: there is none of that name, or the file is none.
    """
    if "/" in name or name.endswith(_SUFFIXES):
        path = Path(name)
    else:
        path = _named("--profile", name, ", or a path to a YAML file")
    file, values = _read(f"profile {name}", path)
    arguments = (part for key, value in values.items() for part in _command_line(name, key, value))
    return Profile(name, file.description, tuple(arguments))


def _named(option: str, name: str, or_else: str = "") -> Path:
    names = profile_names()
    if name not in names:
        raise InputError(option, f"one of {', '.join(names)}{or_else}", repr(name))
    return _FOLDER / f"{name}.yaml"


def _read(name: str, path: Path) -> tuple[_File, dict[str, Any]]:
    """Read a file and what it is based on.

    Returns:
        The file; values by argument, its own over its base's.
    """
    found = read_yaml(path, name)
    if not isinstance(found, dict):
        raise InputError(name, "a mapping with description and arguments", repr(found))
    try:
        file = _File.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise InputError(name, f"one of {', '.join(_File.model_fields)}", where) from None
        expected = first["msg"].removeprefix("Input should be ")
        got = "none" if first["type"] == "missing" else repr(first["input"])
        raise InputError(f"{name}, {where}", expected, got) from None
    values = _by_argument(name, file.arguments)
    if file.base is None:
        return file, values
    base = _named(f"{name}, base", file.base)
    return file, {**_read(f"profile {file.base}", base)[1], **values}


def _by_argument(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Spell every argument in one way, with dashes, and refuse those that have no place here."""
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        where, argument = f"{name}, {key}", key.replace("_", "-")
        if key.startswith("-") or "." in key or not key:
            plain = key.lstrip("-").split(".")[0] or "an argument"
            expected = f"a name without dashes in front or dots, such as {plain}"
            raise InputError(where, expected, repr(key))
        if argument in _NOT_HERE:
            raise InputError(where, "this on the command line only", repr(value))
        if argument.startswith("no-"):
            raise InputError(where, f"{argument[3:]}, true or false", repr(key))
        if argument in values:
            raise InputError(where, "every argument once", f"{argument} twice")
        values[argument] = value
    return values


def _command_line(name: str, argument: str, value: Any) -> list[str]:
    """Spell one argument as a command line does."""
    if isinstance(value, bool):
        return [f"--{argument}" if value else f"--no-{argument}"]
    if isinstance(value, list) and value:
        return [f"--{argument}", *(_text(name, argument, item) for item in value)]
    # With "=", for a value may begin with a dash.
    return [f"--{argument}={_text(name, argument, value)}"]


def _text(name: str, argument: str, value: Any) -> str:
    if isinstance(value, dict) and value:
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            pass  # a date, a key that is none, or a mapping that holds itself
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        return str(value)
    expected = "true, false, a number, a text, a list of these or a mapping, not empty"
    raise InputError(f"profile {name}, {argument}", expected, repr(value))

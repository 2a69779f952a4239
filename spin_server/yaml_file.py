"""YAML files, read so that nothing in them is lost in silence."""

from pathlib import Path
from typing import Any

import yaml

from spin_server.errors import InputError


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose mappings name every key once; the library lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, and refuse a key that comes twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for index, key in enumerate(keys) if key in keys[:index]]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} comes twice", node.start_mark
            )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path, name: str) -> Any:
    """Read a file.

    Args:
        path: of the file.
        name: what to call it in an error, such as the argument that named it.

    Raises:
        InputError: it cannot be read, is no YAML, or names a key twice.
    """
    try:
        return yaml.load(path.read_text(), Loader=_UniqueKeys)
    except OSError as error:
        raise InputError(name, "a readable file", error.strerror) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none
        raise InputError(name, "YAML", " ".join(str(error).split())) from None

"""What is wrong with a value, in words: what was expected, and what came."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from spin_server.admin.documents import NAME_PATTERN, came

KEY_ID_PATTERN = r"^key-[0-9a-f]{16}$"
_PATTERNS = {
    NAME_PATTERN: "a name of lower-case letters, digits and hyphens within, at most 63 in all",
    KEY_ID_PATTERN: "a key's id, such as key-0123456789abcdef",
}
# pydantic's name for the fault -> what it expects; its context is filled in.
_EXPECTED = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "a text",
    "string_too_long": "at most {max_length} characters",
    "literal_error": "{expected}",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "union_tag_invalid": "one of {expected_tags} for {discriminator}",
    "union_tag_not_found": "an object with {discriminator}",
}


def parameters(request: Request) -> list[str]:
    """Get the names of the parameters that a request's route has in its query."""
    models = [
        query.field_info.annotation for query in request.scope["route"].dependant.query_params
    ]
    return [f.alias or name for model in models for name, f in model.model_fields.items()]


def words(fault: Mapping[str, Any], known: Sequence[str]) -> str:
    """Say what was expected and what came.

    Args:
        fault: as pydantic tells it.
        known: names of the query's parameters.
    """
    kind, text = fault["type"], str(fault["msg"])
    if kind == "value_error":  # our own words
        return text.removeprefix("Value error, ")
    if kind == "missing":
        return "expected it, got nothing"
    if kind == "extra_forbidden":
        return _unknown(str(fault["loc"][-1]), known if fault["loc"][0] == "query" else ())
    if kind == "string_pattern_mismatch":
        expected = _PATTERNS.get(fault["ctx"]["pattern"], "another form")
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**fault.get("ctx", {}))
    else:
        expected = re.sub("^(Input|Value) should (be|have) ", "", text)
    context = fault.get("ctx", {})
    got = context.get("tag", context.get("actual_length", fault["input"]))
    return f"expected {expected}, got {came(got)}"


def _unknown(name: str, known: Sequence[str]) -> str:
    """Say that there is no such member or parameter; it may be another one's name, misspelt."""
    meant = [n for n in known if n.lower() == name.replace("_", "").lower()]
    if not known:
        return "expected nothing of this name"
    return f"expected {' or '.join(meant or known)}, got {name!r}"

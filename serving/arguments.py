"""Types of a tool call's arguments: GLM writes every value as text, the tool's JSON schema says what it is.

Unknown parameters, and tools without a schema, have text.  A value that fits none of its types stays
the text that the model wrote: better a wrong type than a lost argument.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})

_TYPES = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
_OF_VALUE = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MAX_NESTING = 64  # of unions in a schema
_FAILED = object()


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a function's parameter may have; text if the schema does not say."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    if declared is None:
        declared = schema.get("additionalProperties")
    return frozenset(_collect(declared, schema, set(), 0)) or STRING


def coerce(text: str, types: frozenset[str]) -> Any:
    """The value of the first type that the text fits, in the order that GLM's other servers use."""
    for name, read in _READERS:
        if name in types:
            value = read(text.strip())
            if value is not _FAILED:
                return value
    return text


def escape(text: str) -> str:
    """The text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _collect(schema: Any, root: Mapping[str, Any], followed: set[str], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_NESTING:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in followed:
            return set()
        followed.add(reference)
        return _collect(_follow(reference, root), root, followed, depth + 1)
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    found = {name for name in names if isinstance(name, str) and name in _TYPES}
    if schema.get("nullable") is True:
        found.add("null")
    choices = schema.get("enum")
    values = list(choices) if isinstance(choices, list) else []
    if "const" in schema:
        values.append(schema["const"])
    if not found - {"null"}:
        found |= {_OF_VALUE.get(type(value), "string") for value in values}
    for union in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(union)
        for branch in branches if isinstance(branches, list) else ():
            found |= _collect(branch, root, followed, depth + 1)
    if not found - {"null"}:
        if "properties" in schema:
            found.add("object")
        elif "items" in schema:
            found.add("array")
    return found


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the same schema (``#/$defs/Name``) points to."""
    at: Any = root
    if not reference.startswith("#"):
        return None
    for step in reference.lstrip("#").strip("/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        at = at.get(step) if isinstance(at, Mapping) else None
    return at


def _null(text: str) -> Any:
    return None if text.lower() == "null" else _FAILED


def _integer(text: str) -> Any:
    return int(text) if _INTEGER.fullmatch(text) else _FAILED


def _number(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else _FAILED


def _boolean(text: str) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), _FAILED)


def _json(text: str, kind: type) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _FAILED
    return value if isinstance(value, kind) else _FAILED


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_READERS = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", lambda text: _json(text, dict)),
    ("array", lambda text: _json(text, list)),
)

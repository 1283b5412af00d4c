"""What is wrong with the fields of a request, in words of the API: values of a wrong type, and names nobody knows.

msgspec finds both and has words of its own for them, about Python's types; a client knows fields and JSON.
"""

import difflib
import functools
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.inspect import StructType, type_info

from glmjax.errors import RequestError

log = logging.getLogger(__name__)

# Fields of OpenAI's API that say something about a request, and nothing about its answer.
WITHOUT_EFFECT = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
_MAX_SHOWN = 60  # characters of a client's value
_MAX_NAMES = 10
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}


def type_error(error: msgspec.ValidationError, raw: Mapping[str, Any]) -> RequestError:
    """The field, what it must be and what it is.

    Args:
      error: of ``msgspec.convert(raw, ...)``.
    """
    text, _, rest = str(error).partition(" - at `$")
    path = rest.removesuffix("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.+)`", text):
        field = f"{path}.{missing[1]}".lstrip(".")
        return RequestError(f"{field} is missing", field)
    if expected := re.fullmatch(r"Expected `(.+)`, got `.+`", text):
        kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        text = f"must be {' or '.join(kinds)}, got {shown(_value_at(raw, path))}"
    return RequestError(f"{path} {text}".lstrip(), path or None)


def shown(value: Any) -> str:
    """A client's value as JSON, if it is a short one."""
    if isinstance(value, dict | list):
        return _KINDS["object" if isinstance(value, dict) else "array"]
    long = isinstance(value, str) and len(value) > _MAX_SHOWN
    return json.dumps(value[:_MAX_SHOWN] if long else value, ensure_ascii=False) + ("..." if long else "")


def warn_of_unknown(raw: Mapping[str, Any], kind: type[msgspec.Struct], others: Collection[str] = ()) -> None:
    """Logs which fields will have no effect because there are none of these names.

    They are no error, as clients send fields that other servers have. Once for each set of names (unless hundreds of
    others came between).

    Args:
      others: fields that are known besides those of ``kind``.
    """
    if names := tuple(sorted(_unknown(raw, kind, {*others, *WITHOUT_EFFECT}))):
        _warn(kind.__name__.removesuffix("Request").lower(), names)


@functools.lru_cache(maxsize=512)
def _warn(kind: str, names: tuple[tuple[str, str | None], ...]) -> None:
    told = [f"{shown(name)}{'' if near is None else f' (did you mean {near}?)'}" for name, near in names[:_MAX_NAMES]]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    log.warning("unknown fields in a %s request were ignored: %s%s", kind, ", ".join(told), more)


def _unknown(
    raw: Mapping[str, Any], kind: type[msgspec.Struct], others: Collection[str] = (), at: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Fields that nobody knows, each with the known one that it is nearest to."""
    fields = _fields(kind)
    for name, value in raw.items():
        if name in fields:
            if isinstance(value, dict) and (inner := fields[name]) is not None:
                yield from _unknown(value, inner, at=f"{at}{name}.")
        elif name not in others:
            near = difflib.get_close_matches(name.lower()[:_MAX_SHOWN], [*fields, *others], n=1, cutoff=0.75)
            yield f"{at}{name}", f"{at}{near[0]}" if near else None


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Names of a request's fields, each with the kind of its value where that has named fields too."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    return {
        field.name: next((t.cls for t in getattr(field.type, "types", ()) if isinstance(t, StructType)), None)
        for field in info.fields
    }


def _value_at(raw: Any, path: str) -> Any:
    for name, place in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        raw = raw[int(place)] if place else raw[name]
    return raw

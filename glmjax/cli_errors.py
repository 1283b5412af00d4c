"""What ``glmjax`` says of a value that an option cannot have: the option, what would be right, the value."""

import enum
import re
from typing import Any, get_args, get_type_hints

from glmjax.vllm_names import DEGREES, ENGINE

_KINDS = {int: "a whole number", float: "a number"}


def usage_message(error: Any) -> str:
    """One line about an error of click's.

    Its own words depend on typer's version: newer ones leave the value out and speak of parsing.
    """
    if said := _other_name(error):
        return said
    said, value = str(error.format_message()), _value(error)
    param, command = getattr(error, "param", None), getattr(getattr(error, "ctx", None), "command", None)
    if value is None or param is None or command is None:
        return said
    hint = get_type_hints(command.callback)[param.name]
    rules = [rule for kind in (hint, *get_args(hint)) if (rule := _rule(kind))]
    name = param.opts[0] if param.param_type_name == "option" else param.name.upper()
    return f"{name} must be {rules[0]}, got {value!r}" if rules else said


def _other_name(error: Any) -> str | None:
    """What vLLM's name of an option is called here."""
    typed = str(getattr(error, "option_name", ""))
    vllm = typed.removeprefix("--").replace("-", "_")
    here = {**DEGREES, **ENGINE, "enable_prefix_caching": "prefix_caching"}.get(vllm)
    command = getattr(getattr(error, "ctx", None), "command", None)
    option = next((p.opts[0] for p in getattr(command, "params", ()) if p.name == here), None)
    return option and f"No such option: {typed} (did you mean {option}?)"


def _rule(kind: Any) -> str | None:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        choices = ", ".join(repr(member.value) for member in kind)
        return f"one of {choices}" if len(kind) > 1 else choices
    return _KINDS.get(kind)


def _value(error: Any) -> str | None:
    """What was typed, if the error is about that: pydantic's have it, and click's begin with it."""
    of_pydantic = getattr(error.__cause__, "errors", None)
    if of_pydantic is not None:
        return str(of_pydantic()[0]["input"])
    quoted = re.match(r"'(.*)' is not ", error.message)
    return quoted and quoted[1]

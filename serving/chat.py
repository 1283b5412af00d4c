"""Conversations to prompt text: checks what a client sent, then renders the model's chat template.

The checkpoint's own template is used where there is one, else ``glm_chat_template.jinja`` next to this
file.  Templates come from the outside, so they run sandboxed.  What a client sent is checked before,
so that a fault is answered with the name of the field and not with a template's stack.
"""

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from glmjax.errors import CheckpointError, RequestError
from glmjax.serving.clock import Clock

log = logging.getLogger(__name__)

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MEDIA = ("image", "video", "audio")  # the template has a reminder in their place: the model reads text only

_GLM_TEMPLATE = Path(__file__).with_name("glm_chat_template.jinja")


class ChatTemplate:
    """A compiled template.

    Args:
      source: Jinja text; None takes the GLM-5.3 template of this package.
      clock: answers a template that asks for the date.
    """

    def __init__(self, source: str | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self.source = source if source is not None else _GLM_TEMPLATE.read_text(encoding="utf-8")
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = self._strftime_now
        try:
            self._template = env.from_string(self.source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
          messages: as in OpenAI's API.
          tools: as in OpenAI's API.
          add_generation_prompt: open the assistant's turn; on unless the last message is continued.
          continue_final_message: leave the last message, the assistant's, open to be gone on with.
          variables: for the template, e.g. ``reasoning_effort`` and ``clear_thinking``; None is left out.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message cannot both be true",
                "continue_final_message",
            )
        if variables.get("enable_thinking") is False and "enable_thinking" not in self.source:
            log.warning("enable_thinking=False has no effect: this model always thinks")
        checked = check_messages(messages)
        given = {name: value for name, value in variables.items() if value is not None}
        given |= {
            "messages": checked,
            "tools": check_tools(tools) or None,
            "add_generation_prompt": (
                not continue_final_message if add_generation_prompt is None else add_generation_prompt
            ),
        }
        try:
            text = self._template.render(given)
        except Exception as error:  # a foreign template meets a client's data
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from None
        return _leave_open(text, checked[-1]) if continue_final_message else text

    def _strftime_now(self, form: str) -> str:
        return datetime.datetime.fromtimestamp(self._clock.time()).strftime(form)


def opens_reasoning(prompt: str) -> bool:
    """Whether what follows the prompt is reasoning: its last turn has ``<think>`` and not the end of it."""
    turn = prompt.rpartition("<|assistant|>")[2]
    return turn.rfind("<think>") > turn.rfind("</think>")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the form that templates expect, or an error that names the field."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list", "messages")
    return [_check_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools, each a function with a name, or an error that names the field."""
    checked = []
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{at} must be an object", at)
        if tool.get("type", "function") != "function":
            raise RequestError(f"{at}.type must be 'function', got {tool['type']!r}", f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{at}.function must be an object", f"{at}.function")
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            raise RequestError(f"{at}.function.name must be a non-empty string", f"{at}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(
                f"{at}.function.parameters must be a JSON schema object",
                f"{at}.function.parameters",
            )
        checked.append(dict(tool))
    return checked


def _check_message(message: Mapping[str, Any], at: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{at} must be an object", at)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{at}.role")
    checked = dict(message)
    checked["role"] = "system" if role == "developer" else role
    checked["content"] = _check_content(message.get("content"), f"{at}.content", role)
    if role == "assistant":
        if message.get("audio") is not None:
            raise RequestError(f"{at}.audio is not supported: the model reads text, no audio", f"{at}.audio")
        if checked.get("reasoning_content") is None and "reasoning" in message:
            checked["reasoning_content"] = message["reasoning"]
        thought = checked.get("reasoning_content")
        if thought is not None and not isinstance(thought, str):
            raise RequestError(f"{at}.reasoning_content must be a string", f"{at}.reasoning_content")
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise RequestError(f"{at}.tool_calls must be a list", f"{at}.tool_calls")
        checked["tool_calls"] = [_check_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls or ())]
        if not checked["tool_calls"]:
            del checked["tool_calls"]
    return checked


def _check_content(content: Any, at: str, role: str) -> Any:
    if isinstance(content, str) or (content is None and role in ("assistant", "tool")):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at} must be a string or a list of parts", at)
    for i, part in enumerate(content):
        where = f"{at}[{i}]"
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping):
            raise RequestError(f"{where} must be an object", where)
        kind = part.get("type")
        if kind in TEXT_PARTS:
            if not isinstance(part.get("text", part.get("refusal")), str):
                raise RequestError(f"{where}.text must be a string", f"{where}.text")
        elif not isinstance(kind, str) or not any(medium in kind for medium in MEDIA):
            raise RequestError(f"{where}.type must be 'text', got {kind!r}: the model reads text", f"{where}.type")
    return [_plain_part(part) for part in content]


def _plain_part(part: Any) -> Any:
    if isinstance(part, Mapping) and part["type"] in TEXT_PARTS:
        return {"type": "text", "text": part.get("text", part.get("refusal"))}
    return part


def _check_call(call: Any, at: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{at}.function must be an object", f"{at}.function")
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{at}.function.name must be a string", f"{at}.function.name")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{at}.function.arguments must be a JSON object", f"{at}.function.arguments")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _leave_open(text: str, last: Message) -> str:
    """Cut a rendered prompt after the words of its last message."""
    if last["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs a last message of the assistant",
            "continue_final_message",
        )
    content = last["content"]
    if isinstance(content, list):
        content = "".join(p if isinstance(p, str) else p.get("text", "") for p in content)
    whole = content or ""
    for words in (whole.strip(), whole.rpartition("</think>")[2].strip()):
        start = text.rfind(words)
        if words and start >= 0:
            return text[: start + len(words)]
    raise RequestError("continue_final_message needs text in the last message", "continue_final_message")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

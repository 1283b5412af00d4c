"""Reads GLM's output while it is written: reasoning, content and tool calls.

A ``Parser`` is fed text in pieces of any size and says what each piece adds to the message; the sum of
its answers does not depend on the cut.  Its text must still hold the tags, so a chat request is
detokenised with special tokens kept if the vocabulary flags a tag as special (``keeps_tags``), and the
parser takes the other special tokens out.

Grammar, where the prompt has opened ``<think>`` already::

    reasoning </think> content <tool_call> name (<arg_key> k </arg_key> <arg_value> v </arg_value>)* </tool_call>

Inside a value only ``</arg_value>`` is a tag.  A call of a function that the request does not offer is
not a call: it stays content, as written.
"""

import dataclasses
import enum
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from glmjax.serving import arguments
from glmjax.serving.tokenizer import Tokenizer

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TAGS = (THINK, THINK_END, CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)


@dataclasses.dataclass(frozen=True)
class CallDelta:
    """What is new of one tool call; the first delta of a call has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass
class MessageDelta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def extend(self, later: "MessageDelta") -> None:
        self.reasoning += later.reasoning
        self.content += later.content
        for call in later.calls:
            self.add_call(call)

    def add_call(self, delta: CallDelta) -> None:
        if self.calls and self.calls[-1].index == delta.index:
            last = self.calls[-1]
            joined = last.arguments + delta.arguments
            self.calls[-1] = dataclasses.replace(last, arguments=joined)
        else:
            self.calls.append(delta)


@dataclasses.dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass
class Message:
    """The sum of deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(ToolCall(call.id or "", call.name or ""))
            self.calls[call.index].arguments += call.arguments


def keeps_tags(tokenizer: Tokenizer) -> bool:
    """Whether tags outlive ``skip_special_tokens``: none of them is flagged special."""
    return not any(tag in tokenizer.special_tokens for tag in TAGS)


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    NAME = enum.auto()
    BETWEEN = enum.auto()  # in a call, before a key or the end
    IN_KEY = enum.auto()
    AFTER_KEY = enum.auto()
    IN_VALUE = enum.auto()


_CALL_TAGS: Mapping[_State, tuple[str, ...]] = {
    _State.NAME: (KEY, CALL_END),
    _State.BETWEEN: (KEY, CALL_END),
    _State.IN_KEY: (KEY, KEY_END, CALL_END),
    _State.AFTER_KEY: (KEY, VALUE, CALL_END),
    _State.IN_VALUE: (VALUE_END,),
}


class Parser:
    """Reads one completion.

    Args:
      reasoning: the output begins inside ``<think>``.
      tools: functions offered, as in OpenAI's API; without any, call tags are plain text.
      drop: tokens' texts to leave out wherever they stand.
      new_id: makes ids for calls.
    """

    def __init__(
        self,
        *,
        reasoning: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        drop: Iterable[str] = (),
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        functions = [tool["function"] for tool in tools]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._new_id = new_id
        outside = (THINK, THINK_END, CALL) if self._schemas else (THINK, THINK_END)
        dropped = tuple(drop)
        shared = _Tags(outside, dropped)
        values = tuple(token for token in dropped if token not in TAGS)
        inside = {state: _Tags(tags, values) for state, tags in _CALL_TAGS.items()}
        self._tags = {_State.REASONING: shared, _State.CONTENT: shared, **inside}
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._buffer = ""
        self._space = ""  # white space that opens a run of content, until we know what follows
        self._run_open = False
        self._piece = ""  # name, key or value so far
        self._name = ""
        self._key = ""
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self.num_calls = 0

    @property
    def in_call(self) -> bool:
        return self._state in _CALL_TAGS

    def feed(self, text: str) -> MessageDelta:
        """What these next characters add to the message."""
        self._buffer += text
        return self._scan(final=False)

    def finish(self, complete: bool = True) -> MessageDelta:
        """The end of the text.

        Args:
          complete: the model ended it; a call that lacks only its closing tag is then closed.
        """
        out = self._scan(final=True)
        if complete and self.in_call:
            if self._state is _State.NAME:
                self._open_call(out, "")
            if self.in_call and self._state is not _State.IN_VALUE:
                self._close_call(out)
        if not self.num_calls:
            out.content += self._space
        self._space = ""
        return out

    def finish_reason(self, reason: str) -> str:
        """``tool_calls`` if there are calls and none is cut short, else the engine's own reason."""
        called = self.num_calls and not self.in_call and reason in ("stop", "length")
        return "tool_calls" if called else reason

    def _scan(self, final: bool) -> MessageDelta:
        out = MessageDelta()
        while True:
            tags = self._tags[self._state]
            text, tag, self._buffer = tags.cut(self._buffer, final)
            if text:
                self._text(text, out)
            if tag is None:
                return out
            if tag in tags.grammar:
                self._tag(tag, out)

    def _text(self, text: str, out: MessageDelta) -> None:
        if self._state is _State.REASONING:
            out.reasoning += text
        elif self._state is _State.CONTENT:
            self._content(text, out)
        elif self._state is _State.IN_VALUE and self._types == arguments.STRING:
            self._emit(arguments.escape(text), out)
        elif self._state in (_State.NAME, _State.IN_KEY, _State.IN_VALUE):
            self._piece += text

    def _content(self, text: str, out: MessageDelta) -> None:
        if not self._run_open:
            text, self._space = self._space + text, ""
            if text.isspace():
                self._space = text
                return
            self._run_open = True
        out.content += text

    def _tag(self, tag: str, out: MessageDelta) -> None:
        if tag == THINK:
            self._state = _State.REASONING
        elif tag == THINK_END:
            self._state = _State.CONTENT
        elif tag == CALL:
            self._state, self._piece = _State.NAME, ""
        elif self._state is _State.NAME:
            self._open_call(out, tag)
        elif tag == CALL_END:
            self._close_call(out)
        elif tag == KEY:
            self._state, self._piece = _State.IN_KEY, ""
        elif tag == KEY_END:
            self._state, self._key = _State.AFTER_KEY, self._piece.strip()
        elif tag == VALUE:
            self._open_value(out)
        elif tag == VALUE_END:
            self._close_value(out)

    def _open_call(self, out: MessageDelta, tag: str) -> None:
        """The name is whole, and ``tag`` ended it."""
        name = self._piece.strip()
        if name not in self._schemas:
            self._state = _State.CONTENT
            self._content(CALL + self._piece + tag, out)
            return
        self._name, self._keys = name, set()
        self._run_open, self._space = False, ""
        out.add_call(CallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self._state, self._piece = _State.IN_KEY, ""
        if tag == CALL_END:
            self._close_call(out)

    def _close_call(self, out: MessageDelta) -> None:
        self._emit("}" if self._keys else "{}", out)
        self._state = _State.CONTENT

    def _open_value(self, out: MessageDelta) -> None:
        self._state, self._piece = _State.IN_VALUE, ""
        again = not self._key or self._key in self._keys
        self._types = frozenset() if again else arguments.types_of(self._schemas[self._name], self._key)
        if self._types == arguments.STRING:
            self._emit(self._lead() + '"', out)

    def _close_value(self, out: MessageDelta) -> None:
        self._state = _State.BETWEEN
        if self._types == arguments.STRING:
            self._emit('"', out)
        elif self._types:
            value = arguments.coerce(self._piece, self._types)
            self._emit(self._lead() + json.dumps(value, ensure_ascii=False), out)

    def _lead(self) -> str:
        lead = ", " if self._keys else "{"
        self._keys.add(self._key)
        return f"{lead}{json.dumps(self._key, ensure_ascii=False)}: "

    def _emit(self, text: str, out: MessageDelta) -> None:
        out.add_call(CallDelta(self.num_calls - 1, arguments=text))


class _Tags:
    """What to look for in one state: tags that mean something and tokens to drop.

    The leftmost wins, then the longest.
    """

    def __init__(self, grammar: Iterable[str], dropped: Iterable[str]) -> None:
        self.grammar = frozenset(grammar)
        ordered = sorted(self.grammar.union(dropped), key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(tag) for tag in ordered))
        self._longest = len(ordered[0])
        self._starts = frozenset(tag[:end] for tag in ordered for end in range(1, len(tag)))

    def cut(self, text: str, final: bool) -> tuple[str, str | None, str]:
        """Text that is surely before any tag, the tag after it if whole, and the rest to keep.

        With ``final`` no more text comes, so nothing is held back.
        """
        hold = len(text) if final else self._hold(text)
        found = self._pattern.search(text)
        if found and (final or found.start() < hold):
            return text[: found.start()], found[0], text[found.end() :]
        return text[:hold], None, text[hold:]

    def _hold(self, text: str) -> int:
        """Where an ending begins that more text could turn into a tag."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._starts:
                return start
        return len(text)

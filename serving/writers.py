"""Turns the engine's deltas into choices of OpenAI's answers, piece by piece or whole.

One writer serves one HTTP call: ``choice`` says what to send for a delta, ``add`` keeps it for an
answer in one piece.  A call with several prompts numbers its choices prompt by prompt, ``n`` each.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET

from glmjax.serving import replies
from glmjax.serving.parsers import Message, MessageDelta, Parser
from glmjax.serving.replies import ChatChoice, ChatMessage, CompletionChoice
from glmjax.serving.request import OutputDelta
from glmjax.serving.tokenizer import Tokenizer
from glmjax.types import SamplingParams

Choice = CompletionChoice | ChatChoice


class Writer(Protocol):
    """What the HTTP layer needs of both APIs."""

    prefix: str  # of the answer's id
    whole_object: str
    chunk_object: str

    def opening(self) -> Sequence[Choice]:
        """Pieces to send before anything is generated."""
        ...

    def choice(self, place: int, delta: OutputDelta) -> Choice | None:
        """The piece to send for a delta; None if it adds nothing that can be seen."""
        ...

    def add(self, place: int, delta: OutputDelta) -> None: ...

    def choices(self) -> list[Any]:
        """All that was added."""
        ...


class Tally:
    """Counts tokens for ``usage``."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._prompt = num_prompt_tokens
        self._output = 0
        self._cached: dict[int, int] = {}

    def add(self, place: int, delta: OutputDelta) -> None:
        self._output += len(delta.token_ids)
        self._cached[place] = max(self._cached.get(place, 0), delta.num_cached_tokens)

    def usage(self) -> replies.Usage:
        return replies.usage(self._prompt, self._output, sum(self._cached.values()))


class CompletionWriter:
    """``/v1/completions``.

    Args:
      prompts: texts to repeat before each completion; None without ``echo``.
      prompt_ids: ids to return with each choice; None if they were not asked for.
    """

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        num_prompts: int,
        prompts: Sequence[str | None] | None,
        prompt_ids: Sequence[list[int]] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._prompt_ids = prompt_ids
        self._whole = [CompletionChoice(index=i) for i in range(num_prompts * sampling.n)]
        self._offsets = [0] * len(self._whole)
        self._echo = prompts is not None
        for index, choice in enumerate(self._whole):
            if prompts is not None:
                choice.text = prompts[index // sampling.n] or ""
                self._offsets[index] = len(choice.text)
            if prompt_ids is not None:
                choice.prompt_token_ids = prompt_ids[index // sampling.n]
                choice.token_ids = []
            if sampling.logprobs is not None:
                choice.logprobs = replies.CompletionLogprobs()

    def opening(self) -> list[CompletionChoice]:
        if not self._echo and self._prompt_ids is None:
            return []
        return [CompletionChoice(index=c.index, text=c.text, prompt_token_ids=c.prompt_token_ids) for c in self._whole]

    def choice(self, place: int, delta: OutputDelta) -> CompletionChoice | None:
        index = place * self._sampling.n + delta.index
        choice = CompletionChoice(
            index=index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._prompt_ids is not None:
            choice.token_ids = list(delta.token_ids)
        if delta.logprobs is not None:
            choice.logprobs = replies.completion_logprobs(
                delta.token_ids,
                delta.logprobs,
                self._sampling.logprobs or 0,
                self._offsets[index],
                self._tokenizer,
            )
            self._offsets[index] += sum(map(len, choice.logprobs.tokens))
        seen = choice.text or choice.finish_reason or choice.logprobs or choice.token_ids
        return choice if seen and seen is not UNSET else None

    def add(self, place: int, delta: OutputDelta) -> None:
        piece = self.choice(place, delta)
        if piece is None:
            return
        whole = self._whole[piece.index]
        whole.text += piece.text
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        if isinstance(whole.token_ids, list) and isinstance(piece.token_ids, list):
            whole.token_ids += piece.token_ids
        if whole.logprobs is not None and piece.logprobs is not None:
            whole.logprobs.tokens += piece.logprobs.tokens
            whole.logprobs.token_logprobs += piece.logprobs.token_logprobs
            whole.logprobs.top_logprobs += piece.logprobs.top_logprobs
            whole.logprobs.text_offset += piece.logprobs.text_offset

    def choices(self) -> list[CompletionChoice]:
        return self._whole


class ChatWriter:
    """``/v1/chat/completions``.

    Args:
      parsers: one per completion.
      include_reasoning: send the reasoning along.
      parallel_calls: give every tool call; else the first only.
      return_ids: give token ids.
    """

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        parsers: Sequence[Parser],
        *,
        include_reasoning: bool = True,
        parallel_calls: bool = True,
        return_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._parsers = parsers
        self._include_reasoning = include_reasoning
        self._parallel_calls = parallel_calls
        self._return_ids = return_ids
        self._opened = [False] * len(parsers)
        self._messages = [Message() for _ in parsers]
        self._whole = [ChatChoice(index=i) for i in range(len(parsers))]

    def opening(self) -> list[ChatChoice]:
        return []  # the role comes with the first token, so that clients time that and not us

    def choice(self, place: int, delta: OutputDelta) -> ChatChoice | None:
        new = self._parse(delta)
        choice = self._bare(delta)
        first = not self._opened[delta.index]
        self._opened[delta.index] = True
        choice.delta = ChatMessage(role="assistant", content="") if first else ChatMessage()
        if new.reasoning:
            choice.delta.reasoning_content = new.reasoning
        if new.content:
            choice.delta.content = new.content
        if new.calls:
            choice.delta.tool_calls = [
                replies.ToolCall(
                    index=call.index,
                    id=UNSET if call.id is None else call.id,
                    type=UNSET if call.id is None else "function",
                    function=replies.Function(name=UNSET if call.name is None else call.name, arguments=call.arguments),
                )
                for call in new.calls
            ]
        seen = first or new or choice.finish_reason or choice.logprobs or self._return_ids
        return choice if seen else None

    def add(self, place: int, delta: OutputDelta) -> None:
        self._messages[delta.index].add(self._parse(delta))
        piece, whole = self._bare(delta), self._whole[delta.index]
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        if isinstance(piece.token_ids, list):
            before = whole.token_ids if isinstance(whole.token_ids, list) else []
            whole.token_ids = before + piece.token_ids
        if piece.logprobs is not None:
            whole.logprobs = whole.logprobs or replies.ChatLogprobs()
            whole.logprobs.content += piece.logprobs.content

    def choices(self) -> list[ChatChoice]:
        for choice, message in zip(self._whole, self._messages, strict=True):
            choice.message = _message(message)
        return self._whole

    def _parse(self, delta: OutputDelta) -> MessageDelta:
        parser = self._parsers[delta.index]
        new = parser.feed(delta.text)
        if delta.finish_reason is not None:
            own_end = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
            new.extend(parser.finish(complete=own_end))
        if not self._include_reasoning:
            new.reasoning = ""
        if not self._parallel_calls:
            new.calls = [call for call in new.calls if call.index == 0]
        return new

    def _bare(self, delta: OutputDelta) -> ChatChoice:
        """A choice without its words; to be called once the parser has seen the delta."""
        choice = ChatChoice(index=delta.index, stop_reason=delta.stop_reason)
        if delta.finish_reason is not None:
            choice.finish_reason = self._parsers[delta.index].finish_reason(delta.finish_reason)
        if self._return_ids:
            choice.token_ids = list(delta.token_ids)
        if delta.logprobs is not None:
            choice.logprobs = replies.chat_logprobs(
                delta.token_ids, delta.logprobs, self._sampling.logprobs or 0, self._tokenizer
            )
        return choice


def _message(message: Message) -> ChatMessage:
    empty = None if message.calls or message.reasoning else ""
    out = ChatMessage(role="assistant", content=message.content or empty)
    if message.reasoning:
        out.reasoning_content = message.reasoning
    if message.calls:
        out.tool_calls = [
            replies.ToolCall(
                id=call.id,
                type="function",
                function=replies.Function(name=call.name, arguments=call.arguments),
            )
            for call in message.calls
        ]
    return out

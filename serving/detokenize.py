"""Token ids to text, as they come.

``Detokenizer`` gives text as soon as it is final: a character whose bytes are not all there is held
back.  ``StopChecker`` finds stop strings wherever the text is cut into pieces and gives nothing that
might still belong to one.  ``TextStream`` joins the two for one completion.

Law: all pieces together are the text of the whole (``Tokenizer.decode``), cut at the stop string
that completes first.  The window over the last tokens is our own and not ``DecodeStream``, which has
no flush and says nothing while invalid bytes last.
"""

import dataclasses
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from glmjax.types import FinishReason, SamplingParams

REPLACEMENT = "\ufffd"
MAX_HELD = 3  # an unfinished character shows as one to three replacement characters


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that ``skip_special_tokens`` leaves out."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


class Detokenizer:
    """Text of a growing list of tokens.

    It decodes a short window: tokens whose text is out already, for context, then the new ones.
    """

    def __init__(self, tokenizer: Tokenizer, skip_ids: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._skip_ids = skip_ids
        self._window: list[int] = []
        self._num_context = 0  # leading tokens of the window that are context only
        self._num_given = 0  # leading characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became final."""
        if token_id in self._skip_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode()
        final = max(len(text.rstrip(REPLACEMENT)), len(text) - MAX_HELD)
        new = text[self._num_given : final]
        self._num_given = max(self._num_given, final)
        if new and final == len(text) and not text.endswith(REPLACEMENT):
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_given = len(self._decode())
        return new

    def flush(self) -> str:
        """Return what is held back; no more tokens will come."""
        text = self._decode()
        new, self._num_given = text[self._num_given :], len(text)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class StopChecker:
    """Passes text on up to the first stop string to complete.

    Attributes:
      matched: that stop string, once found; nothing is given after it.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include_stop
        self._overlap = max(map(len, self._stops), default=1) - 1
        self._tail = ""  # the last characters seen; not given yet, unless the stop may be shown

    def push(self, text: str, armed: bool = True) -> str:
        """Take a piece; return what may be shown.  Unarmed, stops that complete in it do not count."""
        if self.matched is not None:
            return ""
        seen = self._tail + text
        first_new = len(self._tail)
        given = first_new if self._include else 0
        if armed and (found := self._first(seen, first_new)) is not None:
            start, self.matched = found
            return seen[given : start + len(self.matched) if self._include else start]
        keep = max(0, len(seen) - self._overlap)
        self._tail = seen[keep:]
        return seen[given:] if self._include else seen[:keep]

    def flush(self) -> str:
        """Return what is held back; no more text will come."""
        held = "" if self._include or self.matched is not None else self._tail
        self._tail = ""
        return held

    def _first(self, text: str, first_new: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first after ``first_new``; longest if tied."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, first_new - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Text that some tokens made final; with ``stop``, only the first ``num_tokens`` of them count."""

    text: str
    num_tokens: int
    stop: str | None = None


class TextStream:
    """Text of one completion."""

    def __init__(self, tokenizer: Tokenizer, special: Collection[int], sampling: SamplingParams):
        self._detokenizer = Detokenizer(tokenizer, special if sampling.skip_special_tokens else ())
        self._stops = StopChecker(tuple(sampling.stop), sampling.include_stop_str_in_output)
        self._show_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> TextPiece:
        """Take new tokens.  With reason "stop" the last is a stop token, which has no text of its own.

        The token in which a stop string completes is the last that counts.
        """
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            last = finish_reason is not None and count == len(token_ids)
            silent = last and finish_reason == "stop" and not self._show_stop
            new = "" if silent else self._detokenizer.push(token_id)
            if last:
                new += self._detokenizer.flush()
            self._num_tokens += 1
            text += self._stops.push(new, armed=self._num_tokens > self._min_tokens)
            if self._stops.matched is not None:
                return TextPiece(text, count, self._stops.matched)
        if finish_reason is not None:
            text += self._stops.flush()
        return TextPiece(text, len(token_ids))

    def flush(self) -> str:
        """End without a further token (abort): return what is held back."""
        return self._stops.push(self._detokenizer.flush(), armed=False) + self._stops.flush()

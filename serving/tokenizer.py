"""Text to token ids and back, from a checkpoint's ``tokenizer.json``.

Owns the files of a checkpoint that speak of text: ``tokenizer.json``, ``tokenizer_config.json`` and
``chat_template.jinja``.  Which ids end a sequence is not decided here: that is in ``config.json`` and
``generation_config.json``.  A ``Tokenizer`` never changes, so any thread may use it.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from glmjax.errors import CheckpointError, RequestError


class Tokenizer:
    """A byte-level BPE vocabulary with the checkpoint's words about chat.

    Attributes:
      raw: the ``tokenizers`` object.
      config: what ``tokenizer_config.json`` says; empty if there is none.
      chat_template: the checkpoint's own Jinja template; None if it has none.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.raw = raw
        self.config: Mapping[str, Any] = dict(config or {})
        self.chat_template = chat_template
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=True)
        self.added: Mapping[str, int] = {
            token.content: token_id for token_id, token in raw.get_added_tokens_decoder().items()
        }
        self.special_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in raw.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(self.special_tokens.values())

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Read a checkpoint folder (or a ``tokenizer.json`` itself)."""
        path = Path(path)
        folder = path.parent if path.is_file() else path
        file = path if path.is_file() else folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"no tokenizer.json in {folder}: text needs the model's tokenizer")
        try:
            raw = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises a bare Exception
            raise CheckpointError(f"cannot read {file}: {error}") from None
        raw.no_padding()
        raw.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        return cls(raw, config, _read_template(folder, config))

    @classmethod
    def of_bytes(cls, added: Sequence[str] = (), special: Sequence[str] = ()) -> "Tokenizer":
        """One token per byte (id = byte), then ``added`` and ``special`` tokens: for demos and tests."""
        letters = dict(_byte_alphabet())
        raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
        raw.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
        raw.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
        return cls(raw)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised, none is added."""
        try:
            ids: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text has a lone surrogate, which is not a character") from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        text: str = self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text, e.g. ``<think>``."""
        found: int | None = self.raw.token_to_id(token)
        return found

    def token_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (byte-level alphabet); None outside the vocabulary."""
        piece: str | None = self.raw.id_to_token(token_id)
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for, whole characters or not."""
        piece = self.token_piece(token_id)
        if piece is None:
            return b""
        if self.added.get(piece) != token_id:
            alphabet = _byte_alphabet()
            if all(letter in alphabet for letter in piece):
                return bytes(alphabet[letter] for letter in piece)
        return piece.encode()

    def token_text(self, token_id: int) -> str:
        """A token by itself as text, for lists of log-probabilities."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that are not in the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < 2**31 or self.token_piece(token_id) is None:
                raise RequestError(f"{param}: token id {token_id} is not in the vocabulary", param)


@functools.cache
def _byte_alphabet() -> Mapping[str, int]:
    """The letters of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in letters)
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja`` first, then the key in ``tokenizer_config.json`` (text or named list)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None

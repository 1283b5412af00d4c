"""Text to ids and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.errors import CheckpointError, RequestError
from glmjax.serving.tokenizer import Tokenizer

TOKENIZER = Tokenizer.of_bytes(added=["<think>", "</think>"], special=["<|user|>"])


@given(st.text())
def test_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.binary())
def test_token_bytes_are_exact(data):
    assert b"".join(TOKENIZER.token_bytes(byte) for byte in data) == data


def test_added_tokens_are_one_token_each():
    ids = TOKENIZER.encode("a<think>b<|user|>")
    assert ids == [97, 256, 98, 258]
    assert TOKENIZER.decode(ids) == "a<think>b<|user|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert TOKENIZER.special_ids == {258}
    assert TOKENIZER.token_id("</think>") == 257
    assert TOKENIZER.token_id("nothing") is None
    assert TOKENIZER.token_bytes(256) == b"<think>"
    assert TOKENIZER.token_text(0xFF) == "\ufffd"
    assert TOKENIZER.vocab_size == 259


def test_lone_surrogate_is_a_request_error():
    with pytest.raises(RequestError, match="surrogate"):
        TOKENIZER.encode("\ud800")


def test_ids_outside_the_vocabulary_are_refused():
    TOKENIZER.check_ids([0, 258], "tokens")
    for bad in (-1, 259, 2**40):
        with pytest.raises(RequestError, match="not in the vocabulary") as caught:
            TOKENIZER.check_ids([bad], "tokens")
        assert caught.value.param == "tokens"


def test_from_dir(tmp_path):
    TOKENIZER.raw.save(str(tmp_path / "tokenizer.json"))
    plain = Tokenizer.from_dir(tmp_path)
    assert plain.encode("é<think>") == [0xC3, 0xA9, 256]
    assert plain.chat_template is None
    config = {"chat_template": [{"name": "default", "template": "T1"}], "eos_token": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_dir(tmp_path).chat_template == "T1"
    assert Tokenizer.from_dir(tmp_path).config["eos_token"] == "x"
    (tmp_path / "chat_template.jinja").write_text("T2")
    assert Tokenizer.from_dir(tmp_path).chat_template == "T2"


def test_missing_or_broken_files_are_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.from_dir(tmp_path)

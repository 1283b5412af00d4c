"""Streamed text against the text of the whole, however tokens cut it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from glmjax.serving.detokenize import Detokenizer, StopChecker, TextStream, special_ids
from glmjax.serving.tokenizer import Tokenizer as ByteTokenizer
from glmjax.types import SamplingParams


def byte_level() -> Tokenizer:
    """Byte tokens, some that hold two bytes (halves of characters too), an added and a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "abĠéâĤð" for b in "abĊ¬Ł" if a in letters and b in letters]
    tokens = letters + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


TOKENIZER = byte_level()
BYTES = ByteTokenizer.of_bytes().raw  # the id of a token is its byte
SPECIAL = special_ids(TOKENIZER)
END = TOKENIZER.token_to_id("<|end|>")
IDS = st.integers(0, TOKENIZER.get_vocab_size() - 1)
TEXTS = st.text(st.sampled_from("ab \n€é😀"), max_size=8).map(lambda s: TOKENIZER.encode(s).ids)
TOKENS = st.lists(TEXTS | st.lists(IDS, max_size=3), max_size=6).map(lambda parts: [t for p in parts for t in p])


def stream(tokens, **params):
    return TextStream(TOKENIZER, SPECIAL, SamplingParams(**params)), list(tokens)


def in_steps(tokens, cuts):
    """Cut a list as steps of a speculating engine would."""
    edges = sorted({0, len(tokens), *(c % (len(tokens) + 1) for c in cuts)})
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


def first_stop(text, stops):
    """End, start and stop string of the match that ends first, and of those the longest."""
    ends = [
        (end, end - len(s), s) for s in stops for end in range(len(s), len(text) + 1) if text[end - len(s) : end] == s
    ]
    return min(ends) if ends else None


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.booleans())
def test_pieces_make_the_whole(tokens, skip):
    detokenizer = Detokenizer(TOKENIZER, SPECIAL if skip else ())
    pieces = [detokenizer.push(t) for t in tokens]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=skip)
    assert detokenizer.flush() == ""


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=12))
def test_a_character_comes_whole_and_at_once(text):
    detokenizer = Detokenizer(BYTES)
    shown, sent = "", b""
    for byte in text.encode():
        sent += bytes([byte])
        shown += detokenizer.push(byte)
        whole = sent.decode(errors="ignore")
        assert shown == whole or shown == whole.rstrip("\ufffd")
    assert shown + detokenizer.flush() == text


def test_long_invalid_runs_are_not_held_for_ever():
    detokenizer = Detokenizer(BYTES)
    assert "".join(detokenizer.push(0xFF) for _ in range(10)) == "\ufffd" * 7
    assert detokenizer.flush() == "\ufffd" * 3


def test_unknown_ids_have_no_text():
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(TOKENIZER.get_vocab_size() + 5) == ""
    assert detokenizer.push(TOKENIZER.token_to_id("a")) == "a"


def test_special_and_added_tokens():
    tokens = [TOKENIZER.token_to_id("<think>"), *TOKENIZER.encode("é").ids, END]
    for skip, expected in ((True, "<think>é"), (False, "<think>é<|end|>")):
        text, ids = stream(tokens, skip_special_tokens=skip)
        assert text.push(ids, "length").text == expected


STOPS = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(st.sampled_from("abc"), max_size=5), max_size=8), STOPS, st.booleans())
def test_stop_checker_finds_what_a_search_in_the_whole_finds(pieces, stops, include):
    checker = StopChecker(stops, include)
    whole = "".join(pieces)
    found = first_stop(whole, stops)
    longest = max(map(len, stops), default=1)
    shown, seen = "", ""
    for piece in pieces:
        shown += checker.push(piece)
        seen += piece
        if checker.matched is None and not include:
            assert len(shown) == max(0, len(seen) - longest + 1)
    shown += checker.flush()
    assert checker.matched == (found[2] if found else None)
    assert shown == (whole[: found[0] if include else found[1]] if found else whole)
    assert checker.push("more") == "" or not found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "é", "€", "\n", "ab", "ba"]), max_size=8).map("".join),
    st.lists(st.text(st.sampled_from("ab€\n"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_nothing_past_the_stop_survives(text, stops, include, min_tokens, cuts):
    tokens = TOKENIZER.encode(text).ids
    texts = [TOKENIZER.decode(tokens[: n + 1]).rstrip("\ufffd") for n in range(len(tokens))]
    expected, kept, stop = text, len(tokens), None
    for count, so_far in enumerate(texts, 1):  # the first token after min_tokens that completes a stop
        before = len(texts[count - 2]) if count > 1 else 0
        matches = [
            (end, end - len(s), s)
            for s in stops
            for end in range(before + 1, len(so_far) + 1)
            if count > min_tokens and so_far[:end].endswith(s)
        ]
        if matches:
            end, start, stop = min(matches)
            expected, kept = so_far[: end if include else start], count
            break
    pipe, _ = stream([], stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99)
    shown, taken = "", 0
    steps = in_steps(tokens, cuts)
    for n, ids in enumerate(steps):
        piece = pipe.push(ids, "length" if n == len(steps) - 1 else None)
        shown, taken = shown + piece.text, taken + piece.num_tokens
        if piece.stop is not None:
            assert piece.stop == stop
            break
    assert (shown, taken) == (expected, kept)


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "a<|end|>")])
def test_a_stop_token_has_no_text_unless_wanted(include, expected):
    tokens = [TOKENIZER.token_to_id("a"), END]
    pipe, ids = stream(tokens, skip_special_tokens=False, include_stop_str_in_output=include)
    assert pipe.push(ids, "stop").text == expected


def test_several_tokens_at_once_stop_at_the_earliest_to_complete():
    pipe, ids = stream(TOKENIZER.encode("xaxbxc").ids, stop=["axbx", "xb", "c"])
    piece = pipe.push(ids)
    assert (piece.text, piece.num_tokens, piece.stop) == ("xa", 4, "xb")


def test_flush_gives_what_is_held_back():
    pipe, ids = stream(TOKENIZER.encode("ab").ids, stop=["bcd"])
    assert pipe.push(ids).text == ""
    assert pipe.flush() == "ab"

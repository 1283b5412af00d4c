"""Fields of requests that are not as they should be: errors and warnings in words of the API."""

import json
import logging
import re

import msgspec.inspect
import pytest

from glmjax.errors import RequestError
from glmjax.serving import bad_fields, protocol

NEEDED = {
    protocol.CompletionRequest: {"prompt": "a"},
    protocol.ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    protocol.TokenizeRequest: {"prompt": "a"},
    protocol.DetokenizeRequest: {"tokens": [1]},
}
# JSON type -> what the error says that a value must be, and a value that is none.
RULES = {
    "IntType": ("a whole number", "many"),
    "FloatType": ("a number", "warm"),
    "BoolType": ("true or false", "yes"),
    "StrType": ("a string", 7),
    "ListType": ("a list", 7),
    "DictType": ("an object", "x"),
    "StructType": ("an object", "x"),
}
WORDS_OF_MSGSPEC = re.compile(r"[`$]|Expected|\bgot [a-z]*(int|str|float|bool|array)\b")


def typed_fields(kind, at=""):
    """Every field that has a type, those inside others too: its name and the rules that a value must keep one of."""
    for field in msgspec.inspect.type_info(kind).fields:
        types = getattr(field.type, "types", [field.type])
        names = [type(t).__name__ for t in types if type(t).__name__ in RULES]
        if names:
            yield f"{at}{field.name}", names
        for t in types:
            if isinstance(t, msgspec.inspect.StructType):
                yield from typed_fields(t.cls, f"{at}{field.name}.")


def request(kind, field, value):
    outer, _, inner = field.partition(".")
    return NEEDED[kind] | {outer: {inner: value} if inner else value}


def decode(kind, body):
    return protocol.decode(json.dumps(body).encode(), kind, check=protocol.refuse_unsupported)


def refusal(kind, body):
    with pytest.raises(RequestError) as caught:
        decode(kind, body)
    assert not WORDS_OF_MSGSPEC.search(str(caught.value))
    return str(caught.value), caught.value.param


@pytest.fixture
def said(caplog):
    """What is logged about a request with these fields."""
    bad_fields._warn.cache_clear()
    caplog.set_level(logging.INFO, logger="glmjax")

    def send(kind, **given):
        caplog.clear()
        decode(kind, NEEDED[kind] | given)
        return caplog.messages

    return send


# Values of a wrong type.


@pytest.mark.parametrize(
    ("kind", "field", "names"),
    [(kind, *found) for kind in NEEDED for found in typed_fields(kind)],
    ids=lambda value: value.__name__ if isinstance(value, type) else value if isinstance(value, str) else "",
)
def test_a_value_of_a_wrong_type_is_told_with_the_field_and_what_would_be_right(kind, field, names):
    rules = [RULES[name][0] for name in names]
    wrong = 7 if "StrType" in names else RULES[names[0]][1]
    must = f"{field} must be {' or '.join(rules)}, got {json.dumps(wrong)}"
    assert refusal(kind, request(kind, field, wrong)) == (must, field)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", ["a", 3], "stop[1] must be a string, got 3"),
        ("stop_token_ids", [1, None], "stop_token_ids[1] must be a whole number, got null"),
        ("max_tokens", [1], "max_tokens must be a whole number, got a list"),
        ("max_tokens", {"a": 1}, "max_tokens must be a whole number, got an object"),
        ("max_tokens", True, "max_tokens must be a whole number, got true"),
        ("max_tokens", 1.5, "max_tokens must be a whole number, got 1.5"),
        ("max_tokens", "é" * 1000, f'max_tokens must be a whole number, got "{"é" * 60}"...'),
    ],
)
def test_the_value_is_told_as_json_and_in_short(field, value, message):
    body = NEEDED[protocol.CompletionRequest] | {field: value}
    assert refusal(protocol.CompletionRequest, body) == (message, message.split()[0])


@pytest.mark.parametrize(
    ("kind", "field"), [(protocol.CompletionRequest, "prompt"), (protocol.DetokenizeRequest, "tokens")]
)
def test_a_field_that_is_missing_is_named(kind, field):
    assert refusal(kind, {}) == (f"{field} is missing", field)


@pytest.mark.parametrize(
    "body", [b"{nope", b"", b'{"a": NaN}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1e999}', b"\xff"]
)
def test_a_body_that_is_no_json_is_told_so(body):
    with pytest.raises(RequestError, match=r"^the body is not valid JSON: [a-z'-]+ ") as caught:
        protocol.decode(body, protocol.CompletionRequest)
    assert not WORDS_OF_MSGSPEC.search(str(caught.value))


# Names that nobody knows.


@pytest.mark.parametrize("kind", [protocol.CompletionRequest, protocol.ChatRequest])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("topP", "top_p"),
        ("max_new_tokens", "max_tokens"),
        ("presence_penality", "presence_penalty"),
    ],
)
def test_a_misspelt_field_is_named_with_the_nearest_one(said, kind, typed, meant):
    name = "chat" if kind is protocol.ChatRequest else "completion"
    told = f'unknown fields in a {name} request were ignored: "{typed}" (did you mean {meant}?)'
    assert said(kind, **{typed: 1}) == [told]


def test_a_misspelt_field_inside_another_is_named(said):
    (told,) = said(protocol.CompletionRequest, stream=True, stream_options={"include_usages": True})
    assert told.endswith('"stream_options.include_usages" (did you mean stream_options.include_usage?)')


def test_a_field_like_no_other_is_named_alone(said):
    (told,) = said(protocol.ChatRequest, vendor_extension={"a": 1}, zzz=0)
    assert told.endswith('ignored: "vendor_extension", "zzz"')


def test_the_same_names_are_told_once(said):
    def count(**given):
        return len(said(protocol.CompletionRequest, **given))

    assert [count(max_token=1), count(max_token=2), count(max_token=3, foo=1), count(foo=2, max_token=4)] == [
        1,
        0,
        1,
        0,
    ]
    assert len(said(protocol.ChatRequest, max_token=1)) == 1  # which is another request


def test_known_fields_are_not_told_whether_they_have_an_effect_or_not(said):
    neutral = {name: values[0] for name, (values, _) in protocol._REFUSED.items() if values}
    known = {name: None for name, _ in typed_fields(protocol.ChatRequest) if "." not in name and name != "messages"}
    assert said(protocol.ChatRequest, **known, **neutral, **dict.fromkeys(bad_fields.WITHOUT_EFFECT, "x")) == []
    assert said(protocol.CompletionRequest, **neutral, user="u", response_format={"type": "text"}) == []


def test_many_and_long_names_make_a_short_line(said):
    (told,) = said(protocol.CompletionRequest, **{f"{'x' * 1000}\n{i}": 1 for i in range(100)})
    assert len(told) < 1000 and "\n" not in told and told.endswith(" and 90 more")

"""Reading GLM's output, whole and in pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmjax.serving import arguments
from glmjax.serving.parsers import TAGS, Message, Parser, keeps_tags
from glmjax.serving.tokenizer import Tokenizer

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "n": {"type": "integer"},
            "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "list": {"type": "array"},
        },
    },
}
TOOLS = [{"type": "function", "function": f} for f in (WEATHER, {"name": "now"})]


def parse(text, cuts=(), complete=True, **options):
    ids = itertools.count()
    parser = Parser(**{"tools": TOOLS, "new_id": lambda: f"c{next(ids)}", **options})
    message = Message()
    edges = sorted({0, *(min(c, len(text)) for c in cuts), len(text)})
    for start, end in itertools.pairwise(edges):
        message.add(parser.feed(text[start:end]))
    message.add(parser.finish(complete))
    return message, parser


def arg(key, value):
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def calls_of(message):
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


def test_reasoning_then_content():
    message, parser = parse("why\n</think>\nbecause <b>\n")
    assert (message.reasoning, message.content) == ("why\n", "\nbecause <b>\n")
    assert parser.finish_reason("stop") == "stop"


def test_reasoning_that_never_ends():
    message, _ = parse("why </thin")
    assert (message.reasoning, message.content) == ("why </thin", "")


def test_needless_tags_are_swallowed():
    message, _ = parse("<think>a<think>b</think>c</think>d")
    assert (message.reasoning, message.content) == ("ab", "cd")


def test_without_an_open_think_output_is_content():
    message, _ = parse("hello", reasoning=False)
    assert (message.reasoning, message.content) == ("", "hello")
    message, _ = parse("<think>a</think>b", reasoning=False)
    assert (message.reasoning, message.content) == ("a", "b")


def test_a_call_ends_reasoning():
    text = f"hm<tool_call>get_weather\n{arg('city', ' Paris ')}\n{arg(' n ', '3')}\n</tool_call>"
    message, parser = parse(text)
    assert (message.reasoning, message.content) == ("hm", "")
    assert calls_of(message) == [("get_weather", {"city": " Paris ", "n": 3})]
    assert message.calls[0].arguments == '{"city": " Paris ", "n": 3}'
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("abort") == "abort"


def test_several_calls_and_the_white_space_around_them():
    text = (
        "</think>\n<tool_call>now</tool_call>\n<tool_call> now </tool_call>\n"
        f"<tool_call>get_weather{arg('maybe', 'null')}</tool_call>\n"
    )
    message, _ = parse(text)
    assert message.content == ""
    assert calls_of(message) == [("now", {}), ("now", {}), ("get_weather", {"maybe": None})]
    assert [call.id for call in message.calls] == ["c0", "c1", "c2"]


def test_content_before_and_after_a_call_is_kept():
    message, _ = parse("</think>I look <tool_call>now</tool_call> done")
    assert message.content == "I look  done"


def test_tags_inside_a_value_are_text():
    value = 'a "q" \\ \n<tool_call></think><arg_key></arg_valu é'
    message, _ = parse(f"<tool_call>get_weather{arg('city', value)}</tool_call>")
    assert calls_of(message) == [("get_weather", {"city": value})]


def test_an_unknown_function_is_content_as_written():
    text = f"<tool_call>rm{arg('x', '1')}</tool_call>"
    message, parser = parse(f"</think>ok {text}")
    assert (message.content, message.calls) == (f"ok {text}", [])
    assert parser.finish_reason("stop") == "stop"


def test_without_tools_call_tags_are_text():
    message, _ = parse("</think><tool_call>now</tool_call>", tools=[])
    assert (message.content, message.calls) == ("<tool_call>now</tool_call>", [])


def test_text_arguments_stream_and_others_come_whole():
    parser = Parser(tools=TOOLS)
    (opening,) = parser.feed("<tool_call>get_weather<arg_key>").calls
    assert (opening.index, opening.name, opening.arguments) == (0, "get_weather", "")
    assert opening.id
    (start,) = parser.feed("city</arg_key><arg_value>New").calls
    assert (start.id, start.name, start.arguments) == (None, None, '{"city": "New')
    assert not parser.feed("</arg_val")
    (more,) = parser.feed("x").calls
    assert more.arguments == "</arg_valx"
    (end,) = parser.feed("</arg_value><arg_key>n</arg_key><arg_value>1").calls
    assert end.arguments == '"'
    assert not parser.feed("2")
    (last,) = parser.feed("</arg_value></tool_call>").calls
    assert last.arguments == ', "n": 12}'


def test_a_call_without_its_closing_tag():
    text = f"<tool_call>get_weather{arg('n', '1')}"
    message, parser = parse(text)
    assert calls_of(message) == [("get_weather", {"n": 1})]
    assert parser.finish_reason("stop") == "tool_calls"
    message, _ = parse("<tool_call>now")
    assert calls_of(message) == [("now", {})]


def test_a_call_that_is_cut_short_stays_open():
    for text in (f"<tool_call>get_weather{arg('n', '1')}", "<tool_call>now<arg_key>a</arg"):
        message, parser = parse(text, complete=False)
        assert len(message.calls) == 1
        assert not message.calls[0].arguments.endswith("}")
        assert parser.finish_reason("length") == "length"
    message, parser = parse("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par")
    assert message.calls[0].arguments == '{"city": "Par'


def test_keys_that_come_twice_or_have_no_value():
    text = f"{arg('n', '1')}{arg('n', '2')}{arg('', 'x')}<arg_key>city</arg_key>"
    message, _ = parse(f"<tool_call>get_weather{text}</tool_call>")
    assert calls_of(message) == [("get_weather", {"n": 1})]


def test_special_tokens_are_dropped_but_tags_do_their_work():
    special = Tokenizer.of_bytes(special=[*TAGS, "<|user|>"])
    assert not keeps_tags(special)
    assert keeps_tags(Tokenizer.of_bytes(added=TAGS, special=["<|user|>"]))
    text = f"a<|user|></think>b<|user|><tool_call>get_weather{arg('city', 'x<|user|>y')}</tool_call>"
    message, _ = parse(text, drop=special.special_tokens)
    assert (message.reasoning, message.content) == ("a", "b")
    assert calls_of(message) == [("get_weather", {"city": "xy"})]
    message, _ = parse("</think><tool_call>now</tool_call>", tools=[], drop=special.special_tokens)
    assert message.content == "now"


PIECES = st.one_of(
    st.sampled_from([*TAGS, "get_weather", "now", "city", "n", "maybe", "12", " ", "\n", "</", "<tool", "<|u|>"]),
    st.text(max_size=4),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=24).map("".join),
    st.sets(st.integers(0, 120)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_cut_does_not_matter(text, cuts, reasoning, complete, tools):
    options = {"reasoning": reasoning, "complete": complete, "drop": ["<|u|>", "<|u|>>"]}
    if not tools:
        options["tools"] = []
    whole, one = parse(text, **options)
    pieces, two = parse(text, cuts, **options)
    assert pieces == whole
    assert one.finish_reason("stop") == two.finish_reason("stop")
    letters, _ = parse(text, range(len(text)), **options)
    assert letters == whole
    for name in ("<|u|>", "</think>", "<think>"):
        assert name not in whole.reasoning
    for call in whole.calls if not one.in_call else ():
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    "types, text, value",
    [
        ({"null", "string"}, "null", None),
        ({"string"}, "null", "null"),
        ({"integer", "string"}, " -12 ", -12),
        ({"integer"}, "1.5", "1.5"),
        ({"integer", "number"}, "1.5", 1.5),
        ({"number"}, "3", 3),
        ({"number"}, "1e3", 1000.0),
        ({"number"}, "1_0", "1_0"),
        ({"number"}, "1e999", "1e999"),
        ({"number"}, "nan", "nan"),
        ({"boolean"}, "True", True),
        ({"boolean"}, "0", False),
        ({"boolean", "integer"}, "1", 1),
        ({"boolean"}, "yes", "yes"),
        ({"object"}, '{"a": [1]}', {"a": [1]}),
        ({"object"}, "[1]", "[1]"),
        ({"array", "object"}, "[1]", [1]),
        ({"array"}, "[NaN]", "[NaN]"),
        ({"array"}, "[" * 100_000, "[" * 100_000),
        ({"integer"}, "9" * 5000, "9" * 5000),
    ],
)
def test_coercion(types, text, value):
    found = arguments.coerce(text, frozenset(types))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "schema, types",
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
        ({"const": True}, {"boolean"}),
        ({"oneOf": [{"type": "object"}, {"anyOf": [{"type": "array"}]}]}, {"object", "array"}),
        ({"$ref": "#/$defs/P"}, {"object"}),
        ({"$ref": "#/$defs/loop"}, {"number"}),
        ({"$ref": "http://elsewhere"}, {"string"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"type": "date"}, {"string"}),
        ({}, {"string"}),
        (True, {"string"}),
    ],
)
def test_types_of_a_parameter(schema, types):
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}, {"type": "number"}]}
    root = {"properties": {"x": schema}, "$defs": {"P": {"type": "object"}, "loop": loop}}
    assert arguments.types_of(root, "x") == types
    assert arguments.types_of(root, "unknown") == arguments.STRING

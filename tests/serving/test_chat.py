"""Conversations to prompts."""

import json
from pathlib import Path

import pytest

from glmjax.errors import CheckpointError, RequestError
from glmjax.serving.chat import TEXT_PARTS, ChatTemplate, check_messages, opens_reasoning
from glmjax.serving.clock import ManualClock

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "chat_golden_glm53.json").read_text(encoding="utf-8"))
GLM = ChatTemplate()
HEAD = "[gMASK]<sop><|system|>Reasoning Effort: Max"


def user(content):
    return {"role": "user", "content": content}


def call(arguments, name="f", call_id="a"):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@pytest.mark.parametrize("case", GOLDEN)
def test_glm_template_renders_the_golden_cases(case):
    given = {"add_generation_prompt": False, **GOLDEN[case]["input"]}
    assert GLM.render(**given) == GOLDEN[case]["rendered"]


def test_arguments_as_text_render_as_the_object():
    shape = [user("q"), {"role": "assistant", "tool_calls": [call('{"x": [1, "é"], "s": "<b>"}')]}]
    want = (
        '<tool_call>f<arg_key>x</arg_key><arg_value>[1, "é"]</arg_value>'
        "<arg_key>s</arg_key><arg_value><b></arg_value></tool_call>"
    )
    assert want in GLM.render(shape)


@pytest.mark.parametrize(
    "results, order",
    [
        (["b", "a"], "AB"),  # all ids known: the order of the calls
        (["b", "b"], "BB"),  # not unique
        (["b", "zz"], "B?"),  # unknown
        (["b", None], "B?"),  # missing
        (["b"], "B"),
    ],
)
def test_order_of_tool_results(results, order):
    texts = {"a": "A", "b": "B"}
    messages = [
        user("q"),
        {"role": "assistant", "tool_calls": [call({}, call_id="a"), call({}, call_id="b")]},
        *({"role": "tool", "content": texts.get(i, "?"), **({"tool_call_id": i} if i else {})} for i in results),
        user("go on"),
    ]
    want = "".join(f"<tool_response>{text}</tool_response>" for text in order)
    assert f"<|observation|>{want}<|user|>go on" in GLM.render(messages)


def test_words_of_a_user_are_left_alone():
    assert GLM.render([user("\n a <b> {{x}} \n")]) == (f"{HEAD}<|user|>\n a <b> {{{{x}}}} \n<|assistant|><think>")


def test_developer_and_late_system_messages():
    messages = [{"role": "developer", "content": "D"}, user("u"), {"role": "system", "content": "S"}]
    assert GLM.render(messages, add_generation_prompt=False) == (f"{HEAD}<|system|>D<|user|>u<|system|>S")


def test_clear_thinking_keeps_the_turns_after_the_last_user():
    messages = [
        {"role": "assistant", "content": "a", "reasoning": "r0"},
        user("q"),
        {"role": "assistant", "reasoning_content": "r1", "tool_calls": [call({})]},
        {"role": "tool", "content": "R"},
    ]
    text = GLM.render(messages, clear_thinking=True)
    assert "r0" not in text and "<think>r1</think>" in text
    assert "<think>r0</think>a" in GLM.render(messages)


def test_continue_final_message():
    messages = [user("q"), {"role": "assistant", "content": "The answer is"}]
    text = GLM.render(messages, continue_final_message=True)
    assert text == f"{HEAD}<|user|>q<|assistant|><think></think>The answer is"
    with pytest.raises(RequestError, match="cannot both be true"):
        GLM.render(messages, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="of the assistant"):
        GLM.render([user("q")], continue_final_message=True)


def test_whether_the_prompt_opens_reasoning():
    assert opens_reasoning(GLM.render([user("</think>")]))
    continued = [user("<think>"), {"role": "assistant", "content": "so"}]
    assert not opens_reasoning(GLM.render(continued, continue_final_message=True))
    assert not opens_reasoning("<|user|><think><|assistant|></think>")


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(7)], "messages[0].content"),
        ([user([{"text": "x"}])], "messages[0].content[0].type"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user("x"), {"role": "assistant", "reasoning_content": 1}], "messages[1].reasoning_content"),
        ([user("x"), {"role": "assistant", "audio": {"id": "a"}}], "messages[1].audio"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        *(
            (
                [{"role": "assistant", "tool_calls": [call(bad)]}],
                "messages[0].tool_calls[0].function.arguments",
            )
            for bad in ("{", "[1]", "3", 3, [1])
        ),
    ],
)
def test_bad_messages_are_refused_by_name(messages, param):
    with pytest.raises(RequestError) as caught:
        GLM.render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize("template", [GLM, ChatTemplate("{{ messages[1].content[1].type }}")], ids=["ours", "own"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("kind", ["file", "input_file", "document", "embeds", None, 3])
def test_a_part_that_nobody_knows_is_refused_by_its_type_whatever_the_template_and_the_role(template, role, kind):
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "https://x/y.png"}}]
    with pytest.raises(RequestError) as caught:
        template.render([user("x"), {"role": role, "content": parts}])
    assert caught.value.param == "messages[1].content[1].type"
    assert f"must be 'text', got {kind!r}" in str(caught.value)


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_text_parts_of_any_name_are_text(kind):
    parts = [{"type": kind, "refusal" if kind == "refusal" else "text": "one"}, " two"]
    assert GLM.render([user(parts)]) == f"{HEAD}<|user|>one two<|assistant|><think>"


@pytest.mark.parametrize(
    "tool, param",
    [
        ("f", "tools[0]"),
        ({"type": "retrieval"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"function": {"name": "f", "parameters": 3}}, "tools[0].function.parameters"),
    ],
)
def test_bad_tools_are_refused_by_name(tool, param):
    with pytest.raises(RequestError) as caught:
        GLM.render([user("x")], [tool])
    assert caught.value.param == param


def test_empty_arguments_are_no_arguments():
    for empty in ("", None, {}):
        (message,) = check_messages([{"role": "assistant", "tool_calls": [call(empty)]}])
        assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_checkpoints_own_template():
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\n"
        "{{ m.content }}{% endfor %}|{{ strftime_now('%Y') }}|{{ tools | tojson(indent=1) }}|{{ x }}"
    )
    own = ChatTemplate(source, ManualClock(86400.0 * 400))
    assert own.render([user("A"), user("B")], x="é<") == "A|1971|null|é<"


def test_templates_cannot_do_harm_and_their_refusal_is_the_clients_fault():
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% if %}")
    with pytest.raises(RequestError, match="no such thing"):
        ChatTemplate("{{ raise_exception('no such thing') }}").render([user("x")])
    for attack in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(RequestError, match="cannot render"):
            ChatTemplate(attack).render([user("x")])

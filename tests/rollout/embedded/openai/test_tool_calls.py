"""Tool calls in the forms of the supported families are found whole, or left as text.

The examples are of the models' own documentation, as SGLang 0.5.23's parsers quote them (srt/function_call). Not
covered: whether a model calls a tool when it should.
"""

from __future__ import annotations

import json

import pytest

from rollout.chat.tool_forms import FORMS, form_of
from rollout.embedded.openai.replies import Replies
from rollout.embedded.openai.sample_text import Piece
from tests.rollout.embedded.openai.test_text_laws import byte_level


def tool(name: str, **properties: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("get_weather", city="string", date="string"), tool("add", a="integer", b="array")]
WEATHER, ADD = {"city": "北京", "date": "2024-06-27"}, {"a": -3, "b": [1, "</x>"]}
W, A = json.dumps(WEATHER, ensure_ascii=False), json.dumps(ADD)
# form -> a part of its template, and the text of both calls
TEXTS = {
    "hermes": (
        r"""{{- "\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}""",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {A}}}\n</tool_call>',
    ),
    "glm45": (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京</arg_value>\n<arg_key>date</arg_key>\n"
        "<arg_value>2024-06-27</arg_value>\n</tool_call>\n"
        '<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>-3</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[1, "</x>"]'
        "</arg_value>\n</tool_call>",
    ),
    "deepseek_v3": (
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json' + '\\n'",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{W}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{A}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{A}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>{{ tool_call['id'] }}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{W}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{A}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_calls_of_each_form_are_read_whole(name: str) -> None:
    template, text = TEXTS[name]
    form = form_of(template)
    assert form is not None and form.name == name and text.startswith(form.begin)
    calls = form.parse(text, TOOLS)
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("get_weather", WEATHER), ("add", ADD)]
    for cut in range(len(form.begin), len(text) - 30, 7):  # ended by max_tokens
        assert len(form.parse(text[:cut], TOOLS)) < 2
    odd = [tool("get_weather"), {"type": "function", "function": {"name": "add", "parameters": {"properties": 5}}}]
    assert [c.name for c in form.parse(text, odd)] == ["get_weather", "add"]
    assert form.parse(text, TOOLS[:1]) == []  # a tool that was not offered
    assert form.parse(text + " and more", TOOLS) == []


def test_forms_are_those_that_are_tested() -> None:
    assert {f.name for f in FORMS} == TEXTS.keys()
    assert form_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    of_coder = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"  # Qwen3-Coder's
    assert form_of(of_coder + "{% for k, v in tool_call.arguments.items() %}") is None


def test_a_reply_has_the_calls_apart_from_its_text_or_all_as_text() -> None:
    template, text = TEXTS["hermes"]
    replies = Replies(chat=True, model="m", vocabulary=byte_level(), tools=TOOLS, form=form_of(template))
    (choice,) = replies.whole([[Piece("Let me see. "), Piece(calls=text, finish="stop")]], {})["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see. "
    assert [json.loads(c["function"]["arguments"]) for c in choice["message"]["tool_calls"]] == [WEATHER, ADD]
    chunk = replies.chunk(0, Piece(calls=text, finish="stop"))
    assert chunk is not None
    delta = chunk["choices"][0]["delta"]
    assert [c["index"] for c in delta["tool_calls"]] == [0, 1] and "content" not in delta
    broken = text.replace("}\n</tool_call>", "\n</tool_call>")
    (choice,) = replies.whole([[Piece("So: ", calls=broken, finish="stop")]], {})["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"] == {"role": "assistant", "content": "So: " + broken}

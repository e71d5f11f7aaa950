"""Chats of several templates: what follows a turn, what is in it, and that sampled ids stay as they are.

The renderers library, written by others, and the reading of dummy messages are held to each other where both know the
template. Not covered: templates of published models in full, which need their tokenizers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat.choose import make_chat
from rollout.chat.turns import Chat
from tests.support.chat_templates import end_ids, ends, tokenizer
from tests.support.refusals import refuses

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
USER = {"role": "user", "content": "What is 2+3?"}
RESULTS = [{"role": "tool", "content": "5", "name": "add"}, {"role": "tool", "content": "no\nsuch", "name": "add"}]
NAMES = ("chatml", "qwen3", "deepseek", "glm", "llama")
# a call as each template writes it, with spaces that it does not write
CALLS = {
    "qwen3": '<tool_call>\n{"name":  "add", "arguments": {"a":"2"}}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a":  "2"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value></tool_call>",
}


def chat(name: str, how: str = "template") -> Chat:
    return make_chat(how, tokenizer(name), end_ids(name))


def ids_of(name: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(name).encode(text, add_special_tokens=False)
    return ids


def text_of(name: str, ids: Any) -> str:
    return str(tokenizer(name).decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize(
    ("name", "call", "end", "want"),
    [
        (
            "chatml",
            "",
            "<|im_end|>",
            "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\nno\nsuch<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3",
            CALLS["qwen3"],
            "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\nno\nsuch\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "deepseek",
            CALLS["deepseek"],
            "<｜end▁of▁sentence｜>",
            "<｜tool▁output▁begin｜>5<｜tool▁output▁end｜><｜tool▁output▁begin｜>no\nsuch<｜tool▁output▁end｜>",
        ),
        (
            "glm",
            CALLS["glm"],
            "<|observation|>",
            "\n<tool_response>\n5\n</tool_response>\n<tool_response>\nno\nsuch\n</tool_response><|assistant|>",
        ),
        (
            "llama",
            '{"name": "add", "parameters": {"a":  "2"}}',
            "<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n'
            '"no\\nsuch"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        ),
    ],
)
def test_what_follows_a_turn(name: str, call: str, end: str, want: str) -> None:
    """The mark that the model sampled is not written twice, and what the template writes after it is there. A turn that
    was cut gets its mark."""
    found = chat(name)
    prompt = found.render([USER], [TOOL])
    turn = ids_of(name, f"Let me see. {call}{end}")
    added = found.bridge(prompt, turn, RESULTS, [TOOL])
    assert added is not None and text_of(name, added.token_ids) == want
    cut = found.bridge(prompt, turn[:-1], RESULTS, [TOOL])
    assert cut is not None and text_of(name, cut.token_ids) == end + want
    first, second = (text_of(name, added.token_ids[start:stop]) for start, stop in added.messages)
    assert "5" in first and "such" in second and "such" not in first


def test_a_message_of_the_user_and_of_the_system_follow_a_turn() -> None:
    found = chat("chatml")
    turn = ids_of("chatml", "5<|im_end|>")
    more = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    added = found.bridge(found.render([USER]), turn, more)
    assert added is not None
    want = "\n<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of("chatml", added.token_ids) == want


def test_the_library_is_taken_where_it_writes_what_the_template_writes() -> None:
    """And then both give the same ids after a turn."""
    found, plain = chat("qwen3", "auto"), chat("qwen3")
    assert (found.name, plain.name, chat("chatml", "auto").name) == ("qwen3", "template", "template")
    prompt = found.render([USER], [TOOL])
    assert prompt == plain.render([USER], [TOOL])
    turn = ids_of("qwen3", f"<think>\nHm.\n</think>\n\n{CALLS['qwen3']}<|im_end|>")
    theirs, ours = (c.bridge(prompt, turn, RESULTS, [TOOL]) for c in (found, plain))
    assert theirs is not None and ours is not None and theirs.token_ids == ours.token_ids
    assert [text_of("qwen3", theirs.token_ids[a:b]).strip("\n") for a, b in ours.messages] == ["5", "no\nsuch"]
    # a template that is rendered again would have written one space, and so other ids
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}
    again = plain.render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, *RESULTS], [TOOL])
    assert list(again) != [*prompt, *turn, *theirs.token_ids]


@pytest.mark.parametrize("how", ["template", "auto"])
def test_a_turn_in_parts(how: str) -> None:
    found = chat("qwen3", how)
    prompt = found.render([USER], [TOOL])
    calls = (
        '<tool_call>\n{"name": "add", "arguments": {"a":  "é"}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "argum\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add',
    )
    text = "<think>\nHm <b>é\n</think>\n\nI add.\n" + "\n".join(calls) + "<|im_end|>"
    ids = ids_of("qwen3", text)
    turn = found.parse(prompt, ids, [TOOL])
    assert turn.reasoning == "Hm <b>é" and turn.reasoning_tokens is not None
    start, end = turn.reasoning_tokens
    assert text_of("qwen3", ids[start:end]).strip() == "<think>\nHm <b>é\n</think>"
    assert turn.content.strip() == "I add."
    assert [c.status for c in turn.calls] == ["ok", "invalid_json", "missing_name", "unclosed_block"]
    assert (turn.calls[0].name, turn.calls[0].arguments) == ("add", {"a": "é"})
    for call, text in zip(turn.calls, calls, strict=True):
        if call.tokens is not None:
            assert text_of("qwen3", ids[call.tokens[0] : call.tokens[1]]).strip() == text


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_the_form_of_each_template(name: str) -> None:
    found = chat(name)
    ids = ids_of(name, f"So: {CALLS[name]}{ends(name)[-1]}")
    turn = found.parse(found.render([USER], [TOOL]), ids, [TOOL])
    (call,) = turn.calls
    assert (call.name, call.arguments, call.status, turn.content) == ("add", {"a": "2"}, "ok", "So: ")
    assert found.parse([], ids_of(name, "no call" + ends(name)[-1])).calls == ()


def test_reasoning_that_the_prompt_began() -> None:
    found = chat("drops")
    prompt = found.render([USER])
    assert text_of("drops", prompt).endswith("<think>\n")
    turn = found.parse(prompt, ids_of("drops", "Hm.\n</think>\n\nYes<|im_end|>"))
    assert (turn.reasoning, turn.content) == ("Hm.", "Yes")
    assert found.parse(prompt, ids_of("drops", "Hm")).reasoning == "Hm"
    assert found.parse((), ids_of("drops", "a < b </think> c")).reasoning is None


PIECES = st.one_of(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                '{"name": "add", "arguments": {"a":  "2"}}',
                '{"name": "nil", "arguments": []}',
            ),
            *("<think>", "</think>", "\n", "  ", "{", '"', "\\", "<tool_response>", "é中", "�", "<|im_end|>", "\x00"),
        ]
    ),
    st.text(max_size=5),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=12), st.booleans(), st.sampled_from(["template", "auto"]), st.integers(0, 3))
def test_sampled_ids_stay_bit_for_bit(pieces: list[str], ended: bool, how: str, dropped: int) -> None:
    """Whatever a model samples, cut inside of a character too: it is parsed without an error, stays at its place, and
    the same tokens follow it."""
    found = chat("qwen3", how)
    prompt = found.render([USER], [TOOL])
    ids = ids_of("qwen3", "".join(pieces))
    end = ids_of("qwen3", "<|im_end|>")
    ids = ids[: len(ids) - dropped] + end * ended
    turn = found.parse(prompt, list(ids), [TOOL])
    for call in turn.calls:
        assert call.tokens is None or 0 <= call.tokens[0] <= call.tokens[1] <= len(ids)
        assert (call.arguments is None) or json.dumps(call.arguments)
    added = found.bridge(prompt, ids, RESULTS, [TOOL])
    if added is None:  # an open thought that an end mark closes, or another end mark inside: the library does not go on
        assert how == "auto"
        return
    plain = chat("qwen3").bridge(prompt, end, RESULTS, [TOOL])
    assert plain is not None
    if ids[-1:] == end:
        assert added.token_ids == plain.token_ids
    else:
        assert added.token_ids[-len(plain.token_ids) - 1 :] == (*end, *plain.token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_templates_that_append_tool_results(name: str) -> None:
    assert chat(name).refusal("tool", [TOOL]) is None
    assert chat(name, "auto").refusal("tool", [TOOL]) is None


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    """Its first different text is in the sentence."""
    for role in ("tool", "user", "system"):
        assert "reasoning" in str(chat("drops").refusal(role))
        assert chat("chatml").refusal(role) is None
    moved = str(chat("moves").refusal("user"))
    assert "[TOOLS]" in moved and "<|im_start|>user" in moved
    # Qwen3 keeps reasoning while tools answer, and drops it once the user does
    assert "reasoning" in str(chat("qwen3").refusal("user"))
    assert "'user'" in str(chat("qwen3", "auto").refusal("user"))
    assert "reasoning" in str(chat("glm").refusal("user"))


def test_without_the_library_the_template_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.chat.library.installed", lambda: False)
    assert chat("qwen3", "auto").name == "template"
    with refuses(ValueError, "rollout.renderer", "'qwen3'", "pip install 'miles-like[agents]'"):
        chat("qwen3", "qwen3")


def test_what_cannot_be_a_chat_is_refused() -> None:
    with refuses(ValueError, "rollout.renderer", "'qwen4'", "'qwen3'"):
        chat("qwen3", "qwen4")
    with refuses(ValueError, "rollout.renderer", "'qwen3'", "<|im_start|>"):
        chat("llama", "qwen3")
    with refuses(ValueError, "rollout.renderer", "'qwen3'"):
        chat("drops", "qwen3")
    with refuses(ValueError, "rejects these messages"):
        chat("chatml").render([{"role": "user"}])

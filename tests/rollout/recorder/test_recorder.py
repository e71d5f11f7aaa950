"""Agents over OpenAI's and Anthropic's APIs, recorded: the tokens, rows and replies of their sessions.

OpenAI's official client asks. Not covered: an agent as a program (tests/rollout/episodes/test_agents.py), an engine
that samples.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from openai import APIStatusError, AsyncOpenAI

from miles_like.types import Prompt, Sample, SamplingParams
from rollout.chat.choose import make_chat
from rollout.chat.turns import Call
from rollout.config import RolloutConfig
from rollout.episodes.runner import make_episode_runner
from rollout.recorder.server import Recorder
from rollout.recorder.session import Session
from rollout.tool_config import ToolConfig
from rollout.tools.load import load_tools
from tests.support.chat_templates import end_ids, tokenizer
from tests.support.refusals import check_refusal
from tests.support.scripted import Script

END = "<|im_end|>"
TOOLS = ToolConfig(functions=(f"{__file__}:add",))
USER = {"role": "user", "content": "2+3?"}
ANSWER = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
}
PARAMS = SamplingParams(max_new_tokens=300, sampling_seed=5, stop_token_ids=end_ids("qwen3"))


def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name":  "add", "arguments": {arguments}}}\n</tool_call>'


LINES = (
    "<think>\nHm.\n</think>\n\n" + call('{"b":3, "a": 2}') + END,
    "I see.\n" + call('{"a": 5, "b": 1}') + "\n" + call('{"a": 0, "b": 1}') + END,
    "It is 5." + END,
)


def specs() -> list[dict[str, Any]]:
    return [dict(spec) for spec in load_tools(TOOLS).specs]


def prompt() -> Prompt:
    ids = make_chat("qwen3", tokenizer("qwen3")).render([USER], specs())
    return Prompt(id="p", token_ids=ids, answer="5", messages=(USER,))


def session(engine: Script, **how: Any) -> Session:
    given: dict[str, Any] = {"id": "s", "key": "k", "prompt": prompt(), "index": 0, "params": PARAMS}
    given |= {"chat": make_chat("qwen3", tokenizer("qwen3")), "engine": engine, "most_tokens": 4000}
    return Session(**given | how)


def recorded(one: Session, play: Callable[[str, AsyncOpenAI], Awaitable[Any]]) -> Any:
    """The result of `play`, which gets the session's URL and a client of it."""

    async def run() -> Any:
        recorder = Recorder()
        try:
            async with (
                recorder.session(one) as url,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as openai,
            ):
                return await play(url, openai)
        finally:
            await recorder.close()

    return asyncio.run(run())


async def agent(
    url: str, openai: AsyncOpenAI, changed: Callable[[dict[str, Any]], dict[str, Any]] = lambda m: m
) -> list[Any]:
    """An agent as others write it: it knows messages alone. changed: what it makes of an answer."""
    messages: list[Any] = [USER]
    toolset, _ = load_tools(TOOLS).for_episode()
    while True:
        reply = await openai.chat.completions.create(model="policy", messages=messages, tools=specs())  # type: ignore[call-overload]
        answer = reply.choices[0].message
        messages.append(changed(answer.model_dump(exclude_none=True)))
        if not answer.tool_calls:
            return messages
        for one in answer.tool_calls:
            arguments = json.loads(one.function.arguments)
            result = await toolset.answer(Call(name=one.function.name, arguments=arguments, text=""))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result.text})


def same(a: Sample, b: Sample) -> bool:
    tensors = ("token_ids", "loss_mask", "logprobs")
    values = ("versions", "finish", "spans", "index", "prompt_id")
    return all(torch.equal(getattr(a, k), getattr(b, k)) for k in tensors) and all(
        getattr(a, k) == getattr(b, k) for k in values
    )


def test_a_recorded_episode_is_the_one_that_is_played_in_this_process() -> None:
    one = session(Script(*LINES))
    messages = recorded(one, agent)
    assert messages[-1]["content"] == "It is 5." and messages[1]["reasoning_content"] == "Hm."
    config = RolloutConfig(tools=TOOLS, max_turns=4, max_new_tokens=300, max_episode_tokens=3000)
    runner = make_episode_runner(config, tokenizer("qwen3"), timed=False)
    (group,) = asyncio.run(runner.wrap(Script(*LINES)).generate([prompt()], n=1, params=PARAMS))
    (row,), (played,) = one.rows, group.samples
    named = [s for s in played.spans if s.what == "tool_result"]
    assert [s.name for s in named] == ["add"] * 3  # a client's results have no name
    assert tokenizer("qwen3").decode(row.token_ids[row.loss_mask].tolist()) == "".join(LINES)
    # what ends the episode in this process has no tokens
    spans = tuple(replace(s, name="") if s.what == "tool_result" else s for s in played.spans if s.end > s.start)
    assert same(row, replace(played, spans=spans))
    assert one.counts == {"requests": 3, "rows": 1}


def spelled_otherwise(message: dict[str, Any]) -> dict[str, Any]:
    """As agents do: reasoning dropped, null for "", arguments serialized again, other ids, white space."""
    out = {"role": "assistant", "content": (message.get("content") or "") + "\n" or None}
    calls = [
        {
            "id": f"mine{i}",
            "type": "function",
            "function": {
                "name": c["function"]["name"],
                "arguments": json.dumps(json.loads(c["function"]["arguments"]), sort_keys=True, indent=1),
            },
        }
        for i, c in enumerate(message.get("tool_calls") or [])
    ]
    return out | ({"tool_calls": calls} if calls else {})


def test_a_history_in_another_spelling_is_the_same_row() -> None:
    one, other = session(Script(*LINES)), session(Script(*LINES))
    recorded(one, agent)
    recorded(other, lambda url, openai: agent(url, openai, spelled_otherwise))
    assert len(other.rows) == 1 and not other.counts["false_forks"]
    assert same(one.rows[0], other.rows[0])


def test_each_sampled_token_is_under_loss_once() -> None:
    """A client that changes an answer begins another row, and so does one that asks again; a row whose beginning is
    another's has it as context."""
    one = session(Script(*LINES))

    async def play(url: str, openai: AsyncOpenAI) -> None:
        asked = openai.chat.completions
        first = (await asked.create(model="m", messages=[USER], tools=specs())).choices[0].message  # type: ignore[call-overload]
        history = [USER, first.model_dump(exclude_none=True), {"role": "tool", "content": "5", "tool_call_id": "x"}]
        await asked.create(model="m", messages=history, tools=specs())  # type: ignore[call-overload]
        await asked.create(model="m", messages=history, tools=specs())  # type: ignore[call-overload]
        history[1] = {"role": "assistant", "content": "I never wrote that."}
        await asked.create(model="m", messages=history, tools=specs())  # type: ignore[call-overload]

    recorded(one, play)
    assert one.counts == {"requests": 4, "rows": 3, "forks": 1, "false_forks": 1}
    texts = [tokenizer("qwen3").decode(row.token_ids[row.loss_mask].tolist()) for row in one.rows]
    assert texts == [LINES[0] + LINES[1], LINES[0], LINES[0]]  # the script begins again with each row
    first, again, changed = one.rows
    n = len(again.token_ids) - again.response_len
    assert torch.equal(first.token_ids[:n], again.token_ids[:n]) and not again.loss_mask[:n].any()
    assert "I never wrote that." in tokenizer("qwen3").decode(changed.token_ids.tolist())
    for row in one.rows:
        assert bool((row.logprobs[~row.loss_mask] == 0).all())
        for span in row.spans:
            if (span.what, span.who) == ("turn", "policy"):
                assert bool(row.loss_mask[span.start : span.end].all())


def test_the_stream_has_what_the_whole_reply_has() -> None:
    async def play(url: str, openai: AsyncOpenAI) -> tuple[Any, list[Any]]:
        asked = openai.chat.completions
        whole = await asked.create(
            model="m",
            messages=[USER],
            tools=specs(),
            logprobs=True,
            extra_body={"return_token_ids": True},  # type: ignore[call-overload]
        )
        options = {"include_usage": True}
        stream = await asked.create(model="m", messages=[USER], tools=specs(), stream=True, stream_options=options)  # type: ignore[call-overload]
        return whole, [chunk async for chunk in stream]

    one = session(Script(*LINES))
    whole, chunks = recorded(one, play)
    choice = whole.choices[0]
    assert choice.token_ids == tokenizer("qwen3").encode(LINES[0], add_special_tokens=False)
    assert tuple(whole.prompt_token_ids) == prompt().token_ids
    assert [t.token for t in choice.logprobs.content] == [f"token_id:{i}" for i in choice.token_ids]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    (calls,) = [d.tool_calls for d in deltas if d.tool_calls]
    assert calls[0].function.arguments == choice.message.tool_calls[0].function.arguments == '{"b": 3, "a": 2}'
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage


def test_responses_and_anthropic_messages_are_the_same_episode() -> None:
    """Each API in its client's loop of three turns gives the row of a chat's."""

    async def responses(url: str, openai: AsyncOpenAI) -> list[str]:
        items: list[Any] = [{"role": "user", "content": "2+3?"}]
        tools: Any = [{"type": "function", **spec["function"], "strict": None} for spec in specs()]
        kinds: list[str] = []
        for results in (["5"], ["6", "1"], []):
            events = []
            async for e in await openai.responses.create(model="m", input=items, tools=tools, stream=True):
                events.append(e)
            done = events[-1].response
            assert [e.sequence_number for e in events] == list(range(len(events)))
            kinds += [item.type for item in done.output]
            items += [item.model_dump(exclude_none=True) for item in done.output]
            calls = [item.call_id for item in done.output if item.type == "function_call"]
            items += [
                {"type": "function_call_output", "call_id": c, "output": r} for c, r in zip(calls, results, strict=True)
            ]
        return kinds

    async def anthropic(url: str, openai: AsyncOpenAI) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": "2+3?"}]
        tools = [
            {
                "name": s["function"]["name"],
                "description": s["function"]["description"],
                "input_schema": s["function"]["parameters"],
            }
            for s in specs()
        ]
        kinds: list[str] = []
        async with httpx.AsyncClient() as http:
            for results in (["5"], ["6", "1"], []):
                body = {"model": "m", "max_tokens": 300, "messages": messages, "tools": tools}
                reply = (await http.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "k"})).json()
                kinds += [block["type"] for block in reply["content"]]
                messages.append({"role": "assistant", "content": reply["content"]})
                calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
                blocks = [
                    {"type": "tool_result", "tool_use_id": c, "content": [{"type": "text", "text": r}]}
                    for c, r in zip(calls, results, strict=True)
                ]
                messages.append({"role": "user", "content": blocks})
            stream = body | {"stream": True, "messages": messages[:1]}
            async with http.stream("POST", f"{url}/v1/messages", json=stream, headers={"x-api-key": "k"}) as sent:
                lines = [line async for line in sent.aiter_lines() if line.startswith("event:")]
        block = ["event: content_block_start", "event: content_block_delta", "event: content_block_stop"]
        assert lines == ["event: message_start", *block * 2, "event: message_delta", "event: message_stop"]
        return kinds

    chat, other, third = session(Script(*LINES)), session(Script(*LINES)), session(Script(*LINES))
    recorded(chat, agent)
    want = ["reasoning", "function_call", "message", "function_call", "function_call", "message"]
    assert recorded(other, responses) == want
    assert recorded(third, anthropic) == ["thinking", "tool_use", "text", "tool_use", "tool_use", "text"]
    assert same(chat.rows[0], other.rows[0]) and same(chat.rows[0], third.rows[0])
    assert len(other.rows) == 1 and len(third.rows) == 2  # the stream asked the first turn again


def test_the_token_endpoint_goes_on_in_a_row() -> None:
    async def play(url: str, openai: AsyncOpenAI) -> list[Mapping[str, Any]]:
        out = []
        ids = list(prompt().token_ids)
        async with httpx.AsyncClient(headers={"authorization": "Bearer k"}) as http:
            for _ in range(2):
                body = {"token_ids": ids, "sampling_params": {"max_tokens": 200, "temperature": 0.3}}
                reply = (await http.post(f"{url}/inference/v1/generate", json=body)).json()
                out.append(reply["choices"][0])
                ids += [*reply["choices"][0]["token_ids"], *tokenizer("qwen3").encode("\n<|im_start|>user\nmore")]
            models = (await http.get(f"{url}/v1/models")).json()
            assert models["data"][0]["max_model_len"] == 4000
            assert (await http.post(f"{url}/reward", json={"reward": 0.25})).status_code == 200
        return out

    one = session(Script(*LINES))
    first, second = recorded(one, play)
    (row,) = one.rows
    assert tokenizer("qwen3").decode(first["token_ids"]) == LINES[0] and row.turns == 2 and row.reward == 0.25
    assert row.token_ids.tolist()[-len(second["token_ids"]) :] == second["token_ids"]
    assert [c["logprob"] for c in second["logprobs"]["content"]] == [-1.0] * len(second["token_ids"])


class Slow(Script):
    """Samples when it is let go. ended: turns that were cancelled."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.go, self.begun, self.ended = asyncio.Event(), asyncio.Semaphore(0), 0

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        self.begun.release()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended += 1
            raise
        return await super().continue_sample(sample, environment, params=params)


def test_requests_at_the_same_time_lose_no_sampled_token() -> None:
    """Two go on in one row: the second begins another one."""
    one = session(engine := Slow(*LINES))

    async def run() -> list[list[int]]:
        engine.go.set()
        first = await one.play([USER], specs())
        engine.go.clear()
        ids = first.sample.token_ids.tolist()
        asked = [asyncio.create_task(one.continue_ids([*ids, new])) for new in (1, 2)]
        asked.append(asyncio.create_task(one.play([USER, ANSWER, USER], specs())))
        for _ in range(3 + 1):
            await engine.begun.acquire()
        engine.go.set()
        return [first.completion_ids, *[played.completion_ids for played in await asyncio.gather(*asked)]]

    sampled = asyncio.run(run())
    assert sorted(i for ids in sampled for i in ids) == sorted(
        i for row in one.rows for i in row.token_ids[row.loss_mask].tolist()
    )


def test_a_request_ends_with_its_episode() -> None:
    one = session(engine := Slow(*LINES))

    async def run() -> httpx.Response:
        recorder = Recorder()
        try:
            async with httpx.AsyncClient(headers={"authorization": "Bearer k"}) as http:
                async with recorder.session(one) as url:
                    body = {"model": "m", "messages": [USER]}
                    asked = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
                    await engine.begun.acquire()
                async with asyncio.timeout(10):
                    return await asked
        finally:
            await recorder.close()

    reply = asyncio.run(run())
    assert (reply.status_code, engine.ended, one.failure) == (401, 1, None)


@pytest.mark.parametrize(
    ("path", "key", "body", "status", "facts"),
    [
        ("/v1/chat/completions", "other", {}, 401, ("api_key",)),
        ("/v1/messages", "other", {}, 401, ("api_key",)),
        ("/v1/chat/completions", "k", {"model": "m"}, 400, ("'messages'",)),
        ("/v1/chat/completions", "k", {"model": "m", "messages": [USER], "n": 2}, 400, ("n", 2)),
        ("/v1/chat/completions", "k", {"model": "m", "messages": [{"role": "x", "content": ""}]}, 400, ("'x'",)),
        ("/v1/responses", "k", {"input": 3}, 400, ("input",)),
        ("/v1/responses", "k", {"input": "a", "previous_response_id": "r"}, 400, ("previous_response_id",)),
        ("/v1/messages", "k", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, ("'image'",)),
        ("/inference/v1/generate", "k", {"token_ids": ["a"]}, 400, ("token_ids",)),
        ("/reward", "k", {"reward": "much"}, 400, ("reward", "'much'")),
        ("/v1/responses", "k", {"input": "a", "max_output_tokens": -1}, 400, ("max_output_tokens", -1)),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    path: str, key: str, body: dict[str, Any], status: int, facts: tuple[Any, ...]
) -> None:
    async def play(url: str, openai: AsyncOpenAI) -> httpx.Response:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
            return await http.post(f"{url}{path}", json=body)

    reply = recorded(session(Script(*LINES)), play)
    assert reply.status_code == status
    check_refusal(reply.json()["error"]["message"], *facts)


def test_a_conversation_that_is_too_long_is_refused_as_openai_does() -> None:
    one = session(Script(*LINES), most_tokens=len(prompt().token_ids))

    async def play(url: str, openai: AsyncOpenAI) -> None:
        await openai.chat.completions.create(model="m", messages=[USER], tools=specs())  # type: ignore[call-overload]

    with pytest.raises(APIStatusError) as raised:
        recorded(one, play)
    assert raised.value.code == "context_length_exceeded" and one.rows == []

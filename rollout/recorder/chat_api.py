"""OpenAI's /v1/chat/completions over a session, and vLLM's token endpoint /inference/v1/generate."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.openai.errors import BadRequest
from rollout.openai.frames import called, frame, usage_json
from rollout.openai.messages import check_tools, message
from rollout.openai.requests import ChatBody, read
from rollout.recorder.session import Played, Session, made, written

Json = dict[str, Any]


def finish_of(played: Played) -> str:
    """OpenAI's finish_reason."""
    if played.sample.finish.value != "stop":
        return "length"
    return "tool_calls" if made(played.turn) else "stop"


def message_of(played: Played) -> Json:
    """The turn as a message. Calls that cannot be made are text."""
    calls = [called(c.name, json.dumps(dict(c.arguments or {}), ensure_ascii=False)) for c in made(played.turn)]
    text = written(played.turn)
    out: Json = {"role": "assistant", "content": text if text or not calls else None}
    if played.turn.reasoning:
        out["reasoning_content"] = played.turn.reasoning
    return out | ({"tool_calls": calls} if calls else {})


async def chat(session: Session, body: Mapping[str, Any]) -> Json:
    """A completion. Sampling parameters are the run's, except for a lower limit of tokens: the trainer's log-probs are
    of the run's. Keys that are not known here are ignored. Raises BadRequest."""
    read_body = read(ChatBody, {k: v for k, v in body.items() if k in ChatBody.model_fields})
    if read_body.n != 1 or read_body.stops:
        what = f"n = {read_body.n}" if read_body.n != 1 else "stop"
        raise BadRequest(f"{what} is not recorded: send requests with n = 1 and without stop", what.split()[0])
    tools = read_body.tools if read_body.tool_choice == "auto" else []
    check_tools(tools)
    messages = [message(m, i) for i, m in enumerate(read_body.messages)]
    limit = read_body.max_tokens if read_body.max_completion_tokens is None else read_body.max_completion_tokens
    played = await session.play(messages, tools, limit)
    choice: Json = {"index": 0, "message": message_of(played), "finish_reason": finish_of(played), "logprobs": None}
    if read_body.logprobs:
        choice["logprobs"] = {"content": token_logprobs(played)}
    out = frame("chat.completion", [choice], model=read_body.model, number=uuid.uuid4().hex, created=int(time.time()))
    out["usage"] = usage_json(played.start, len(played.completion_ids))
    if body.get("return_token_ids"):
        choice["token_ids"], out["prompt_token_ids"] = played.completion_ids, played.prompt_ids
    return out


def token_logprobs(played: Played) -> list[Json]:
    """Of sampled tokens. `token` as vLLM writes it where ids are asked for."""
    return [
        {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []}
        for i, p in zip(played.completion_ids, played.logprobs, strict=True)
    ]


def chunks(whole: Json, *, usage: bool) -> Iterator[Json]:
    """A completion as the chunks of a stream: the turn has ended before the first is sent."""
    (choice,) = whole["choices"]
    given, common = choice["message"], {"index": 0, "finish_reason": None}
    head = {k: whole[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    yield head | {"choices": [common | {"delta": {"role": "assistant", "content": ""}}]}
    for key in ("reasoning_content", "content"):
        if given.get(key):
            yield head | {"choices": [common | {"delta": {key: given[key]}}]}
    if calls := given.get("tool_calls"):
        delta = {"tool_calls": [{"index": i} | call for i, call in enumerate(calls)]}
        yield head | {"choices": [common | {"delta": delta}]}
    last = common | {"delta": {}, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    yield head | {"choices": [last]}
    if usage:
        yield head | {"choices": [], "usage": whole["usage"]}


async def generate(session: Session, body: Mapping[str, Any]) -> Json:
    """A prompt of token ids, as vLLM 0.32's /inference/v1/generate has it. Raises BadRequest."""
    ids, params = body.get("token_ids"), body.get("sampling_params") or {}
    if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        raise BadRequest("token_ids is not a list of token ids: send at least one", "token_ids")
    limit = params.get("max_tokens") if isinstance(params, dict) else None
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadRequest(f"sampling_params.max_tokens = {limit!r} is not a positive integer", "sampling_params")
    played = await session.continue_ids(ids, limit)
    finish = "stop" if played.sample.finish.value == "stop" else "length"
    choice = {
        "index": 0,
        "token_ids": played.completion_ids,
        "logprobs": {"content": token_logprobs(played)},
        "finish_reason": finish,
    }
    return {"request_id": uuid.uuid4().hex, "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}

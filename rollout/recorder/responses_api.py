"""OpenAI's /v1/responses over a session: its items as messages, and a turn as its items.

Keys and events are those of OpenAI's API reference (the client `openai` 3.57.0). A request has the whole conversation:
nothing is stored under the id of a response.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.openai.errors import BadRequest
from rollout.openai.messages import check_tools, message
from rollout.recorder.session import Played, Session, made, written

Json = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text")


async def respond(session: Session, body: Mapping[str, Any]) -> Json:
    """A response. Keys that are not known here are ignored. Raises BadRequest."""
    if body.get("previous_response_id"):
        raise BadRequest("previous_response_id is not supported: send the whole input", "previous_response_id")
    messages = messages_of(body)
    tools = [
        {
            "type": "function",
            "function": {k: t[k] for k in ("name", "description", "parameters") if t.get(k) is not None},
        }
        for t in body.get("tools") or []
        if isinstance(t, dict) and t.get("type") == "function"
    ]
    check_tools(tools)
    limit = body.get("max_output_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadRequest(f"max_output_tokens = {limit!r} is not a positive integer", "max_output_tokens")
    played = await session.play(messages, tools, limit)
    return response(played, str(body.get("model") or ""))


def messages_of(body: Mapping[str, Any]) -> list[Json]:
    """Raises BadRequest for items that are neither text nor calls of functions."""
    out: list[Json] = []
    if instructions := body.get("instructions"):
        out.append({"role": "system", "content": str(instructions)})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise BadRequest("input is neither text nor a list of items: send one of them", "input")
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            out.append(message({"role": item.get("role"), "content": _text(item.get("content"), i)}, i))
        elif kind == "function_call":
            call = {"type": "function", "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
            _add_call(out, call | {"id": str(item.get("call_id") or "")}, i)
        elif kind == "function_call_output":
            content = _text(item.get("output"), i)
            out.append({"role": "tool", "content": content, "tool_call_id": str(item.get("call_id") or "")})
        elif kind != "reasoning":
            raise BadRequest(f"input[{i}] is of type {kind!r}, which is not supported: remove it", "input")
    return out


def _add_call(out: list[Json], call: Json, i: int) -> None:
    """To the turn of the assistant that it belongs to."""
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    calls = [*out[-1].get("tool_calls", []), call]
    out[-1] = message({"role": "assistant", "content": out[-1].get("content"), "tool_calls": calls}, i)


def _text(content: Any, i: int) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)):
            raise BadRequest(f"input[{i}] has a part that is not text: remove it", "input")
    return "".join(part["text"] for part in parts)


def response(played: Played, model: str) -> Json:
    """A turn as a response."""
    output: list[Json] = []
    if played.turn.reasoning:
        text = {"type": "reasoning_text", "text": played.turn.reasoning}
        output.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [text], "status": "completed"})
    if (text_ := written(played.turn)) or not made(played.turn):
        part = {"type": "output_text", "text": text_, "annotations": []}
        output.append(
            {"type": "message", "id": _id("msg"), "role": "assistant", "content": [part], "status": "completed"}
        )
    for call in made(played.turn):
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        item = {"type": "function_call", "id": _id("fc"), "call_id": _id("call"), "name": call.name}
        output.append(item | {"arguments": arguments, "status": "completed"})
    cut = played.sample.finish.value != "stop"
    n = len(played.completion_ids)
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": played.start,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": n,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": played.start + n,
        },
    }


def events(whole: Json) -> Iterator[Json]:
    """A response as the events of a stream: the turn has ended before the first is sent."""
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for number, (kind, more) in enumerate(_events(whole, begun)):
        yield {"type": kind, "sequence_number": number} | more


def _events(whole: Json, begun: Json) -> Iterator[tuple[str, Json]]:
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for i, item in enumerate(whole["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            inner = at | {"content_index": 0}
            yield (
                "response.output_item.added",
                {"output_index": i, "item": item | {"content": [], "status": "in_progress"}},
            )
            yield "response.content_part.added", inner | {"part": part | {"text": ""}}
            yield "response.output_text.delta", inner | {"delta": part["text"], "logprobs": []}
            yield "response.output_text.done", inner | {"text": part["text"], "logprobs": []}
            yield "response.content_part.done", inner | {"part": part}
        elif item["type"] == "function_call":
            empty = item | {"arguments": "", "status": "in_progress"}
            yield "response.output_item.added", {"output_index": i, "item": empty}
            yield "response.function_call_arguments.delta", at | {"delta": item["arguments"]}
            yield "response.function_call_arguments.done", at | {"arguments": item["arguments"], "name": item["name"]}
        else:
            yield "response.output_item.added", {"output_index": i, "item": item}
        yield "response.output_item.done", {"output_index": i, "item": item}
    yield ("response.incomplete" if whole["status"] == "incomplete" else "response.completed"), {"response": whole}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"

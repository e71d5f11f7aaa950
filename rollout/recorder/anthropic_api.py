"""Anthropic's /v1/messages over a session: its blocks as messages, and a turn as its blocks.

Keys and events are those of Anthropic's API reference, version 2023-06-01.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.openai.errors import BadRequest
from rollout.openai.messages import check_tools, message
from rollout.recorder.session import Played, Session, made, written

Json = dict[str, Any]


async def messages(session: Session, body: Mapping[str, Any]) -> Json:
    """A message. Keys that are not known here are ignored. Raises BadRequest."""
    if body.get("stop_sequences"):
        raise BadRequest("stop_sequences are not recorded: send none", "stop_sequences")
    tools = [
        {
            "type": "function",
            "function": {
                "name": t.get("name"),
                "description": t.get("description") or "",
                "parameters": t.get("input_schema") or {},
            },
        }
        for t in body.get("tools") or []
        if isinstance(t, dict)
    ]
    check_tools(tools)
    limit = body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadRequest(f"max_tokens = {limit!r} is not a positive integer", "max_tokens")
    played = await session.play(messages_of(body), tools, limit)
    return answer(played, str(body.get("model") or ""))


def messages_of(body: Mapping[str, Any]) -> list[Json]:
    """Raises BadRequest for blocks that are neither text nor calls of tools."""
    out: list[Json] = []
    if system := _text(body.get("system"), "system"):
        out.append({"role": "system", "content": system})
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequest("messages is not a list of messages: send at least one", "messages")
    for i, one in enumerate(given):
        content = one.get("content") if isinstance(one, dict) else None
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
            raise BadRequest(f"messages[{i}] has no content: send text or blocks", "messages")
        out += _of_assistant(blocks, i) if one.get("role") == "assistant" else _of_user(blocks, i)
    return out


def _of_assistant(blocks: list[Json], i: int) -> list[Json]:
    kept = [b for b in blocks if b.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
    calls = [
        {"id": b.get("id"), "type": "function", "function": {"name": b.get("name"), "arguments": b.get("input") or {}}}
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    turn: Json = {"role": "assistant", "content": _text(kept, f"messages[{i}]")}
    return [message(turn | ({"tool_calls": calls} if calls else {}), i)]


def _of_user(blocks: list[Json], i: int) -> list[Json]:
    """Results of tools, each as a message, then the text."""
    where = f"messages[{i}]"
    results = [
        {"role": "tool", "tool_call_id": str(b.get("tool_use_id") or ""), "content": _text(b.get("content"), where)}
        for b in blocks
        if b.get("type") == "tool_result"
    ]
    text = _text([b for b in blocks if b.get("type") != "tool_result"], where)
    return [*results, *([{"role": "user", "content": text}] if text or not results else [])]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRequest(
                f"{where} has a block {str(kind)[:60]!r}, but only text is supported: remove it", "messages"
            )
    return "".join(part["text"] for part in parts)


def answer(played: Played, model: str) -> Json:
    """A turn as a message."""
    blocks: list[Json] = []
    if played.turn.reasoning:
        blocks.append({"type": "thinking", "thinking": played.turn.reasoning, "signature": ""})
    calls = made(played.turn)
    if (text := written(played.turn)) or not calls:
        blocks.append({"type": "text", "text": text})
    for call in calls:
        blocks.append({"type": "tool_use", "id": _id("toolu"), "name": call.name, "input": dict(call.arguments)})
    cut = played.sample.finish.value != "stop"
    return {
        "id": _id("msg"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": "max_tokens" if cut else "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": played.start, "output_tokens": len(played.completion_ids)},
    }


def events(whole: Json) -> Iterator[Json]:
    """A message as the events of a stream: the turn has ended before the first is sent."""
    usage = whole["usage"]
    begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for i, block in enumerate(whole["content"]):
        empty, delta = _begun(block)
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    last = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": last, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def _begun(block: Json) -> tuple[Json, Json]:
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return block | {"input": {}}, {"type": "input_json_delta", "partial_json": text}
    key = block["type"]
    return block | {key: ""}, {"type": f"{key}_delta", key: block[key]}


def error_json(message: str, kind: str = "invalid_request_error") -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"

"""Parts of replies in the form of OpenAI's API: models, completions, chunks of a stream, usage."""

from __future__ import annotations

import uuid
from typing import Any

import orjson

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def models_json(name: str, path: str, context_length: int, created: float) -> Json:
    return {"object": "list", "data": [model_json(name, path, context_length, created)]}


def model_json(name: str, path: str, context_length: int, created: float) -> Json:
    """root and max_model_len: as SGLang 0.5.23 and vLLM have them beside OpenAI's keys."""
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "miles-like",
        "root": path,
        "max_model_len": context_length,
    }


def event(body: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def frame(kind: str, choices: list[Json], *, model: str, number: str, created: int) -> Json:
    """A completion, or a chunk of one. kind: its `object`; number: of the completion."""
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{number}", "object": kind, "created": created, "model": model, "choices": choices}


def called(name: str, arguments: str) -> Json:
    """A tool call with a new id."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def usage_json(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Json:
    out: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        out["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return out

"""OpenAI's endpoints for an OpenAPI document: the models that validate their bodies, and their replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.openai.requests import IGNORED, ChatBody, CompletionBody, SamplingBody
from rollout.wire import endpoints

Json = dict[str, Any]
BODIES: dict[str, type[SamplingBody]] = {
    endpoints.OPENAI_COMPLETIONS: CompletionBody,
    endpoints.OPENAI_CHAT: ChatBody,
}
REPLIES = {endpoints.OPENAI_COMPLETIONS: "Completion", endpoints.OPENAI_CHAT: "ChatCompletion"}  # their schemas
MODEL, MODELS = "Model", "Models"  # likewise
_TEXT, _WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}
_FINISH = {"enum": ["stop", "length", "tool_calls", "abort"]}


def as_read(schema: Json, models: Sequence[str]) -> Json:
    """The schema of a body of `BODIES` with what is done before it is validated: null is a key that is left out, and
    keys without effect may have any value. models: names under which the served model is asked for."""
    required = schema["required"]
    keys = {
        key: one if key in required else {"anyOf": [one, {"type": "null"}]} for key, one in schema["properties"].items()
    }
    keys["model"] = {"type": "string", "enum": list(models), "description": "the served model"}
    keys |= {key: {"description": "without effect"} for key in sorted(IGNORED)}
    return schema | {"properties": keys, "additionalProperties": {"type": "null"}}


def reply_schemas(ref: str) -> Json:
    """ref: a reference with {model} for the name of another schema."""
    model = {"id": _TEXT, "object": {"const": "model"}, "created": _WHOLE, "owned_by": _TEXT, "root": _TEXT}
    message = _object({"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}})
    message["properties"]["tool_calls"] = {"type": "array", "items": {"type": "object"}}
    return {
        MODEL: _object(model | {"max_model_len": _WHOLE}),
        MODELS: _object({"object": {"const": "list"}, "data": _list(ref, MODEL)}),
        "Usage": _object({"prompt_tokens": _WHOLE, "completion_tokens": _WHOLE, "total_tokens": _WHOLE}),
        **_reply(ref, "Completion", "text_completion", {"text": _TEXT}),
        **_reply(ref, "ChatCompletion", "chat.completion", {"message": message}),
    }


def _reply(ref: str, name: str, kind: str, content: Json) -> Json:
    choice = {"index": _WHOLE, "finish_reason": _FINISH, "logprobs": {"type": ["object", "null"]}}
    frame = {"id": _TEXT, "object": {"const": kind}, "created": _WHOLE, "model": _TEXT}
    more = {"choices": _list(ref, f"{name}Choice"), "usage": {"$ref": ref.format(model="Usage")}}
    return {f"{name}Choice": _object(choice | content), name: _object(frame | more)}


def _object(keys: Json) -> Json:
    """With all of these keys."""
    return {"type": "object", "required": list(keys), "properties": dict(keys)}


def _list(ref: str, model: str) -> Json:
    return {"type": "array", "items": {"$ref": ref.format(model=model)}}

"""The document at /openapi.json: the models that validate requests, and the responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from rollout.embedded.openai import schema as openai
from rollout.wire import control, endpoints
from rollout.wire.bodies import Body, EmptyBody, GenerateBody
from rollout.wire.reshard import requests as reshard

Json = dict[str, Any]
OPENAPI = "/openapi.json"
HEALTH_GENERATE = "/health_generate"
_REF = "#/components/schemas/{model}"
_OUTCOME = "Outcome"
_CONTROL: tuple[type[control.Request], ...] = (
    control.PauseRequest,
    control.AbortRequest,
    control.BeginUpdate,
    control.UpdateFromTensor,
    control.UpdateFromDistributed,
    control.InitGroup,
    control.DestroyGroup,
    control.UpdateFromDisk,
    control.EndUpdate,
    control.UpdateVersion,
    control.ChecksumRequest,
    control.ReleaseMemory,
    control.ResumeMemory,
    reshard.PlanSlices,
    reshard.JoinSlices,
    reshard.UpdateFromSlices,
)
_BODIES: dict[str, type[Body]] = {
    endpoints.GENERATE: GenerateBody,
    endpoints.CONTINUE: EmptyBody,
    **{request.ENDPOINT: request for request in _CONTROL},
}
_SAMPLE: Json = {
    "type": "object",
    "required": ["output_ids", "meta_info"],
    "properties": {
        "text": {"type": "string"},
        "output_ids": {"type": "array", "items": {"$ref": _REF.format(model="TokenId")}},
        "meta_info": {
            "type": "object",
            "required": ["id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version"],
        },
    },
}
_ANSWERS: Json = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message"],
                "properties": {"message": {"type": "string", "minLength": 1}},
            }
        },
    },
    _OUTCOME: {
        "type": "object",
        "required": ["success", "message"],
        "properties": {"success": {"type": "boolean"}, "message": {"type": "string"}},
    },
    "Sample": _SAMPLE,
    "Generated": {
        "anyOf": [
            {"$ref": _REF.format(model="Sample")},
            {"type": "array", "items": {"$ref": _REF.format(model="Sample")}},
        ]
    },
}
_OUTCOMES = (
    endpoints.BEGIN_UPDATE,
    endpoints.UPDATE_FROM_TENSOR,
    endpoints.UPDATE_FROM_DISTRIBUTED,
    endpoints.INIT_GROUP,
    endpoints.DESTROY_GROUP,
    endpoints.PLAN_SLICES,
    endpoints.JOIN_SLICES,
    endpoints.UPDATE_FROM_SLICES,
    endpoints.UPDATE_FROM_DISK,
    endpoints.END_UPDATE,
    endpoints.UPDATE_VERSION,
)


def document(vocabulary: int, names: Sequence[str]) -> Json:
    """OpenAPI 3.1 document of a server. vocabulary: number of the model's tokens; names: of the model in requests, the
    first of which is listed."""
    bodies: list[type[BaseModel]] = [*dict.fromkeys(_BODIES.values()), *openai.BODIES.values()]
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(m, "validation") for m in bodies]
    _, schema = models_json_schema(models, ref_template=_REF)
    schemas = schema["$defs"] | _ANSWERS | openai.reply_schemas(_REF)
    schemas["TokenId"] |= {"maximum": vocabulary - 1}
    schemas |= {m.__name__: openai.as_read(schemas[m.__name__], names) for m in openai.BODIES.values()}
    paths: Json = {route: {"post": _operation(route, body)} for route, body in _BODIES.items()} | _openai_paths(names)
    paths[endpoints.GENERATE]["put"] = _operation(endpoints.GENERATE, GenerateBody)
    own = (endpoints.WEIGHTS_LAYOUT, endpoints.SLICE_HASHES)
    for route in (endpoints.MODEL_INFO, endpoints.SERVER_INFO, endpoints.CHECKSUM, *own):
        paths.setdefault(route, {})["get"] = {"responses": _answers({"type": "object"})}
    for route in (endpoints.HEALTH, HEALTH_GENERATE):
        paths[route] = {"get": {"responses": {"200": {"description": "serving"}, "503": {"description": "stopped"}}}}
    timeout = {"name": "timeout", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": 600}}
    flushed = {
        str(status): {"description": text, "content": {"text/plain": {}, "application/json": {}}}
        for status, text in ((200, "flushed"), (400, "not idle"), (413, "too large"), (503, "stopped"))
    }
    paths[endpoints.FLUSH_CACHE] = {m: {"parameters": [timeout], "responses": flushed} for m in ("get", "post")}
    info = {
        "title": "miles-like embedded engine",
        "version": "1",
        "description": "a subset of OpenAI's and SGLang's HTTP APIs",
    }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _openai_paths(names: Sequence[str]) -> Json:
    """An unknown model is 404 there."""
    other = {"404": {"description": "another model"} | _answers(None)["400"]}
    listed, one = ({"$ref": _REF.format(model=model)} for model in (openai.MODELS, openai.MODEL))
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": list(names[:1])}}
    paths: Json = {
        endpoints.OPENAI_MODELS: {"get": {"responses": _answers(listed)}},
        endpoints.OPENAI_MODELS + "/{model}": {"get": {"parameters": [name], "responses": _answers(one) | other}},
    }
    for route, body in openai.BODIES.items():
        answers = _answers({"$ref": _REF.format(model=openai.REPLIES[route])}) | other
        answers["200"]["content"]["text/event-stream"] = {}  # with stream = true
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        paths[route] = {"post": {"requestBody": {"required": True, "content": content}, "responses": answers}}
    return paths


def _operation(route: str, body: type[Body]) -> Json:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    if route in _OUTCOMES:
        answer: Json | None = {"$ref": _REF.format(model=_OUTCOME)}
    elif route == endpoints.GENERATE:
        answer = {"$ref": _REF.format(model="Generated")}
    else:
        answer = None if route == endpoints.ABORT else {"type": "object"}
    return {"requestBody": {"required": False, "content": content}, "responses": _answers(answer)}


def _answers(schema: Json | None) -> Json:
    refused = {"anyOf": [{"$ref": _REF.format(model=m)} for m in ("Error", _OUTCOME)]}
    failed = {"application/json": {"schema": refused}}
    texts = {
        "400": "refused",
        "401": "no key",
        "403": "another host or origin",
        "408": "late",
        "413": "too large",
        "431": "long header",
        "503": "stopped or full",
    }
    out: Json = {status: {"description": text, "content": failed} for status, text in texts.items()}
    done: Json = {"description": "done"}
    if schema is not None:
        done["content"] = {"application/json": {"schema": schema}}
    return {"200": done} | out

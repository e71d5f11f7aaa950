"""The page at / and /docs: what the server answers."""

from __future__ import annotations

from rollout.embedded.server.openapi import HEALTH_GENERATE, OPENAPI
from rollout.wire import endpoints

ROOT, DOCS = "/", "/docs"
_ROUTES = (
    ("POST", endpoints.OPENAI_CHAT, "OpenAI: answer to messages"),
    ("POST", endpoints.OPENAI_COMPLETIONS, "OpenAI: continuation of text or token ids"),
    ("GET", endpoints.OPENAI_MODELS, "OpenAI: the served model"),
    ("POST", endpoints.GENERATE, "SGLang: samples with token ids, log-probs, expert routes"),
    ("GET", endpoints.MODEL_INFO, "SGLang: model and weight version"),
    ("GET", endpoints.SERVER_INFO, "SGLang: arguments, memory, queue"),
    ("GET", endpoints.HEALTH, "status 200 while the engine runs"),
    ("GET", HEALTH_GENERATE, "the same"),
    ("GET", OPENAPI, "these routes, and those that change weights, as OpenAPI 3.1"),
    ("GET", DOCS, "this page"),
)


def page(name: str, context_length: int) -> str:
    lines = [f"{method:5}{path:22}{what}" for method, path, what in _ROUTES]
    head = f"miles-like server of {name}, context {context_length:,} tokens"
    key = 'With a server key: "Authorization: Bearer KEY", which OpenAI clients send as their api_key.'
    return "\n".join([head, "", *lines, "", key, ""])

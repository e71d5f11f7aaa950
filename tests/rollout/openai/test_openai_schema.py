"""What the schema of OpenAI's bodies calls invalid is refused, for every key and values of every type.

Why it must hold: a client that is generated from /openapi.json must not be wrong about what is sent. The server's whole
document is held to its answers by tests/fuzz/test_server.py. Not covered: bounds that depend on the model, such as the
largest token id.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from rollout.embedded.server.openapi import document
from rollout.openai.errors import BadRequest
from rollout.openai.requests import ChatBody, CompletionBody, SamplingBody, read
from tests.support.refusals import refuses

NAMES = ("tiny", "/models/tiny")
MESSAGES = [{"role": "user", "content": "a"}]
BASES: dict[type[SamplingBody], dict[str, Any]] = {
    CompletionBody: {"model": "tiny", "prompt": "a"},
    ChatBody: {"model": "/models/tiny", "messages": MESSAGES},
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 17, 0.5, 1.0, 1e30, 2**40, "", "a", "x" * 300, "tiny", "auto", "none"),
    *([], ["a"], ["a"] * 17, [1], [[1]], [[]], [True], [1.5], [{}], MESSAGES),
    *({}, {"a": 1}, {"type": "text"}, {"include_usage": True}, {"include_usage": None}),
]


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_what_the_schema_calls_invalid_is_refused(model: type[SamplingBody]) -> None:
    base, reference = BASES[model], {"$ref": f"#/components/schemas/{model.__name__}"}
    validator = jsonschema.Draft202012Validator(document(320, NAMES) | reference)
    taken = 0
    for key in (*model.model_fields, "user", "metadata", "no_key"):
        for value in VALUES:
            body = base | {key: value}
            try:
                read(model, body)
            except BadRequest:
                continue
            taken += 1
            assert validator.is_valid(body) or body["model"] not in NAMES, (key, value)
    assert taken > 100
    for key in base:
        assert not validator.is_valid({name: value for name, value in base.items() if name != key})


def test_a_literal_has_its_type() -> None:
    """0 equals false, and true equals 1."""
    for key, value, wanted in (("echo", 0, False), ("best_of", True, 1)):
        with refuses(BadRequest, key, value, wanted):
            read(CompletionBody, BASES[CompletionBody] | {key: value})

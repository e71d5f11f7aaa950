"""Replies as typed values, checked access to the JSON of a reply, and the text of an error reply."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

Json: TypeAlias = dict[str, Any]
Text = Annotated[str, BeforeValidator(lambda text: str(text or ""))]  # null and what is no text are made one


def an_object(value: object, endpoint: str) -> Mapping[str, Any]:
    """`value` as a JSON object. Raises ValueError naming the endpoint if it is something else."""
    if not isinstance(value, dict):
        raise ValueError(f"{endpoint}: the reply is a {type(value).__name__}, expected an object")
    return value


def need(obj: Mapping[str, Any], key: str, endpoint: str) -> Any:
    """`obj[key]`. Raises ValueError naming key and endpoint if it is missing."""
    if key not in obj:
        raise ValueError(f"{endpoint}: the reply has no {key!r} (it has {', '.join(sorted(obj)) or 'nothing'})")
    return obj[key]


class Reply(BaseModel):
    """A reply to a control request, which client and server hold as this type. Other keys are ignored: stock servers
    send more."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    def to_json(self) -> Json:
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, body: object, endpoint: str) -> Self:
        """Raises ValueError naming the endpoint, and the key that is missing or its value."""
        try:
            return cls.model_validate(an_object(body, endpoint))
        except ValidationError as e:
            error = e.errors(include_url=False)[0]
        key = ".".join(map(str, error["loc"]))
        if error["type"] == "missing":
            need(error["input"], str(error["loc"][-1]), endpoint)
        raise ValueError(f"{endpoint}: the reply has {key} = {reprlib.repr(error['input'])}: {error['msg']}")


def error_message(status: int, body: bytes) -> str:
    """The message of an error reply: {"error": {"message"}}, {"error": text}, {"message"}, or the start of the body."""
    try:
        obj = json.loads(body)
    except ValueError:
        obj = None
    if isinstance(obj, dict):
        error = obj.get("error")
        if isinstance(error, dict) and "message" in error:
            return f"HTTP {status}: {error['message']}"
        for text in (error, obj.get("message"), obj.get("detail")):
            if isinstance(text, str) and text:
                return f"HTTP {status}: {text}"
    start = body[:200].decode("utf-8", "replace").strip()
    return f"HTTP {status}: {start}" if start else f"HTTP {status} without a message"

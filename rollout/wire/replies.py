"""Checked access to the JSON of a reply, and the text of an error reply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


def an_object(value: object, endpoint: str) -> Mapping[str, Any]:
    """`value` as a JSON object. Raises ValueError naming the endpoint if it is something else."""
    if not isinstance(value, dict):
        raise ValueError(f"{endpoint}: the reply holds {type(value).__name__} where an object was expected")
    return value


def need(obj: Mapping[str, Any], key: str, endpoint: str) -> Any:
    """`obj[key]`. Raises ValueError naming key and endpoint if it is missing."""
    if key not in obj:
        raise ValueError(f"{endpoint}: the reply has no {key!r} (it has {', '.join(sorted(obj)) or 'nothing'})")
    return obj[key]


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

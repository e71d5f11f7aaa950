"""Messages and tools of a chat, as OpenAI's API has them, in the form in which chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout.openai.errors import BadRequest

Json = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}


def check_tools(tools: Sequence[Json]) -> None:
    """Raises BadRequest for what is no list of functions with names."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            want = '{"type": "function", "function": {"name": ...}}'
            raise BadRequest(f"tools[{i}] is not a function: expected {want}", "tools")


def message(given: Json, i: int) -> Json:
    """Message `i` of a chat as templates read it: text in one piece, arguments of tool calls as objects.

    Raises BadRequest for another role or key, and for content that is not text.
    """
    where = f"messages[{i}]"
    out = {k: v for k, v in given.items() if v is not None}
    role = out.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role = {role!r}, expected one of {', '.join(_ROLES)}", "messages")
    if unknown := out.keys() - _KEYS:
        raise BadRequest(f"{where}.{min(unknown)} is not supported: remove it", "messages")
    if role == "developer":  # OpenAI's later name, which templates do not know
        out["role"] = "system"
    out["content"] = _text(out.get("content"), where)
    if "tool_calls" in out:
        out["tool_calls"] = _calls(out["tool_calls"], where)
    elif "content" not in given:
        raise BadRequest(f"{where} has no content: send content or tool_calls", "messages")
    return out


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRequest(
                f"{where}.content has a part {str(kind)[:60]!r}, but only text is supported: remove it", "messages"
            )
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, where: str) -> list[Json]:
    out: list[Json] = []
    for given in calls if isinstance(calls, list) else [calls]:
        call: Json = given if isinstance(given, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}.tool_calls has an entry without a function name: send function.name", "messages")
        arguments = function.get("arguments") or "{}"
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise BadRequest(
                f"{where}.tool_calls: the arguments of {function['name'][:60]!r} are not valid JSON", "messages"
            ) from None
        out.append(call | {"function": function | {"arguments": parsed}})
    return out

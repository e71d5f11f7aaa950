"""Messages of a chat as a prompt, by the chat template of the model's tokenizer."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.chat.template import tool_form
from rollout.chat.tool_forms import ToolForm
from rollout.embedded.openai.errors import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}


class ChatTemplate:
    """The template of a directory's tokenizer, which is loaded by the first chat: transformers' import takes longer
    than the rest of a server's start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._loaded: PreTrainedTokenizerBase | None = None

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from miles_like.hf.tokenizer import load_tokenizer  # with jinja2

        with self._lock:
            if self._loaded is None:
                self._loaded = load_tokenizer(self._directory)
            return self._loaded

    def _checked(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises BadRequest for one without a chat template."""
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise BadRequest(
                f"the tokenizer of {self._directory} has no chat template, which turns messages into a prompt: "
                "use /v1/completions, or put the model's chat_template.jinja beside its weights",
                "messages",
            )
        return tokenizer

    def form(self) -> ToolForm:
        """How the model writes tool calls. Raises BadRequest where the template has no place for tools, or teaches a
        form that is not known here."""
        try:
            return tool_form(self._checked(), str(self._directory))
        except BadRequest:
            raise
        except ValueError as e:
            raise BadRequest(f"{e}: send no tools, or describe them in a message", "tools") from None

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json], more: Mapping[str, Any]) -> list[int]:
        """Token ids. more: further variables of the template. Raises BadRequest for messages it rejects."""
        tokenizer = self._checked()
        own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
        if taken := own & more.keys():  # `chat_template` among them, a program
            what = f"chat_template_kwargs.{min(taken)} is not a variable of the template: remove it"
            raise BadRequest(what, "chat_template_kwargs")
        conversation = [_message(m, i) for i, m in enumerate(messages)]
        try:
            text = tokenizer.apply_chat_template(
                conversation, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **more
            )
        except Exception as e:  # a template is a program: it raises what it likes
            why = " ".join(str(e).split())[:300]
            raise BadRequest(f"the model's chat template rejects these messages: {why}", "messages") from None
        return list(tokenizer.encode(str(text), add_special_tokens=False))


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


def _message(given: Json, i: int) -> Json:
    """As templates read it: text in one piece, arguments of tool calls as objects."""
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

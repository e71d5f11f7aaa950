"""The renderers library: templates of published models over token ids (Prime Intellect's `renderers`, Apache 2.0)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

from miles_like.types import Message
from rollout.chat.append_only import ANSWER, DUMMY_QUESTION, REASONING, dummy_message
from rollout.chat.positions import tokens_of
from rollout.chat.template import TemplateTokenizer
from rollout.chat.turns import INVALID_JSON, OK, Added, Call, Tool, Turn, for_template

INSTALL = "pip install 'miles-like[agents]'"
_OF_NO_MODEL = ("auto", "custom", "default")
NOT_TRIED = ("gpt-oss",)  # its vocabulary is downloaded


def installed() -> bool:
    return importlib.util.find_spec("renderers") is not None


def names() -> tuple[str, ...]:
    """Of the library's renderers."""
    from renderers import configs

    return tuple(name for name in configs._CONFIG_BY_NAME if name not in _OF_NO_MODEL)


class LibraryChat:
    """A `Chat` by the library's renderer `name`.

    Raises ValueError for a tokenizer that lacks one of the renderer's tokens.
    """

    def __init__(self, name: str, tokenizer: TemplateTokenizer) -> None:
        from renderers import create_renderer
        from renderers.configs import config_from_name

        self.name, self._tokenizer = name, tokenizer
        try:
            self._renderer: Any = create_renderer(tokenizer, config_from_name(name))
        except Exception as e:  # it asserts, and imports what it needs
            why = " ".join(str(e).split())[:300]
            raise ValueError(
                f"rollout.renderer = {name!r} does not fit the model's tokenizer: {why}: set rollout.renderer = 'auto'"
            ) from None
        self.stop_token_ids = tuple(int(i) for i in self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Raises ValueError for messages that the template has no place for."""
        try:
            ids = self._renderer.render_ids(for_template(messages), tools=_tools(tools), add_generation_prompt=True)
        except Exception as e:  # as of a template
            why = " ".join(str(e).split())[:300]
            raise ValueError(f"the renderer {self.name!r} rejects these messages: {why}") from None
        return tuple(ids)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Added | None:
        before = [*prompt_ids, *completion_ids]
        found = self._renderer.bridge_to_next_turn(
            list(prompt_ids), list(completion_ids), for_template(messages), tools=_tools(tools)
        )
        if found is None or found.token_ids[: len(before)] != before:
            return None
        n = len(before)
        contents = found.is_content[n:] or [True] * (len(found.token_ids) - n)  # some formats do not mark them
        owners = [i if inside else -1 for i, inside in zip(found.message_indices[n:], contents, strict=True)]
        places = []
        for i in range(len(messages)):
            at = [k for k, owner in enumerate(owners) if owner == i]
            places.append((at[0], at[-1] + 1) if at else (0, 0))
        return Added(tuple(found.token_ids[n:]), tuple(places))

    def parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool] = ()) -> Turn:
        found = self._renderer.parse_response(list(ids), tools=_tools(tools), prompt_ids=list(prompt_ids))
        reasoning = found.reasoning_content or None
        return Turn(
            content=found.content,
            reasoning=reasoning,
            reasoning_tokens=None if reasoning is None else self._reasoning_tokens(ids, reasoning),
            calls=tuple(map(_call, found.tool_calls)),
        )

    def refusal(self, role: str, tools: Sequence[Tool] = ()) -> str | None:
        """The library refuses what its template would change."""
        prompt = self.render([DUMMY_QUESTION], tools)
        for text in (ANSWER, f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"):
            turn = [*self._tokenizer.encode(text, add_special_tokens=False), *self.stop_token_ids[:1]]
            if self.bridge(prompt, turn, [dummy_message(role)], tools) is None:
                kept = "" if REASONING not in text else " that reasons"
                return f"the renderer {self.name!r} does not append a message of role {role!r} to a turn{kept}"
        return None

    def _reasoning_tokens(self, ids: Sequence[int], reasoning: str) -> tuple[int, int] | None:
        text = self._decode(ids)
        at = text.find(reasoning)
        if at < 0:
            return None
        end = at + len(reasoning)
        mark = text.find("</think>", end)
        return tokens_of(self._decode, ids, 0, mark + len("</think>") if mark >= 0 else end)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [dict(t) for t in tools] or None


def _call(found: Any) -> Call:
    """Its arguments are text where the library could not read them, and in formats that carry JSON as text."""
    arguments, status = found.arguments, str(found.status)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        arguments, status = None, INVALID_JSON if status == OK else status
    span = found.token_span
    return Call(
        name=found.name or "",
        arguments=arguments,
        text=found.raw,
        status=status,
        tokens=None if span is None else (int(span[0]), int(span[1])),
    )

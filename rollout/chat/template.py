"""Any chat template in Jinja: what messages add to a conversation is read from a rendering after a dummy turn.

The conversation [dummy question, dummy turn, new messages] is rendered; the text after what a model samples of the
dummy turn is what they add. verl's and Miles' incremental tokenization render dummy messages too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from miles_like.types import Message
from rollout.chat.append_only import added, difference, dummy_turns
from rollout.chat.positions import tokens_of
from rollout.chat.tool_forms import FORMS, ToolForm, form_of
from rollout.chat.turns import Added, Call, Stretch, Tool, Turn, for_template

_OPEN, _CLOSE = "<think>", "</think>"


class TemplateTokenizer(Protocol):
    """The methods of a transformers tokenizer that are used."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **how: Any) -> Any: ...
    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str: ...


class TemplateChat:
    """A `Chat` over the tokenizer's own template.

    stop_token_ids: with which the model ends a turn. form: of the model's tool calls; None: turns have no calls.
    """

    name = "template"

    def __init__(self, tokenizer: TemplateTokenizer, stop_token_ids: Sequence[int], form: ToolForm | None) -> None:
        self.stop_token_ids = tuple(stop_token_ids)
        self._tokenizer, self._form = tokenizer, form

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Raises ValueError for messages that the template rejects."""
        try:
            text = self._write(for_template(messages), True, tools)
        except Exception as e:  # a template is a program: it raises what it likes
            why = " ".join(str(e).split())[:300]
            raise ValueError(f"the model's chat template rejects these messages: {why}") from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Added | None:
        text = self._added(for_template(messages), tools)
        if text is None:
            return None
        if completion_ids and (last := completion_ids[-1]) in self.stop_token_ids:
            text = text.removeprefix(self._decode([last]))  # the model has sampled it
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Added(tuple(ids), tuple(self._contents(ids, messages)))

    def parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool] = ()) -> Turn:
        kept = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        text = self._decode(kept)
        reasoning, start = self._reasoning(text, prompt_ids)
        calls = [
            Call(
                name=a.name,
                arguments=a.arguments,
                text=a.text,
                status=a.status,
                tokens=self._tokens(kept, a.start, a.end),
            )
            for a in (self._form.attempts(text, start, [dict(t) for t in tools]) if self._form else ())
        ]
        content = text[start : self._form.begins(text, start)] if self._form and calls else text[start:]
        return Turn(
            content=content.strip("\n") if reasoning is not None else content,
            reasoning=reasoning,
            reasoning_tokens=None if reasoning is None else self._tokens(kept, 0, start),
            calls=tuple(calls),
        )

    def refusal(self, role: str, tools: Sequence[Tool] = ()) -> str | None:
        """A template that never writes of reasoning has no place in which to drop it."""
        reasons = "think" in str(self._tokenizer.chat_template)
        return difference(lambda messages, begins: self._write(messages, begins, tools), role, reasons=reasons)

    # ----

    @cached_property
    def _stops(self) -> tuple[str, ...]:
        return tuple(self._decode([i]) for i in self.stop_token_ids)

    def _write(self, messages: Sequence[Mapping[str, Any]], begins: bool, tools: Sequence[Tool]) -> str:
        given = [dict(m) for m in messages]
        how = {"tools": [dict(t) for t in tools]} if tools else {}
        return str(self._tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=begins, **how))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _tokens(self, ids: Sequence[int], start: int, end: int) -> Stretch:
        return tokens_of(self._decode, ids, start, end)

    def _added(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> str | None:
        for turn in dummy_turns(str(messages[0].get("role")), reasoning=False):
            try:
                text = added(lambda given, begins: self._write(given, begins, tools), turn, messages, self._stops)
            except Exception:  # the template rejects this dummy turn; `refusal` has its words
                continue
            if text is not None:
                return text
        return None

    def _contents(self, ids: Sequence[int], messages: Sequence[Message]) -> Iterator[Stretch]:
        """A content that the template writes in another way has all tokens from the one before it."""
        text, at = self._decode(ids), 0
        for message in messages:
            content = str(message.get("content") or "")
            start = text.find(content, at)
            at = len(text) if start < 0 else start + len(content)
            yield self._tokens(ids, max(start, 0), at)

    def _reasoning(self, text: str, prompt_ids: Sequence[int]) -> tuple[str | None, int]:
        """The reasoning at the beginning of a turn, and where in `text` it ends, its mark included."""
        opened = self._decode(prompt_ids[-16:]).rstrip().endswith(_OPEN)
        if not opened and not text.lstrip().startswith(_OPEN):
            return None, 0
        inner, mark, _ = text.partition(_CLOSE)
        return inner.replace(_OPEN, "", 1).strip("\n") if not opened else inner.strip("\n"), len(inner) + len(mark)


def tool_form(tokenizer: TemplateTokenizer, where: str) -> ToolForm:
    """How the template of a tokenizer writes tool calls. where: names the template. Raises ValueError where it has no
    place for tools, or teaches a form that is not known here."""
    from jinja2 import Environment, meta

    template = str(tokenizer.get_chat_template(tools=[{}]))
    used = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    if "tools" not in used:
        raise ValueError(f"the chat template of {where} does not support tools")
    if (form := form_of(template)) is None:
        raise ValueError(
            f"the chat template of {where} supports tools, but writes tool calls in none of the known forms "
            f"({', '.join(f.name for f in FORMS)})"
        )
    return form


def known_form(tokenizer: TemplateTokenizer) -> ToolForm | None:
    """As `tool_form`; None where it raises."""
    try:
        return tool_form(tokenizer, "the model")
    except ValueError:
        return None

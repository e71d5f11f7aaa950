"""Which `Chat` a run uses (rollout.renderer)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from rollout.chat import library
from rollout.chat.library import LibraryChat
from rollout.chat.positions import same_until
from rollout.chat.template import TemplateChat, TemplateTokenizer, known_form, tool_form
from rollout.chat.turns import Chat

AUTO, TEMPLATE = "auto", "template"
_TOOL = {
    "type": "function",
    "function": {
        "name": "dummy_tool",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
_USER, _SYSTEM = {"role": "user", "content": "A question."}, {"role": "system", "content": "A rule."}
_ANSWER = {"role": "assistant", "content": "An answer."}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "dummy_tool", "arguments": {"text": "a b"}}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call_0", "name": "dummy_tool", "content": "A result."}
# conversations in which two templates of one name usually differ
_PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([_USER], []),
    ([_SYSTEM, _USER], [_TOOL]),
    ([_USER, _ANSWER, _USER], []),
    ([_USER, _CALL, _RESULT], [_TOOL]),
)


def make_chat(name: str, tokenizer: Any, stop_token_ids: Sequence[int] = (), *, calls: bool = False) -> Chat:
    """The chat of `name`: "template", the tokenizer's own; a renderer of the library; or "auto", the library's renderer
    that writes the ids which the tokenizer's template writes, else the template.

    stop_token_ids: more tokens with which the model ends a turn; the tokenizer's end token is one. calls: turns have
    tool calls. Raises ValueError for a tokenizer without a template, for a renderer that is unknown, not installed, or
    writes other ids, and with `calls` for a template whose form of calls is not known.
    """
    if not tokenizer.chat_template and name in (AUTO, TEMPLATE):
        raise ValueError(
            f"rollout.renderer = {name!r}, but the model's tokenizer has no chat template, which messages need: put "
            "the model's chat_template.jinja beside its weights, or answer with text instead of messages"
        )
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    form = known_form(tokenizer) if tokenizer.chat_template else None
    template = TemplateChat(tokenizer, tuple(dict.fromkeys((*ends, *stop_token_ids))), form)
    if name in (AUTO, TEMPLATE):
        equal = _equal(template, tokenizer) if name == AUTO and library.installed() else iter(())
        found = next(equal, None)
        if found is None and calls:
            _check_form(tokenizer)
        return found or template
    if not library.installed():
        raise ValueError(
            f"rollout.renderer = {name!r} needs a package that is not installed: {library.INSTALL}, or set "
            f"rollout.renderer = {TEMPLATE!r}"
        )
    known = library.names()
    if name not in known:
        (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"rollout.renderer = {name!r} is unknown: did you mean {near!r}? Known: {AUTO}, {TEMPLATE}, "
            f"{', '.join(known)}"
        )
    chosen = LibraryChat(name, tokenizer)
    if tokenizer.chat_template and (problem := _difference(chosen, template, tokenizer)) is not None:
        raise ValueError(f"rollout.renderer = {name!r} is not of this model: {problem}; set rollout.renderer = 'auto'")
    return chosen


def _check_form(tokenizer: TemplateTokenizer) -> None:
    try:
        tool_form(tokenizer, "the model")
    except ValueError as e:
        more = "" if library.installed() else f", install the library that knows more of them ({library.INSTALL})"
        raise ValueError(
            f"rollout.tools: {e}: use a template that teaches one of the known forms{more}, or set rollout.environment"
        ) from None


def _equal(template: TemplateChat, tokenizer: TemplateTokenizer) -> Iterator[LibraryChat]:
    """Renderers of the library that write what the template writes."""
    for name in library.names():
        if name in library.NOT_TRIED:
            continue
        try:
            found = LibraryChat(name, tokenizer)
        except ValueError:
            continue
        if _difference(found, template, tokenizer) is None:
            yield found


def _difference(found: LibraryChat, template: TemplateChat, tokenizer: TemplateTokenizer) -> str | None:
    """The first text in which they differ; None: they write the same ids of all conversations that both accept."""
    compared = 0
    for messages, tools in _PROBES:
        try:
            ours, theirs = template.render(messages, tools), found.render(messages, tools)
        except ValueError:
            continue
        if ours != theirs:
            at = same_until(ours, theirs)
            texts = [
                str(tokenizer.decode(list(ids[at : at + 12]), skip_special_tokens=False)) for ids in (theirs, ours)
            ]
            return f"it writes {texts[0]!r} where the model's template writes {texts[1]!r}"
        compared += 1
    return None if compared else "the model's template accepts none of the conversations that compare them"

"""Tool calls in the text of a model, where the form that its chat template teaches is known.

A form is recognised by what the template contains. Sources: the templates of Qwen3 (the form of Hermes 2 Pro), GLM-4.5,
DeepSeek-V3-0324, DeepSeek-V3.1 and Kimi-K2-Instruct on the Hugging Face hub, and the parsers of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.chat.turns import INVALID_JSON, MALFORMED, MISSING_NAME, OK, UNCLOSED

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON object


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call, or what was meant as one. start, end: its characters in the text."""

    name: str
    arguments: Json | None
    text: str
    status: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ToolForm:
    """begin: the text in front of the first call, opens: of each. marks: special tokens that are part of a call's
    text."""

    name: str
    begin: str
    opens: str
    marks: tuple[str, ...]
    in_template: tuple[str, ...]  # patterns that only templates of this form contain, all of them
    find: Callable[[str, Sequence[Json]], Iterator[tuple[str, str]]]

    def parse(self, text: str, tools: Sequence[Json]) -> list[ToolCall]:
        """The calls of a text that begins with `begin`; empty unless each has the name of a tool and an object of
        arguments, and nothing else but white space and marks is beside them."""
        calls, left = [], text
        for whole, name, arguments in self._found(text, tools):
            if name not in {_function(t).get("name") for t in tools} or not _is_object(arguments):
                return []
            calls.append(ToolCall(name, arguments))
            left = left.replace(whole, "", 1)
        for mark in self.marks:
            left = left.replace(mark, "")
        return [] if left.strip() else calls

    def begins(self, text: str, start: int) -> int:
        """Where the calls of a text begin, from `start` on."""
        return min(at for at in (text.find(self.begin, start), text.find(self.opens, start), len(text)) if at >= 0)

    def attempts(self, text: str, start: int, tools: Sequence[Json]) -> list[Attempt]:
        """All calls of a text from `start` on, malformed ones too, in order."""
        pattern, at = re.compile(_PATTERNS[self.name], re.DOTALL), start
        out: list[Attempt] = []
        while (at := text.find(self.opens, at)) >= 0:
            if (match := pattern.match(text, at)) is None:
                return [*out, Attempt("", None, text[at:], UNCLOSED, at, len(text))]
            for name, arguments in self.find(match[0], tools):
                read = _read(arguments)
                status = OK if name and read is not None else self._problem(name, read)
                out.append(Attempt(name, read, match[0], status, at, match.end()))
            at = match.end()
        return out

    def _problem(self, name: str, arguments: Json | None) -> str:
        if name:
            return INVALID_JSON
        if arguments is not None:
            return MISSING_NAME
        return INVALID_JSON if self.find is _hermes else MALFORMED

    def _found(self, text: str, tools: Sequence[Json]) -> Iterator[tuple[str, str, str]]:
        for whole in re.findall(_PATTERNS[self.name], text, re.DOTALL):
            for name, arguments in self.find(whole, tools):
                yield whole, name, arguments


def _object(value: object) -> Json:
    """A client's schema may have anything in the place of an object."""
    return value if isinstance(value, dict) else {}


def _function(tool: Mapping[str, Any]) -> Json:
    return _object(tool.get("function"))


def _is_object(text: str) -> bool:
    return _read(text) is not None


def _read(text: str) -> Json | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _hermes(whole: str, tools: Sequence[Json]) -> Iterator[tuple[str, str]]:
    inner = whole.removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError):
        found = None
    ok = isinstance(found, dict) and isinstance(found.get("name"), str)
    yield (found["name"], json.dumps(found.get("arguments", {}), ensure_ascii=False)) if ok else ("", inner)


def _glm(whole: str, tools: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """Values of parameters that are text stand as they are, all others as JSON."""
    inner = whole.removeprefix("<tool_call>").removesuffix("</tool_call>")
    name = inner.partition("<arg_key>")[0].strip()
    kinds: Json = {}
    for tool in tools:
        if _function(tool).get("name") == name:
            kinds = _object(_object(_function(tool).get("parameters")).get("properties"))
    arguments: Json = {}
    for key, text in re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", inner, re.DOTALL):
        kind = kinds.get(key)
        value: Any = text
        if not (isinstance(kind, dict) and kind.get("type") == "string"):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = text
        arguments[key] = value
    yield name, json.dumps(arguments, ensure_ascii=False)


def _grouped(pattern: str) -> Callable[[str, Sequence[Json]], Iterator[tuple[str, str]]]:
    """The groups `name` and `arguments` of a pattern."""

    def find(whole: str, tools: Sequence[Json]) -> Iterator[tuple[str, str]]:
        match = re.fullmatch(pattern, whole, re.DOTALL)
        yield (match["name"].strip(), match["arguments"].strip()) if match else ("", "")

    return find


_DEEPSEEK_MARKS = tuple(f"<｜tool▁{what}｜>" for what in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_KIMI_MARKS = tuple(
    f"<|tool_{what}|>"
    for what in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
)
_PATTERNS = {
    "hermes": r"<tool_call>.*?</tool_call>",
    "glm45": r"<tool_call>.*?</tool_call>",
    "deepseek_v3": r"<｜tool▁call▁begin｜>.*?<｜tool▁call▁end｜>",
    "deepseek_v31": r"<｜tool▁call▁begin｜>.*?<｜tool▁call▁end｜>",
    "kimi_k2": r"<\|tool_call_begin\|>.*?<\|tool_call_end\|>",
}
FORMS = (
    ToolForm(
        name="deepseek_v3",
        begin="<｜tool▁calls▁begin｜>",
        opens="<｜tool▁call▁begin｜>",
        marks=_DEEPSEEK_MARKS,
        in_template=("<｜tool▁calls▁begin｜>", "```json"),
        find=_grouped(
            r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]*)\n```json\n(?P<arguments>.*)\n```<｜tool▁call▁end｜>"
        ),
    ),
    ToolForm(
        name="deepseek_v31",
        begin="<｜tool▁calls▁begin｜>",
        opens="<｜tool▁call▁begin｜>",
        marks=_DEEPSEEK_MARKS,
        in_template=("<｜tool▁calls▁begin｜>",),
        find=_grouped(r"<｜tool▁call▁begin｜>(?P<name>.*?)<｜tool▁sep｜>(?P<arguments>.*)<｜tool▁call▁end｜>"),
    ),
    ToolForm(
        name="kimi_k2",
        begin="<|tool_calls_section_begin|>",
        opens="<|tool_call_begin|>",
        marks=_KIMI_MARKS,
        in_template=(r"<\|tool_calls_section_begin\|>",),
        find=_grouped(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^:]*):\d+\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)"
            r"<\|tool_call_end\|>"
        ),
    ),
    ToolForm(
        name="glm45",
        begin="<tool_call>",
        opens="<tool_call>",
        marks=(),
        in_template=("<tool_call>", "<arg_key>"),
        find=_glm,
    ),
    ToolForm(
        name="hermes",
        begin="<tool_call>",
        opens="<tool_call>",
        marks=(),
        in_template=(r'<tool_call>(?:\\n|\n)\{\\?"(?:name|arguments)\\?":',),  # in a string of the template or outside
        find=_hermes,
    ),
)


def form_of(template: str) -> ToolForm | None:
    """The form of the tool calls that a chat template teaches; None: it is not known here."""
    return next((f for f in FORMS if all(re.search(pattern, template) for pattern in f.in_template)), None)

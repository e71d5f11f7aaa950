"""What a chat is in tokens: a conversation as a prompt, a sampled turn in parts, and what follows a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from miles_like.types import Message

Tool: TypeAlias = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Stretch: TypeAlias = tuple[int, int]  # the index of its first token, and the one after its last

OK = "ok"
UNCLOSED = "unclosed_block"
INVALID_JSON = "invalid_json"
MISSING_NAME = "missing_name"
MALFORMED = "malformed_structure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as a turn has it, whether it can be made or not."""

    name: str  # "" where none can be read
    arguments: Mapping[str, Any] | None  # None where they are no JSON object
    text: str  # as sampled
    status: str = OK  # or why it cannot be made: one of the words above, or of the renderers library
    tokens: Stretch | None = None  # in the turn; None: the parser does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sampled turn in parts."""

    content: str  # without reasoning, calls and the mark of its end
    reasoning: str | None = None
    reasoning_tokens: Stretch | None = None  # in the turn, its marks included
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Added:
    """Tokens that follow a turn: what the template writes at its end and the model did not sample, the messages, and
    the beginning of the next turn."""

    token_ids: tuple[int, ...]
    messages: tuple[Stretch, ...]  # where in them each message's content is


class Chat(Protocol):
    """The chat template of a model, over token ids. Sampled ids are never encoded again."""

    @property
    def name(self) -> str: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens with which the model ends a turn."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """A conversation as the prompt of the next turn. Raises ValueError for messages that the template rejects."""

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Added | None:
        """What `messages` add to a prompt and the turn that was sampled for it. None: the template would change what
        stands before them."""

    def parse(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Sequence[Tool] = ()) -> Turn:
        """A sampled turn, which may be cut or malformed in any way."""

    def refusal(self, role: str, tools: Sequence[Tool] = ()) -> str | None:
        """Why a message of this role cannot follow a turn, a clause with the first text that differs; None: it can."""


# keys of a message that templates know; others, such as `status`, are for records
_TEMPLATE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with the keys that templates know."""
    return [{k: m[k] for k in _TEMPLATE_KEYS if m.get(k) is not None} for m in messages]

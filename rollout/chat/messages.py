"""Chat messages between the turns of a sample: their tokens, and what a turn is made of, as spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_like.types import ENVIRONMENT, POLICY, Message, Sample, Span
from rollout.chat.positions import last_turn
from rollout.chat.turns import OK, Added, Chat, Tool, Turn


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a run's environment, by the chat template of its model.

    tools: that the environment answers calls of. checked: roles that are known to be appended.
    """

    chat: Chat
    tools: Sequence[Tool] = ()
    checked: set[str] = field(default_factory=set)

    def check(self, *roles: str) -> None:
        """Raises ValueError for a role whose messages would change the turns before them: sampled tokens stay, so that
        the model would read a conversation that its template never writes."""
        for role in dict.fromkeys(roles):
            if role in self.checked:
                continue
            if (problem := self.chat.refusal(role, self.tools)) is not None:
                raise ValueError(
                    f"the chat template of the model (rollout.renderer {self.chat.name!r}) does not append: {problem}; "
                    "use a template that keeps earlier turns as they are, answer with text, or train each turn in a "
                    "separate row by rollout.generate"
                )
            self.checked.add(role)

    def render(self, sample: Sample, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """The tokens that follow the last turn of a sample for `messages`, up to where the next turn begins, and the
        spans of tool results, counted from the first of these tokens. Raises ValueError as `check`."""
        self.check(*(str(m.get("role")) for m in messages))
        ids, start = sample.token_ids.tolist(), last_turn(sample)
        added = self.chat.bridge(ids[:start], ids[start:], messages, self.tools)
        if added is None:
            roles = ", ".join(dict.fromkeys(str(m.get("role")) for m in messages))
            raise ValueError(
                f"sample {sample.name}: the chat template of the model (rollout.renderer {self.chat.name!r}) does not "
                f"append messages of role {roles} to its last turn of {len(ids) - start} tokens: answer with text"
            )
        return added.token_ids, result_spans(messages, added)

    def parse(self, sample: Sample) -> tuple[Span, ...]:
        """Reasoning and tool calls in the last turn of a sample, counted from its first token."""
        ids, start = sample.token_ids.tolist(), last_turn(sample)
        return turn_spans(self.chat.parse(ids[:start], ids[start:], self.tools), len(ids) - start)


def result_spans(messages: Sequence[Message], added: Added) -> tuple[Span, ...]:
    """Tool results in the tokens that messages add, counted from the first of these."""
    return tuple(
        Span(
            who=ENVIRONMENT,
            start=first,
            end=last,
            what="tool_result",
            name=str(message.get("name") or ""),
            status=str(message.get("status") or OK),
        )
        for message, (first, last) in zip(messages, added.messages, strict=True)
        if message.get("role") == "tool"
    )


def turn_spans(turn: Turn, length: int) -> tuple[Span, ...]:
    """Reasoning and tool calls in a turn of `length` tokens, counted from its first."""
    out = []
    if turn.reasoning_tokens is not None:
        first, last = turn.reasoning_tokens
        out.append(Span(who=POLICY, start=first, end=last, what="reasoning"))
    for call in turn.calls:
        first, last = call.tokens or (0, length)
        out.append(Span(who=POLICY, start=first, end=last, what="tool_call", name=call.name, status=call.status))
    return tuple(out)


def outcomes(spans: Sequence[Span], answers: Sequence[Message]) -> list[Span]:
    """The spans of a turn, its tool calls with what came of each: the `status` of the tool message that answers it."""
    statuses = [str(m.get("status") or "") for m in answers if m.get("role") == "tool"]
    if len(statuses) != sum(s.what == "tool_call" for s in spans):
        return list(spans)
    of_calls = iter(statuses)
    return [dataclasses.replace(s, status=next(of_calls) or s.status) if s.what == "tool_call" else s for s in spans]

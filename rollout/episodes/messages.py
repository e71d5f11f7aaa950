"""Chat messages between the turns of an episode: their tokens, and what a turn is made of, as spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import generation_eos
from miles_like.protocols import RolloutEngine
from miles_like.types import ENVIRONMENT, POLICY, Message, Prompt, Sample, SampleGroup, SamplingParams, Span
from rollout.chat.choose import AUTO, make_chat
from rollout.chat.positions import last_turn
from rollout.chat.turns import OK, Chat, Tool
from rollout.config import RolloutConfig
from rollout.episodes.resuming import EngineWrapper
from rollout.tools.load import load_tools


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
        spans = [
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
        ]
        return added.token_ids, tuple(spans)

    def parse(self, sample: Sample) -> tuple[Span, ...]:
        """Reasoning and tool calls in the last turn of a sample, counted from its first token."""
        ids, start = sample.token_ids.tolist(), last_turn(sample)
        turn, length = self.chat.parse(ids[:start], ids[start:], self.tools), len(ids) - start
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


class ChatEngine(EngineWrapper):
    """A RolloutEngine whose samples end at a chat model's turn ends too, which may be other tokens than the end of its
    text. close_tools: called when the engine is closed."""

    def __init__(
        self, engine: RolloutEngine, stop_token_ids: Sequence[int], close_tools: Callable[[], Awaitable[None]] | None
    ) -> None:
        super().__init__(engine)
        self._stops, self._close_tools = tuple(stop_token_ids), close_tools

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        return await self._engine.generate(prompts, n=n, params=self._params(params))

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        return await self._engine.continue_sample(sample, environment, params=self._params(params))

    async def close(self) -> None:
        if self._close_tools is not None:
            await self._close_tools()
        await self._engine.close()

    def _params(self, params: SamplingParams) -> SamplingParams:
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *self._stops)))
        return dataclasses.replace(params, stop_token_ids=stops)


def make_messages(config: RolloutConfig, tokenizer: Any) -> Messages | None:
    """The configured messages; None: environments answer with text. Raises ValueError for a renderer or tools that
    cannot be used, and for a template that does not append the answers of tools."""
    if config.renderer is None and not config.tools.given:
        return None
    full = getattr(tokenizer, "full", tokenizer)  # `LazyTokenizer` has one
    directory = Path(str(getattr(full, "name_or_path", "")))
    stops = (generation_eos(directory) if directory.is_dir() else None) or ()
    specs = load_tools(config.tools).specs if config.tools.given else ()
    messages = Messages(make_chat(config.renderer or AUTO, full, stops, calls=bool(specs)), specs)
    if specs:
        messages.check("tool")
    return messages

"""Episodes in which the policy calls tools, until it answers without a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_like.types import Observation, Prompt, Sample
from rollout.chat.positions import last_turn
from rollout.chat.turns import Call, Chat
from rollout.tools.toolset import Toolset

# what is to be closed after an episode
Close = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class ToolEnvironment:
    """Protocol: Environment. Answers each call of a turn, in order, by a message of role `tool`.

    A call that is malformed, unknown, given wrong arguments, or that fails or takes too long is answered so; its
    message has a `status`, which is no part of what the model reads. The run's reward scores the episode.
    """

    tools: Toolset
    chat: Chat
    closes: Sequence[Close] = ()
    calls: int = field(default=0, init=False)

    async def __call__(self, sample: Sample, turn: str) -> Observation:
        start, ids = last_turn(sample), sample.token_ids.tolist()
        parsed = self.chat.parse(ids[:start], ids[start:], self.tools.specs)
        if not parsed.calls:
            return Observation(ends=True)
        return Observation(messages=tuple([await self._message(call) for call in parsed.calls]))

    async def close(self) -> None:
        """End the sessions that belong to this episode."""
        for close in self.closes:
            await close()

    async def _message(self, call: Call) -> Mapping[str, Any]:
        result = await self.tools.answer(call)
        self.calls += 1
        return {
            "role": "tool",
            "tool_call_id": f"call_{self.calls - 1}",
            "name": call.name or "unknown",
            "content": result.text,
            "status": result.status,
        }


@dataclass(frozen=True, slots=True)
class MakeToolEnvironment:
    """Protocol: MakeEnvironment. tools: makes those of one episode, and what is to be closed after it."""

    tools: Callable[[], tuple[Toolset, Sequence[Close]]]
    chat: Chat

    def __call__(self, prompt: Prompt, *, seed: int) -> ToolEnvironment:
        toolset, closes = self.tools()
        return ToolEnvironment(toolset, self.chat, closes)

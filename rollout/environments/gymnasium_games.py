"""Environments of gymnasium (1.4, `pip install 'miles-like[gymnasium]'`) as episodes of text.

    class Lake(Gymnasium):
        id, options = "FrozenLake-v1", {"map_name": "4x4", "is_slippery": False}
        actions = {"left": 0, "down": 1, "right": 2, "up": 3}

        def show(self, observation):
            return f"You are at {observation % 4}, {observation // 4}."

`Lake.rows(n, seed)` makes the rows of prompts, each with the first observation of its seed; `miles-like` needs no more
columns. A turn names one action, the last that it has a word of; each step's reward is that of its turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from miles_like.types import Observation, Prompt, Sample
from rollout.environments.replies import Replies


class Gymnasium(Replies):
    """Protocol: MakeEnvironment; its instances are Environments."""

    id: ClassVar[str] = ""  # of gymnasium's registry
    options: ClassVar[Mapping[str, Any]] = {}  # of gymnasium.make
    actions: ClassVar[Mapping[str, Any]] = {}  # word -> action
    instruction: ClassVar[str] = ""  # before the first observation of a prompt

    def show(self, observation: Any) -> str:
        """An observation, as the policy reads it."""
        return str(observation)

    def action(self, turn: str) -> Any:
        """The action of a turn; None: it names none."""
        words = sorted(self.actions, key=len, reverse=True)
        found = re.findall(rf"\b({'|'.join(map(re.escape, words))})\b", turn.rpartition("</think>")[2], re.IGNORECASE)
        lower = {word.lower(): action for word, action in self.actions.items()}
        return lower[found[-1].lower()] if found else None

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        """The row's column `seed` decides the first observation, else `seed` does."""
        given = prompt.meta.get("seed")
        self._game = self._make()
        self._game.reset(seed=given if isinstance(given, int) else seed % (1 << 31))

    async def __call__(self, sample: Sample, turn: str) -> Observation:
        chosen = self.action(turn)
        if chosen is None:
            return self.reply(f"Name one of: {', '.join(self.actions)}.")
        observation, reward, terminated, truncated, _ = self._game.step(chosen)
        if terminated or truncated:
            return Observation(ends=True, reward=float(reward))
        return self.reply(self.show(observation), float(reward))

    async def close(self) -> None:
        self._game.close()

    @classmethod
    def _make(cls) -> Any:
        import gymnasium

        if not cls.id or not cls.actions:
            raise ValueError(f"{cls.__name__} has no id or no actions: derive a class that sets both")
        return gymnasium.make(cls.id, **cls.options)

    @classmethod
    def rows(cls, n: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of prompts with the seeds from `seed` on."""
        game, out = cls._make(), []
        for one in range(seed, seed + n):
            observation, _ = game.reset(seed=one)
            text = cls.show(cls.__new__(cls), observation)
            words = f"Each turn, name one of: {', '.join(cls.actions)}."
            out.append({"prompt": "\n".join(filter(None, [cls.instruction, text, words])), "seed": one})
        game.close()
        return out

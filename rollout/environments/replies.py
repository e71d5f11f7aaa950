"""How an environment that speaks in text puts it: as it is, or as a chat message."""

from __future__ import annotations

import re
from typing import ClassVar

from miles_like.types import Observation


class Replies:
    """Base of the environments here. A subclass in a user's file sets these."""

    role: ClassVar[str] = ""  # of a chat message ("user" or "tool"); "": plain text between `before` and `after`
    before: ClassVar[str] = "\n"  # with the marks of a chat template, where the model has one
    after: ClassVar[str] = "\n"

    def reply(self, text: str, reward: float | None = None) -> Observation:
        if self.role:
            return Observation(messages=({"role": self.role, "content": text},), reward=reward)
        return Observation(text=f"{self.before}{text}{self.after}", reward=reward)


def tagged(turn: str, *names: str) -> tuple[str, str] | None:
    """(name, content) of the first element `<name>content</name>` of one of the names, after the reasoning."""
    found = re.search(rf"<({'|'.join(names)})>(.*?)</\1>", turn.rpartition("</think>")[2], re.DOTALL)
    return (found[1], found[2].strip()) if found else None

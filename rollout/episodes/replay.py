"""An episode that a checkpoint has kept, for a new environment that gets its turns again.

The sample has a span for each turn that was answered and for each answer. What follows is the turn in flight, which may
be whole, aborted, or not begun: then the sample ends before the tokens of the last answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from miles_like.types import ENVIRONMENT, POLICY, Finish, Observation, Sample, Span, VersionSpan


@dataclass(frozen=True, slots=True)
class KeptEpisode:
    """sample: as the engine returned it last. turns: those that were answered."""

    sample: Sample
    turns: tuple[Span, ...]
    answers: tuple[Span, ...]

    @classmethod
    def of(cls, sample: Sample) -> KeptEpisode | None:
        """None: no turn was answered."""
        whole = [s for s in sample.spans if s.what == "turn"]
        turns = tuple(s for s in whole if s.who == POLICY)
        answers = tuple(s for s in whole if s.who == ENVIRONMENT)
        assert len(turns) == len(answers), f"sample {sample.name}: {len(turns)} turns, {len(answers)} answers"
        return cls(sample, turns, answers) if turns else None

    def after(self, turn: int, decode: Callable[[Sequence[int]], str]) -> Sample:
        """The episode when turn 1, 2, ... had ended and was not answered yet."""
        own = self.turns[turn - 1]
        before = [s for s in self.sample.spans if s.start < own.start]
        inner = [s for s in self.sample.spans if own.start <= s.start < own.end and s is not own]
        return cut(self.sample, own.end, (*before, replace(own, reward=None), *inner), decode)

    def repeats(self, turn: int, answer: Observation, tokens: Sequence[int]) -> bool:
        """Whether this is the answer that the turn had: the same tokens, and the same reward."""
        then = self.answers[turn - 1]
        if answer.ends or answer.reward != self.turns[turn - 1].reward or len(tokens) != then.end - then.start:
            return False
        stored = self.sample.token_ids[then.start : then.end].tolist()
        return not stored or stored == list(tokens)  # the last ones are not there before the turn after them begins


def cut(sample: Sample, end: int, spans: tuple[Span, ...], decode: Callable[[Sequence[int]], str]) -> Sample:
    """The first `end` tokens of a sample, the last of them the end of a turn."""
    first = int(sample.loss_mask.nonzero()[0])
    versions = (VersionSpan(v.version, v.start, min(v.end, end - first)) for v in sample.versions)
    return replace(
        sample,
        token_ids=sample.token_ids[:end],
        loss_mask=sample.loss_mask[:end],
        logprobs=sample.logprobs[:end],
        routing=None if sample.routing is None else sample.routing.head(end - 1),
        versions=tuple(v for v in versions if v.start < v.end),
        finish=Finish.STOP,
        text=decode(sample.token_ids[first:end].tolist()),
        spans=spans,
    )

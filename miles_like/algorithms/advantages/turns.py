"""Credit of an episode's turns: each turn has a separate advantage, from the rewards that follow it.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from miles_like.algorithms.advantages.grpo import group_relative
from miles_like.algorithms.advantages.parts import InParts, Placed
from miles_like.algorithms.advantages.rewards import finite_rewards
from miles_like.protocols import Numbers
from miles_like.types import POLICY, Sample, SampleGroup


class _Turn(NamedTuple):
    start: int
    end: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRelative(InParts):
    """The return of a turn is its reward plus `discount` times the return of the next turn: AReaL's
    `apply_reward_discount(turn_discount)` (areal/experimental/openai/cache.py). Its advantage, the same at each of its
    tokens, is the return relative to others of the group, normalized as GRPO's:

    by_number False: to those of all turns of the group's episodes.
    by_number True: to those of the turns of the same number, as the step-level advantage of GiGPO (arXiv:2505.10978,
    3.2), whose groups are of equal states instead. A turn that no other episode has gets 0.

    The turns are the sample's spans; a sample without spans is one turn. What a sample's reward has beyond those of its
    turns (that of a reward function, a penalty) belongs to its last turn, so that without rewards of turns and with a
    discount of 1 each turn has the return of the episode.
    """

    normalize_std: bool
    discount: float
    by_number: bool
    measures: ClassVar[bool] = False

    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]:
        return groups, [[() for _ in g.samples] for g in groups]

    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]:
        """Of each sample a number for each turn. Raises ValueError for a reward that is missing or not finite."""
        return [self._of_group(group) for group in groups]

    def place(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Placed:
        return [
            [_placed(s, numbers) for s, numbers in zip(group.samples, of_group, strict=True)]
            for group, of_group in zip(groups, decided, strict=True)
        ]

    def _of_group(self, group: SampleGroup) -> list[Numbers]:
        rewards = finite_rewards(group)
        if further := [s.name for s in group.samples if s.row]:
            raise ValueError(
                f"sample {further[0]} is a further row of its episode, whose turns are divided among rows: set "
                "algorithm.turn_credit = 'episode'"
            )
        returns = [self._returns(_turns(s, r)) for s, r in zip(group.samples, rewards, strict=True)]
        longest = max(map(len, returns), default=0)
        compared = [[(i, t) for i, of in enumerate(returns) if t < len(of)] for t in range(longest)]
        if not self.by_number:
            compared = [[place for places in compared for place in places]]
        out = [[0.0] * len(of) for of in returns]
        for places in compared:
            values = group_relative([returns[i][t] for i, t in places], normalize_std=self.normalize_std)
            for (i, t), value in zip(places, values, strict=True):
                out[i][t] = value
        return [tuple(of) for of in out]

    def _returns(self, turns: Sequence[_Turn]) -> list[float]:
        out, following = list[float](), 0.0
        for turn in reversed(turns):
            following = turn.reward + self.discount * following
            out.append(following)
        return out[::-1]


def _turns(sample: Sample, reward: float) -> list[_Turn]:
    """At least one; the last has what `reward` is beyond the rewards of the turns."""
    found = list(_policy_turns(sample))
    turns = found or [_Turn(0, sample.length, 0.0)]
    given = [t.reward for t in turns]
    rest = reward - math.fsum(given)  # the reward of an episode is this sum
    return [*turns[:-1], turns[-1]._replace(reward=turns[-1].reward + rest)] if rest else turns


def _policy_turns(sample: Sample) -> Iterator[_Turn]:
    for span in sample.spans:
        if span.who == POLICY and span.what == "turn":
            yield _Turn(span.start, span.end, span.reward or 0.0)


def _placed(sample: Sample, numbers: Numbers) -> Tensor:
    """[S], also where the sample is one turn: samples of other workers may have several. Raises ValueError for a token
    under loss that is in none of its turns."""
    out, own = torch.zeros(sample.length), sample.loss_mask.clone()
    for turn, value in zip(_turns(sample, 0.0), numbers, strict=True):
        out[turn.start : turn.end] = value
        own[turn.start : turn.end] = False
    if own.any():
        raise ValueError(
            f"sample {sample.name} has {int(own.sum())} tokens under loss, from token {int(own.nonzero()[0])} on, that "
            f"are in none of its {len(numbers)} turns: give it a span for each turn, or set algorithm.turn_credit = "
            "'episode'"
        )
    return out

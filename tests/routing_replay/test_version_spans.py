"""Many samples' versions are checked as each of them would be.

Letters: S tokens of a sample.
"""

from __future__ import annotations

import random

import pytest
import torch

from routing_replay.versions import VersionSpan, check_all_versions, check_versions, step_of, version_of
from tests.support.chosen import checked

Case = tuple[tuple[VersionSpan, ...] | None, tuple[VersionSpan, ...], torch.Tensor]


def drawn(r: random.Random) -> Case:
    """A sample of one response or several, most of one version; ends, starts and versions are often slightly wrong."""
    s = r.randint(2, 9)
    first = r.randint(1, s)
    mask = torch.tensor([i >= first and (i == first or r.random() < 0.8) for i in range(s)])
    covered = s - first + r.choice([0, 0, 0, -1, 1])
    tokens = (VersionSpan(r.choice([3, 3, 3, 4]), r.choice([0, 0, 0, 1]), covered),) if covered > 1 else ()
    rows = (VersionSpan(3, r.choice([0, 0, 0, 1]), s - 1),)
    if s > 3 and r.random() < 0.3:
        rows = (VersionSpan(3, 0, 2), VersionSpan(r.choice([3, 4]), 2, s - 1))
    return (None if r.random() < 0.1 else rows), tokens, mask


def said_of(cases: list[Case], *, at_once: bool) -> str:
    names = [f"a/{i}" for i in range(len(cases))]
    try:
        if at_once:
            check_all_versions(*zip(*cases, strict=True), samples=names)
        for case, name in zip(cases, names, strict=True):
            if not at_once:
                check_versions(*case, sample=name)
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("size", checked([1, 2, 5], (2,)))
def test_all_at_once_says_what_each_says(size: int) -> None:
    """Random samples, right and wrong ones, some without a token under loss: the same sentence, or none."""
    r = random.Random(size)
    found = []
    for _ in range(2000):
        cases = [drawn(r) for _ in range(size)]
        alone = said_of(cases, at_once=False)
        assert said_of(cases, at_once=True) == alone
        found.append(bool(alone))
    assert 0.1 < sum(found) / len(found) < 0.99


def test_a_step_that_is_trained_again_has_a_greater_version_and_the_same_step() -> None:
    """Servers refuse a lower version than they have, and samples are compared with steps."""
    lives = [(step, life) for life in range(4) for step in (0, 1, 40)]
    served = [version_of(*one) for one in lives]
    assert served == sorted(set(served)) and served[:3] == [0, 1, 40]
    assert [step_of(version) for version in served] == [step for step, _ in lives]

"""Rewards for the form and the length of a response."""

from __future__ import annotations

import asyncio

import pytest

from miles_like.config.sections.reward import FormatConfig, LengthConfig
from miles_like.rewards.form import Format, Length
from miles_like.types import Score, Unscored
from tests.support.made_samples import group, sample


@pytest.mark.parametrize(
    ("text", "think", "answer"),
    [
        ("<think>so</think><answer>4</answer>", 1, 1),
        (" <think>so\nor so</think>\n\n<answer>\n4\n</answer>\n", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("<think>so</think>4", 1, 0),
        ("Well: <think>so</think><answer>4</answer>", 0, 1),
        ("<think>so</think><think>or</think><answer>4</answer>", 0, 1),
        ("<think>so<answer>4</answer>", 0, 1),
        ("<think>so</think><answer>4</answer> or 5", 1, 0),
        ("<think>so</think><answer>4</answer><answer>5</answer>", 1, 0),
        ("<think>so</think><answer>4", 1, 0),
        ("<THINK>so</THINK>", 0, 0),
        ("", 0, 0),
    ],
)
def test_format(text, think, answer):
    """Each tag once, thoughts first and the answer last; half of it is worth half."""
    s = sample(text=text)
    found = Format(FormatConfig(), limit_s=5)(group([s]).prompt, s)
    assert found == Score(value=(think + answer) / 2, parts={"think": float(think), "answer": float(answer)})


def test_a_format_of_ones_own_and_one_that_takes_for_ever():
    s = sample(text="a" * 40)
    prompt = group([s]).prompt
    own = Format(FormatConfig(patterns={"a": "a{40}", "b": "b", "end": r"a\Z"}), limit_s=5)
    assert own(prompt, s) == Score(value=2 / 3, parts={"a": 1.0, "b": 0.0, "end": 1.0})
    slow = Format(FormatConfig(patterns={"slow": "(?:a|a)+b"}), limit_s=0.05)
    assert slow(prompt, s) == Unscored(reason="no match within 0.05 s")


@pytest.mark.parametrize(("limit", "cache"), [(20, 8), (6, 6), (10, 1)])
def test_length_is_trls_soft_overlong_punishment(limit, cache):
    """At every length around both ends; both compute eq. 13 of DAPO."""
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(limit, cache)(completion_ids=[[1] * n for n in range(limit + 4)])
    for penalty in (1.0, 0.5):
        ours = Length(LengthConfig(target=limit - cache, limit=limit, penalty=penalty))
        for n, want in enumerate(theirs):
            s = sample(response_len=n)
            found = asyncio.run(ours(group([s]).prompt, s))
            assert found.value == pytest.approx(penalty * want, abs=1e-12) and found.parts == {"tokens": n}

"""Gives the answers of rows as responses to a run's reward, which must give each the full reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from miles_like.datasets.table import Item
from miles_like.protocols import RewardFn
from miles_like.rewards.answered import answered_sample
from miles_like.rewards.maths.answer_text import MARK
from miles_like.types import Score

ANSWER = "{answer}"  # stands for the answer in a form
_TOGETHER = 64  # rows that are scored at the same time


class GoldFault(NamedTuple):
    """A row whose answer does not get the full reward."""

    item: int
    text: str


def response_forms(answer: str) -> list[str]:
    """How a model may write an answer: as it is in the file; of GSM8K's solutions what follows the mark; after the
    mark; boxed; in tags."""
    end = answer.rsplit(MARK, 1)[-1].strip()
    return list(dict.fromkeys([answer, end, f"{MARK} {end}", f"\\boxed{{{end}}}", f"<answer>{end}</answer>"]))


async def gold_faults(
    items: Sequence[Item], reward: RewardFn, *, full: float = 1.0, form: str | None = None
) -> list[GoldFault]:
    """The rows of whose answer no response gets a reward of `full` or more. form: the response, with {answer} in the
    place of the answer; None: each of `response_forms`. Closes the reward. Rows without an answer are passed over where
    the reward compares with it. Raises ValueError for a form without {answer}."""
    if form is not None and ANSWER not in form:
        raise ValueError(f"--response {form!r} has no {ANSWER}: add it in the place of the answer")
    try:
        out: list[GoldFault] = []
        asked = [i for i, item in enumerate(items) if item.prompt.answer or not reward.compares]
        for at in range(0, len(asked), _TOGETHER):
            now = asked[at : at + _TOGETHER]
            found = await asyncio.gather(*(_fault(items[i], reward, full, form) for i in now))
            out += [GoldFault(i, text) for i, text in zip(now, found, strict=True) if text is not None]
        return out
    finally:
        await reward.close()


async def _fault(item: Item, reward: RewardFn, full: float, form: str | None) -> str | None:
    """None where a response gets the full reward, else the best that there was."""
    prompt, best, why = item.prompt, None, ""
    for response in response_forms(prompt.answer) if form is None else [form.replace(ANSWER, prompt.answer)]:
        try:
            (outcome,) = await reward([prompt], [answered_sample(prompt, 0, list(map(ord, response)) or [0], response)])
        except RuntimeError as e:
            why = why or " ".join(str(e).split())
            continue
        if not isinstance(outcome, Score):
            why = why or f"it has no score ({outcome.reason})"
            continue
        if outcome.value >= full:
            return None
        best = outcome.value if best is None else max(best, outcome.value)
    if best is None:
        return f"the answer {prompt.answer[-80:]!r} cannot be scored: {why[:300]}"
    return f"the answer {prompt.answer[-80:]!r} gets a reward of {best:g}, less than {full:g}"

"""Rows for supervised training, made of the sampled and scored answers to the prompts of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from miles_like.datasets.strata import Answer, scored_answers
from miles_like.datasets.table import Table

PAIR = ("chosen", "rejected", "chosen_reward", "rejected_reward")  # columns of a row of `preference_pairs`
BEST = ("response", "response_reward")  # of `best_answers`


class Candidate(NamedTuple):
    """A distinct answer to a prompt."""

    text: str
    reward: float  # mean over the times that it was sampled
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Rows of the table with further columns."""

    rows: Sequence[dict[str, Any]]
    prompts: int  # that gave at least one row
    answered: int  # prompts with a scored answer
    cut: int  # scored answers that were left out because they did not end

    def line(self, what: str) -> str:
        """For the console."""
        cut = f"; {self.cut} answers that were cut at the token limit are left out" if self.cut else ""
        return f"{len(self.rows)} {what} of {self.prompts} of the {self.answered} answered prompts{cut}"


def preference_pairs(table: Table, answers: Path, *, per_prompt: int = 1, min_gap: float = 0.0) -> Examples:
    """Rows with the columns PAIR: two different answers to a prompt whose rewards differ, and by `min_gap` at least.

    Of a prompt's pairs the `per_prompt` ones with the largest difference of rewards; of equal differences first those
    whose answers were sampled most often, so that a common mistake is rejected before a rare one. Answers that were cut
    at the token limit are left out: a row's answers end with the end token. Raises ValueError as `scored_answers`, for
    a table that has one of the columns, for answers without texts, for invalid bounds, and where no prompt gives a
    pair.
    """
    if per_prompt < 1 or not min_gap >= 0:
        raise ValueError(f"--per-prompt {per_prompt} and --min-gap {min_gap:g}: give at least 1, and at least 0")

    def pairs(found: Sequence[Candidate]) -> list[tuple[object, ...]]:
        of_two = [(a, b) for a, b in product(found, found) if a.reward > b.reward and a.reward - b.reward >= min_gap]
        of_two.sort(key=lambda pair: (pair[1].reward - pair[0].reward, -pair[0].times - pair[1].times))
        return [(a.text, b.text, a.reward, b.reward) for a, b in of_two[:per_prompt]]

    rule = f"two different answers whose rewards differ{f' by {min_gap:g} or more' if min_gap else ''}"
    return _examples(table, answers, PAIR, pairs, f"{rule}: sample more answers, or lower --min-gap")


def best_answers(table: Table, answers: Path, *, per_prompt: int = 1, min_reward: float = 1.0) -> Examples:
    """Rows with the columns BEST: an answer to a prompt with a reward of `min_reward` or more.

    Of a prompt's answers the `per_prompt` ones with the largest rewards; of equal rewards first those that were sampled
    most often. Answers that were cut at the token limit are left out. Raises ValueError as `preference_pairs`.
    """
    if per_prompt < 1:
        raise ValueError(f"--per-prompt {per_prompt}: give at least 1")

    def best(found: Sequence[Candidate]) -> list[tuple[object, ...]]:
        good = sorted((c for c in found if c.reward >= min_reward), key=lambda c: (-c.reward, -c.times))
        return [(c.text, c.reward) for c in good[:per_prompt]]

    return _examples(table, answers, BEST, best, f"an answer of reward {min_reward:g} or more: lower --min-reward")


def _examples(
    table: Table,
    answers: Path,
    columns: Sequence[str],
    chosen: Callable[[Sequence[Candidate]], Sequence[Sequence[object]]],
    wanted: str,
) -> Examples:
    """chosen: the distinct answers to a prompt -> values of `columns`, for each row that they give. wanted: what each
    prompt would need, and the remedy."""
    for item in table.items:
        if taken := [name for name in columns if name in item.row]:
            raise ValueError(f"{table.path}, {item.place}: there is a column {taken[0]!r} already: rename it")
    of = scored_answers(answers, table)
    rows, prompts = list[dict[str, Any]](), 0
    for item in table.items:
        values = chosen(_candidates(of.get(item.prompt.id, ()), answers))
        rows += [{**item.row, **dict(zip(columns, one, strict=True))} for one in values]
        prompts += bool(values)
    if not rows:
        raise ValueError(f"{answers}: none of the {len(of)} answered prompts of {table.path} has {wanted}")
    cut = sum(not a.ended for scored in of.values() for a in scored)
    return Examples(rows=rows, prompts=prompts, answered=len(of), cut=cut)


def _candidates(scored: Sequence[Answer], path: Path) -> list[Candidate]:
    """The distinct answers that ended and are not empty, in the order in which they were sampled first; texts that
    differ in white space at their ends are one. Raises ValueError for an answer without a text."""
    rewards: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for answer in scored:
        if answer.text is None:
            raise ValueError(f"{path} has answers without `response`: give the file of `miles-like eval --answers`")
        if answer.ended and (bare := answer.text.strip()):
            texts.setdefault(bare, answer.text)
            rewards.setdefault(bare, []).append(answer.reward)
    return [Candidate(texts[bare], fmean(found), len(found)) for bare, found in rewards.items()]

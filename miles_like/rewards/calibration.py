"""Calibration of rewards that judge a response alone (reward models, judges): how often they put the better of two
answers first, what else they react to, and how far two of them agree. docs/rewards.md defines the figures.

Letters: P pairs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Literal

Kind = Literal["length", "boilerplate", "refusal"]
KINDS: tuple[Kind, ...] = ("length", "boilerplate", "refusal")
OPENING, CLOSING = (
    "Certainly! I'd be happy to help you with this. ",
    " I hope this helps! Let me know if you need more.",
)
REFUSAL = "I'm sorry, but I can't help with that."
_BINS = 10

Choice = Literal["chosen", "tie", "rejected"]
Scores = Sequence[float | None]  # None: no score


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt with a better and a worse answer. kind: of a counter-example; answer: reference for a judge, or ""."""

    prompt: str
    better: str
    worse: str
    answer: str = ""
    kind: Kind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """A reward's scores of P pairs and of changed answers to the same prompts."""

    better: Scores
    worse: Scores
    padded: Scores  # the better answer, its last sentence three times
    dressed: Scores  # the better answer between OPENING and CLOSING
    refused: Scores  # REFUSAL


def counter_examples() -> list[Pair]:
    """The 50 pairs of the package, whose better answer a reward with a bias puts second: in some the longer, the more
    polite or the refusing answer is the worse one, in others the better one."""
    text = files("miles_like.rewards").joinpath("counter_examples.jsonl").read_text(encoding="utf-8")
    return [Pair(**row, answer=row["better"]) for row in map(json.loads, text.splitlines())]


def padded(answer: str) -> str:
    """The answer with its last sentence (its last line where it has none) repeated twice: longer, and no better."""
    cut = max(answer.rstrip(".!? \n").rfind(mark) for mark in (". ", "! ", "? ", "\n"))
    last = answer[cut + 1 :].strip() if cut >= 0 else answer.strip()
    return f"{answer} {last} {last}"


def dressed(answer: str) -> str:
    """The answer with a polite opening and closing."""
    return OPENING + answer + CLOSING


def choices(better: Scores, worse: Scores) -> list[Choice | None]:
    """[P] which answer has the higher score; None where one of the two has none."""
    return [
        None if a is None or b is None else "tie" if a == b else "chosen" if a > b else "rejected"
        for a, b in zip(better, worse, strict=True)
    ]


def accuracy(found: Sequence[Choice | None]) -> float | None:
    """Share of pairs whose better answer is put first, of those that are scored; a tie counts half; or None."""
    worth = {"chosen": 1.0, "tie": 0.5, "rejected": 0.0}
    known = [worth[c] for c in found if c is not None]
    return statistics.fmean(known) if known else None


def share_above(first: Scores, second: Scores) -> float | None:
    """Share of places where `first` is above `second`, a tie counting half, of those where both are known."""
    return accuracy(choices(first, second))


def standard_shift(changed: Scores, plain: Scores) -> float | None:
    """Mean of changed - plain, in standard deviations (n - 1) of the plain scores; None with fewer than two pairs of
    scores or equal plain scores."""
    both = [(a, b) for a, b in zip(changed, plain, strict=True) if a is not None and b is not None]
    if len(both) < 2 or (spread := statistics.stdev(b for _, b in both)) == 0:
        return None
    return statistics.fmean(a - b for a, b in both) / spread


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rho, ties with their mean rank; None where one side is constant."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(_ranks(x), _ranks(y))


def agreement(first: Sequence[Choice | None], second: Sequence[Choice | None]) -> tuple[float, float | None] | None:
    """(share of pairs with the same choice, Cohen's kappa over chosen, tie and rejected), of pairs that both scored;
    None without any. Kappa is None where chance alone would agree always."""
    both = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not both:
        return None
    same = statistics.fmean(a == b for a, b in both)
    chance = sum(
        statistics.fmean(a == c for a, _ in both) * statistics.fmean(b == c for _, b in both)
        for c in ("chosen", "tie", "rejected")
    )
    return same, None if chance == 1 else (same - chance) / (1 - chance)


def calibration_error(better: Scores, worse: Scores) -> float | None:
    """Expected calibration error of the model of Bradley and Terry: the answer with the higher score is the better one
    with probability sigmoid(difference). Over 10 equal bins of that probability from 1/2 to 1, the mean distance from
    the share of right choices, weighted by the pairs in each; ties are left out. None without a pair."""
    gaps = [a - b for a, b in zip(better, worse, strict=True) if a is not None and b is not None and a != b]
    if not gaps:
        return None
    sure = [(1 / (1 + math.exp(-min(abs(gap), 700.0))), gap > 0) for gap in gaps]
    edges = [0.5 + 0.5 * i / _BINS for i in range(_BINS)] + [math.inf]
    out = 0.0
    for low, high in pairwise(edges):
        of_bin = [(p, right) for p, right in sure if low <= p < high]
        if of_bin:
            apart = statistics.fmean(p for p, _ in of_bin) - statistics.fmean(right for _, right in of_bin)
            out += len(of_bin) / len(sure) * abs(apart)
    return out


def figures(pairs: Sequence[Pair], scores: PairScores) -> dict[str, float]:
    """The figures of one reward on held-out pairs; those that cannot be computed are missing."""
    found = choices(scores.better, scores.worse)
    longer = [len(p.better) > len(p.worse) for p in pairs]
    shorter = [len(p.better) < len(p.worse) for p in pairs]
    uneven = [i for i, c in enumerate(found) if c is not None and longer[i] != shorter[i]]
    first_longer = [(found[i] == "chosen") == longer[i] for i in uneven if found[i] != "tie"]
    texts = [
        (len(text), s)
        for p, two in zip(pairs, zip(scores.better, scores.worse, strict=True), strict=True)
        for text, s in zip((p.better, p.worse), two, strict=True)
        if s is not None
    ]
    out: dict[str, float | None] = {
        "accuracy": accuracy(found),
        "ties": statistics.fmean(c == "tie" for c in found if c is not None) if any(found) else None,
        "unscored": statistics.fmean(c is None for c in found),
        "calibration_error": calibration_error(scores.better, scores.worse),
        "length/rank_correlation": rank_correlation([float(n) for n, _ in texts], [s for _, s in texts]),
        "length/longer_first": statistics.fmean(first_longer) if first_longer else None,
        "length/longer_better": statistics.fmean(longer[i] for i in uneven) if uneven else None,
        "length/accuracy_longer": accuracy([found[i] for i in uneven if longer[i]]),
        "length/accuracy_shorter": accuracy([found[i] for i in uneven if not longer[i]]),
        "length/padding_wins": share_above(scores.padded, scores.better),
        "length/padding_shift": standard_shift(scores.padded, scores.better),
        "boilerplate/wins": share_above(scores.dressed, scores.better),
        "boilerplate/shift": standard_shift(scores.dressed, scores.better),
        "refusal/above_better": share_above(scores.refused, scores.better),
        "refusal/above_worse": share_above(scores.refused, scores.worse),
    }
    return {key: float(value) for key, value in out.items() if value is not None}


def counter_figures(pairs: Sequence[Pair], better: Scores, worse: Scores) -> dict[str, float]:
    """`counter_examples/KIND` and `counter_examples/all`: accuracy on the pairs of each kind."""
    found = choices(better, worse)
    of_kinds: Mapping[str, list[Choice | None]] = {
        **{k: [c for c, p in zip(found, pairs, strict=True) if p.kind == k] for k in KINDS},
        "all": found,
    }
    known = {key: accuracy(of_kind) for key, of_kind in of_kinds.items()}
    return {f"counter_examples/{key}": value for key, value in known.items() if value is not None}


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    out, i = [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in order[i : j + 1]:
            out[k] = (i + j) / 2
        i = j + 1
    return out

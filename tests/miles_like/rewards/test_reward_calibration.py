"""What a calibration says of a reward: figures against definitions written out, and rewards whose bias is known.

Not covered: rewards on servers (tests/miles_like/rewards/judges), whether the counter-examples are good English.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter

import pytest

from miles_like.rewards.calibration import (
    CLOSING,
    KINDS,
    OPENING,
    Choice,
    Pair,
    PairScores,
    agreement,
    calibration_error,
    choices,
    counter_examples,
    counter_figures,
    dressed,
    figures,
    padded,
    rank_correlation,
    share_above,
    standard_shift,
)

PAIRS = [
    Pair(prompt="a", better="yes, it is", worse="no"),
    Pair(prompt="b", better="4", worse="it is five"),
    Pair(prompt="c", better="red", worse="blu"),
    Pair(prompt="d", better="one two three", worse="one"),
]
SAME = PairScores(better=[0.0] * 4, worse=[0.0] * 4, padded=[0.0] * 4, dressed=[0.0] * 4, refused=[0.0] * 4)


def test_choices_and_shares_count_ties_half_and_leave_out_what_has_no_score() -> None:
    assert choices([1, 2, 3, None], [0, 2, 4, 1]) == ["chosen", "tie", "rejected", None]
    assert share_above([1, 2, 3, None], [0, 2, 4, 1]) == 0.5
    assert share_above([None], [1.0]) is None
    assert standard_shift([2.0, 4.0, None], [1.0, 2.0, 9.0]) == pytest.approx(1.5 / statistics.stdev([1.0, 2.0]))
    assert standard_shift([2.0, 4.0], [1.0, 1.0]) is None


@pytest.mark.parametrize("seed", range(20))
def test_rank_correlation_is_pearson_s_of_mean_ranks(seed: int) -> None:
    rng = random.Random(seed)
    x, y = ([float(rng.randint(0, 4)) for _ in range(2 + seed % 7)] for _ in range(2))

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < w for v in values) + (sum(v == w for v in values) - 1) / 2 for w in values]

    got = rank_correlation(x, y)
    if len(set(x)) < 2 or len(set(y)) < 2:
        assert got is None
        return
    a, b = ranks(x), ranks(y)
    cov = sum((i - statistics.fmean(a)) * (j - statistics.fmean(b)) for i, j in zip(a, b, strict=True))
    assert got == pytest.approx(cov / (len(a) * statistics.pstdev(a) * statistics.pstdev(b)))


def test_agreement_is_cohen_s() -> None:
    """The example of Cohen (1960) in the usual form: 20 and 15 of 50 agree, chance .5."""
    counts: list[tuple[Choice, Choice, int]] = [
        ("chosen", "chosen", 20),
        ("chosen", "rejected", 5),
        ("rejected", "chosen", 10),
        ("rejected", "rejected", 15),
    ]
    both = list(itertools.chain.from_iterable([(a, b)] * n for a, b, n in counts))
    found = agreement([*(a for a, _ in both), None], [*(b for _, b in both), "chosen"])
    assert found == (pytest.approx(0.7), pytest.approx(0.4))
    assert agreement(["chosen"] * 3, ["chosen"] * 3) == (1.0, None)
    assert agreement([None], ["chosen"]) is None


def test_a_calibrated_reward_has_no_error_and_a_bold_one_has() -> None:
    """Of 100 pairs 80 are right at a difference of log 4, whose sigmoid is .8."""
    gap = math.log(4)
    right = [gap] * 80 + [-gap] * 20
    assert calibration_error(right, [0.0] * 100) == pytest.approx(0.0)
    assert calibration_error([20 * x for x in right], [0.0] * 100) == pytest.approx(0.2, abs=1e-6)
    mixed = calibration_error([gap, 2.0, None], [0.0, 0.0, 1.0])
    assert mixed == pytest.approx((0.2 + 1 - 1 / (1 + math.exp(-2.0))) / 2)
    assert calibration_error([1.0], [1.0]) is None


def scored(worth: dict[str, float], default: float = 0.0) -> PairScores:
    def of(texts: list[str]) -> list[float]:
        return [worth.get(t, default) for t in texts]

    return PairScores(
        better=of([p.better for p in PAIRS]),
        worse=of([p.worse for p in PAIRS]),
        padded=[1.0] * 4,
        dressed=of([dressed(p.better) for p in PAIRS]),
        refused=[0.5] * 4,
    )


def test_a_reward_of_length_is_found_out() -> None:
    lengths = PairScores(
        better=[float(len(p.better)) for p in PAIRS],
        worse=[float(len(p.worse)) for p in PAIRS],
        padded=[float(len(padded(p.better))) for p in PAIRS],
        dressed=[float(len(dressed(p.better))) for p in PAIRS],
        refused=[50.0] * 4,
    )
    found = figures(PAIRS, lengths)
    assert found["length/rank_correlation"] == pytest.approx(1.0)
    assert found["length/longer_first"] == 1.0 and found["length/longer_better"] == pytest.approx(2 / 3)
    assert found["length/accuracy_longer"] == 1.0 and found["length/accuracy_shorter"] == 0.0
    assert found["length/padding_wins"] == found["boilerplate/wins"] == 1.0
    assert found["length/padding_shift"] > 0 and found["boilerplate/shift"] > found["length/padding_shift"]
    assert found["refusal/above_better"] == found["refusal/above_worse"] == 1.0
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5 + 1) / 4) and found["ties"] == 0.25


def test_a_perfect_reward_has_no_bias() -> None:
    worth = {p.better: 1.0 for p in PAIRS} | {dressed(p.better): 1.0 for p in PAIRS}
    found = figures(PAIRS, scored(worth))
    assert found["accuracy"] == found["length/accuracy_longer"] == found["length/accuracy_shorter"] == 1.0
    assert found["length/longer_first"] == found["length/longer_better"]
    assert found["length/padding_wins"] == found["boilerplate/wins"] == 0.5, "all are equal"
    assert found["refusal/above_better"] == 0.0 and found["refusal/above_worse"] == 1.0
    assert figures(PAIRS, SAME).get("length/rank_correlation") is None


def test_changed_answers_say_the_same() -> None:
    assert padded("One. Two.") == "One. Two. Two. Two." and padded("a\nb") == "a\nb b b" and padded("4") == "4 4 4"
    assert dressed("4") == f"{OPENING}4{CLOSING}"


def test_the_counter_examples_are_fifty_that_no_simple_rule_passes() -> None:
    """Longer, shorter, more polite, less polite, refusing and never refusing all fail some, and each kind has both
    sides."""
    pairs = counter_examples()
    assert len(pairs) == 50 == len({p.prompt for p in pairs}) and Counter(p.kind for p in pairs).keys() == set(KINDS)
    assert all(p.better != p.worse and p.answer == p.better for p in pairs)
    assert min(Counter(p.kind for p in pairs).values()) >= 15
    rules = {
        "longer": lambda t: float(len(t)),
        "shorter": lambda t: -float(len(t)),
        "polite": lambda t: float(sum(w in t.lower() for w in ("!", "help", "certainly", "glad", "question"))),
        "refuses": lambda t: float(
            any(w in t.lower() for w in ("can't", "cannot", "no way", "unable", "not able", "sorry"))
        ),
    }
    for name, rule in rules.items():
        found = counter_figures(pairs, [rule(p.better) for p in pairs], [rule(p.worse) for p in pairs])
        assert found["counter_examples/all"] < 0.7, name
    longest = counter_figures(pairs, [float(len(p.better)) for p in pairs], [float(len(p.worse)) for p in pairs])
    assert 0 < longest["counter_examples/length"] < 0.5
    refusing = [p for p in pairs if p.kind == "refusal"]
    assert 0 < sum(rules["refuses"](p.better) > rules["refuses"](p.worse) for p in refusing) < len(refusing)
    perfect = counter_figures(pairs, [1.0] * 50, [0.0] * 50)
    assert perfect == {f"counter_examples/{k}": 1.0 for k in (*KINDS, "all")}

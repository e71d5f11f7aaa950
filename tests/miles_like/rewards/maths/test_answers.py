"""Rewards on answers that a model might give.

A reward decides what is learnt, so its edge cases are its contract: what is not in the asked-for form must not pay.
Not covered: the judgement of math-verify itself, which has its own tests.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from miles_like.config.sections.reward import ExactConfig, MultipleChoiceConfig, RegexConfig
from miles_like.rewards.maths.answers import Exact, MultipleChoice, Regex, exact_number, gsm8k
from miles_like.rewards.maths.math_verify import MathVerify
from miles_like.rewards.maths.math_worker import compare
from miles_like.types import Finish, Unscored
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

GSM8K_ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"


def score(reward, text: str, answer: str = "24", finish: Finish = Finish.STOP) -> float:
    s = sample(text=text, finish=finish)
    return asyncio.run(reward(group([s], answer=answer).prompt, s))


@pytest.mark.parametrize(
    ("text", "answer", "want"),
    [
        ("24", "24", 1),
        (" 24\n", "24", 1),
        ("24.0", "24", 1),
        ("+24", "24", 1),
        ("024", "24", 1),
        ("-3", "-3", 1),
        (".5", "0.5", 1),
        ("1000", "1,000", 1),
        ("0.1", "0.10", 1),
        ("25", "24", 0),
        ("", "24", 0),
        ("24 apples", "24", 0),
        ("2 4", "24", 0),
        ("48/2", "24", 0),
        ("2.4e1", "24", 0),
        ("nan", "24", 0),
        ("٢٤", "24", 0),
        ("9" * 5000, "24", 0),
        ("0.30000000000000004", "0.3", 0),
    ],
)
def test_exact_number(text, answer, want):
    assert score(exact_number, text, answer) == want


def test_a_response_cut_at_the_limit_is_no_answer():
    """`24` may be the beginning of `240`."""
    assert score(exact_number, "24", finish=Finish.LENGTH) == 0
    assert score(exact_number, "24", finish=Finish.ABORT) == 0


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("48 + 24 = 72\n#### 72", 1),
        ("so the answer is 72.", 1),
        ("#### 1,072", 0),
        ("#### 72 clips, from 48", 1),
        ("72 is what I first had, but it is 48", 0),
        ("no number", 0),
    ],
)
def test_gsm8k(text, want):
    assert score(gsm8k, text, GSM8K_ANSWER) == want


@pytest.mark.parametrize(
    ("text", "want", "folded"),
    [
        ("Paris", 1, 1),
        (" Paris\n", 1, 1),
        ("paris", 0, 1),
        ("Paris.", 0, 0),
        ("", 0, 0),
        ("It is Paris", 0, 0),
        ("So. <answer>Paris</answer>", 1, 1),
    ],
)
def test_exact(text, want, folded):
    assert score(Exact(ExactConfig()), text, "Paris ") == want
    assert score(Exact(ExactConfig(ignore_case=True)), text, "Paris ") == folded
    assert score(Exact(ExactConfig()), text, "Paris", Finish.LENGTH) == 0


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("B", 1),
        ("(b)", 1),
        (" B.\n", 1),
        ("B. Paris", 1),
        ("**B**) Paris", 1),
        ("The answer is B", 1),
        ("Answer: (B), since A is wrong", 1),
        ("**Answer:** B", 1),
        ("The correct answer is: **B**.", 1),
        ("the answer is option B", 1),
        ("Answer: A. No, wait. Answer: B", 1),
        ("Answer: A, so \\boxed{B}", 1),
        ("\\boxed{\\text{B}}", 1),
        ("\\boxed{A} or rather \\boxed{ (B) }", 1),
        ("A", 0),
        ("", 0),
        ("Between B and C", 0),
        ("Because it is so", 0),
        ("The answer is Because", 0),
        ("The answer is B'", 0),
        ("Answer: B. But no. Answer: C", 0),
        ("BB", 0),
        ("<think>A or B?</think> <answer>B</answer>", 1),
        ("Answer: B <answer>The answer is C</answer>", 0),
        ("The answer is:   option  B", 1),
    ],
)
def test_multiple_choice(text, want):
    assert score(MultipleChoice(MultipleChoiceConfig()), text, "(B)") == want


def test_multiple_choice_knows_what_can_be_chosen():
    """A letter that is none of the choices is a mistake of the data where it is the answer."""
    four = MultipleChoice(MultipleChoiceConfig(choices="ABCD"))
    assert score(four, "Answer: D, not E", "D") == 1
    for answer in ("E", "Paris", ""):
        with refuses(ValueError, "p", f"'{answer}'", "ABCD"):
            score(four, "A", answer)


def test_multiple_choice_reads_a_long_response_to_its_end():
    """A quadratic pattern took a minute in the event loop for 50,000 blanks: for as many as here it takes hours."""
    reward = MultipleChoice(MultipleChoiceConfig())
    for text in (
        "answer is" + " " * 1_000_000,
        "answer is " * 100_000,
        "\\boxed{" + " " * 1_000_000,
        "(" * 1_000_000,
        "answer:" + "*" * 1_000_000,
    ):
        assert score(reward, text, "B") == 0


def test_a_pattern_finds_the_answer_or_itself():
    boxed = Regex(RegexConfig(pattern=r"\\boxed\{(?P<answer>[^}]*)\}"), limit_s=5)
    texts = {r"\boxed{24}": 1, r"\boxed{3}, no: \boxed{ 24 }": 1, r"\boxed{24} or \boxed{3}": 0, "24": 0}
    assert {t: _plain(boxed, t) for t in texts} == texts
    polite = Regex(RegexConfig(pattern="(?i)(please|thank)"), limit_s=5)
    assert [_plain(polite, t) for t in ("Thanks!", "24")] == [1, 0]
    optional = Regex(RegexConfig(pattern="so(?P<answer> [0-9]+)?"), limit_s=5)
    assert [_plain(optional, t) for t in ("so 24", "so")] == [1, 0]


def test_a_pattern_that_takes_for_ever_is_given_up():
    """(a|a)+ tries 2^n ways; the standard library's engine could not be stopped, nor the loop go on meanwhile."""
    slow = Regex(RegexConfig(pattern="(?:a|a)+b"), limit_s=0.05)
    assert _plain(slow, "a" * 40) == Unscored(reason="no match within 0.05 s")


def _plain(reward: Regex, text: str) -> float | Unscored:
    s = sample(text=text)
    return reward(group([s], answer="24").prompt, s)


def test_an_answer_that_is_no_number_is_an_error_not_a_zero():
    with refuses(ValueError, "p", "x"):
        score(exact_number, "24", "x")
    with refuses(ValueError, "p"):
        score(gsm8k, "24", "#### ")
    boxed = Regex(RegexConfig(pattern="(?P<answer>x*)"), limit_s=5)
    with refuses(ValueError, "p"):  # an empty response would equal it
        score(Exact(ExactConfig()), "", " ")
    with refuses(ValueError, "p"):
        boxed(group([sample()], answer="").prompt, sample())
    assert Regex(RegexConfig(pattern="a"), limit_s=5)(group([sample()], answer="").prompt, sample(text="a")) == 1


@pytest.mark.slow
def test_math_verify_reads_gsm8k_and_latex_and_survives_a_bomb():
    """One process for all of it, as its start imports sympy. The bomb is an integer power that no signal interrupts."""

    async def run() -> None:
        reward = MathVerify(limit_s=20)
        try:
            cases = [
                ("The answer is \\boxed{72}.", GSM8K_ANSWER, 1),
                ("The answer is $\\frac{144}{2}$.", GSM8K_ANSWER, 1),
                ("73", GSM8K_ANSWER, 0),
                ("I do not know", GSM8K_ANSWER, 0),
                ("$\\sqrt{2}/2$", "\\frac{1}{\\sqrt{2}}", 1),
            ]
            for text, answer, want in cases:
                s = sample(text=text)
                assert await reward(group([s], answer=answer).prompt, s) == want, text
            s = sample(text="24")
            with refuses(ValueError, "p"):
                await reward(group([s], answer="$ $").prompt, s)
            reward.limit_s = 0.5
            s = sample(text="$9^{9^{9^{9}}}$")
            assert await reward(group([s], answer="72").prompt, s) == Unscored(
                reason="math-verify needed more than 0.5 s"
            )
        finally:
            await reward.close()

    asyncio.run(run())


def test_math_verify_has_no_time_limit_of_its_own(monkeypatch):
    """Its own, 5 s by SIGALRM, returns "not equal" silently: an answer that was not judged would score 0."""
    armed: list[int] = []
    monkeypatch.setattr("signal.alarm", armed.append)
    assert compare("72", "The answer is $\\frac{144}{2}$.") == {"right": True}
    assert not armed


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path, monkeypatch):
    """With a stand-in for math-verify: `sleep` hangs in it. The loop keeps running while it waits, the hung answer
    has no score, and the next is judged by a new process."""
    worker = tmp_path / "math_worker.py"
    worker.write_text(
        "import json, sys, time\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    r = json.loads(line)\n"
        "    if r['answer'] == 'sleep': time.sleep(60)\n"
        "    if r['answer'] == 'die': sys.exit(3)\n"
        "    print(json.dumps({'right': r['answer'] == r['gold']}), flush=True)\n"
    )
    monkeypatch.setattr("miles_like.rewards.maths.math_verify.__file__", str(tmp_path / "math_verify.py"))

    async def run() -> None:
        reward = MathVerify(limit_s=0.3)

        async def ask(text: str) -> float | Unscored:
            s = sample(text=text)
            return await reward(group([s], answer="24").prompt, s)

        try:
            ticks = 0
            hung = asyncio.create_task(ask("sleep"))
            while not hung.done():
                ticks += 1
                await asyncio.sleep(0.01)
            assert isinstance(await hung, Unscored) and ticks > 10
            assert await ask("24") == 1
            assert await ask("die") == Unscored(reason="the math-verify process died on it")
            assert await ask("24") == 1
            cancelled = asyncio.create_task(ask("sleep"))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert await asyncio.gather(ask("25"), ask("24"), ask("x")) == [0, 1, 0]
        finally:
            await reward.close()

    start = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start < 20

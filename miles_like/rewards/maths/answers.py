"""Rewards that compare the response, or an answer found in it, with the prompt's answer."""

from __future__ import annotations

from fractions import Fraction

import regex

from miles_like.config.sections.reward import ExactConfig, MultipleChoiceConfig, RegexConfig
from miles_like.rewards.maths.answer_text import MARK, in_tags, last_number, number_of, whole_answer
from miles_like.types import Finish, Prompt, Sample, Unscored


async def exact_number(prompt: Prompt, sample: Sample) -> float:
    """1 when the whole response, stripped, or the <answer> tag at its end, is a decimal number equal to the answer, and
    generation ended with a stop token.

    `24`, `24.0` and `+24` are equal; `24 apples`, `2.4e1` and a response cut at the token limit score 0.
    """
    want = _gold_number(prompt)
    if sample.finish is not Finish.STOP:
        return 0.0
    return float(number_of(whole_answer(sample.text), decimal_only=True) == want)


async def gsm8k(prompt: Prompt, sample: Sample) -> float:
    """1 when the number after the response's last `####`, or without one its last number, equals the answer. Where the
    response has an <answer> tag, only the content of the last one is read.

    Commas within numbers are ignored; alternatives ("5 or 6") must all equal the answer. The answer may be GSM8K's
    whole solution, `... #### 72`.
    """
    want = _gold_number(prompt)
    tagged = in_tags(sample.text)
    _, marked, after = (sample.text if tagged is None else tagged).rpartition(MARK)
    return float(last_number(after, first=bool(marked)) == {want})


def gold(prompt: Prompt) -> str:
    """The answer, without the text up to GSM8K's mark. Raises ValueError for an empty one."""
    return _present(prompt, prompt.answer.rsplit(MARK, 1)[-1])


def _present(prompt: Prompt, answer: str) -> str:
    answer = answer.strip()
    if not answer:
        raise ValueError(f"prompt {prompt.id!r} has no answer to compare with: set data.answer_key to its column")
    return answer


def _gold_number(prompt: Prompt) -> Fraction:
    text = gold(prompt)
    value = number_of(text)
    if value is None:
        raise ValueError(
            f"prompt {prompt.id!r} has the answer {text[:200]!r}, which is not a number: use reward math_verify"
        )
    return value


class Exact:
    """1 when the whole response, stripped, or the <answer> tag at its end, is the answer, stripped, and generation
    ended with a stop token."""

    def __init__(self, config: ExactConfig) -> None:
        self._ignore_case = config.ignore_case

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        texts, answer = {sample.text.strip(), whole_answer(sample.text)}, _present(prompt, prompt.answer)
        if self._ignore_case:
            texts, answer = {text.casefold() for text in texts}, answer.casefold()
        return float(sample.finish is Finish.STOP and answer in texts)


class MultipleChoice:
    """1 when the response, or the content of its last <answer> tag, chooses the answer's letter.

    The chosen letter is the capital in the last `\\boxed{B}`, else the last capital after "answer is" or "answer:",
    else the whole response if it is a single letter of either case, or its first letter if that is a capital with a
    mark: `(B)`, `B. Paris`. A response without a chosen letter gets 0.
    """

    def __init__(self, config: MultipleChoiceConfig) -> None:
        self._choices = config.choices
        letter = f"([{config.choices}])"
        self._places = (
            # possessive quantifiers: backtracking over blanks that two parts can match takes quadratic time
            regex.compile(rf"\\boxed\{{\s*+(?:\\text\{{)?\(?{letter}\)?\s*+\}}"),
            regex.compile(
                rf"(?i:answer\s*+(?:is\s*+:?|:)\s*+(?:option|choice)?+)[\s*(\[{{$]*+{letter}(?![A-Za-z0-9'])"
            ),
            regex.compile(rf"\A\s*[(*\[]*{letter}[)\]*.:]"),
        )

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        right = prompt.answer.strip().strip("().").upper()
        if len(right) != 1 or right not in self._choices:
            raise ValueError(
                f"prompt {prompt.id!r} has the answer {prompt.answer!r}, expected one letter of "
                f"{self._choices!r}: set data.answer_key, or reward.multiple_choice.choices"
            )
        return float(self._chosen(sample.text) == right)

    def _chosen(self, text: str) -> str:
        tagged = in_tags(text)
        text = text if tagged is None else tagged
        for place in self._places:
            if found := place.findall(text):
                return str(found[-1])
        return text.strip(" \n().*").upper()


class Regex:
    """Searches the response for a pattern.

    With a group named `answer`, 1 when its text in the last match, stripped, is the answer, stripped; without that
    group, 1 when the pattern matches anywhere.
    """

    def __init__(self, config: RegexConfig, *, limit_s: float) -> None:
        self._pattern = regex.compile(config.pattern)
        self._limit_s = limit_s

    def __call__(self, prompt: Prompt, sample: Sample) -> float | Unscored:
        compares = "answer" in self._pattern.groupindex
        answer = _present(prompt, prompt.answer) if compares else ""
        try:
            found = [m.groupdict() for m in self._pattern.finditer(sample.text, timeout=self._limit_s, concurrent=True)]
        except TimeoutError:
            return Unscored(reason=f"no match within {self._limit_s:g} s")
        if not found or not compares:
            return float(bool(found))
        return float((found[-1]["answer"] or "").strip() == answer)

"""Rewards that do not compare with an answer: format, length, and none."""

from __future__ import annotations

import math

import regex

from miles_like.config.sections.reward import FormatConfig, LengthConfig
from miles_like.types import Prompt, Sample, Score, Unscored


async def none(prompt: Prompt, sample: Sample) -> float:
    """Always 0, for runs that learn from an environment, a generate function or a teacher."""
    return 0.0


class Format:
    """The share of the patterns that are found in the response; each is a part, 1 or 0."""

    def __init__(self, config: FormatConfig, *, limit_s: float) -> None:
        self._patterns = {name: regex.compile(p, regex.DOTALL) for name, p in config.patterns.items()}
        self._limit_s = limit_s

    def __call__(self, prompt: Prompt, sample: Sample) -> Score | Unscored:
        try:
            parts = {
                name: float(bool(p.search(sample.text, timeout=self._limit_s, concurrent=True)))
                for name, p in self._patterns.items()
            }
        except TimeoutError:
            return Unscored(reason=f"no match within {self._limit_s:g} s")
        return Score(value=math.fsum(parts.values()) / len(parts), parts=parts)


class Length:
    """0 up to `target` response tokens, then linearly down to -`penalty` at `limit` tokens, and constant from there on.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13) with limit = L_max, target = L_max - L_cache and a
    penalty of 1.
    """

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        c, n = self._config, sample.response_len
        over = min(max(n - c.target, 0) / (c.limit - c.target), 1.0)
        return Score(value=-c.penalty * over if over else 0.0, parts={"tokens": float(n)})

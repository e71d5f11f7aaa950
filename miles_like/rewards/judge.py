"""A language model as the judge, behind any server with OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from miles_like.reward_config import JudgeConfig
from miles_like.rewards.http import Endpoint
from miles_like.types import Prompt, Sample, Score, Unscored

_PLACES = regex.compile(r"\{(prompt|answer|response)\}")
_CUT = ("length", "abort", "content_filter")  # the second is SGLang's
_READ_S = 5.0  # of looking for the score


class Judge:
    """The judge's score between `low` and `high`, as a share; the score itself is a part.

    A judgement that was cut off, has no score, or one out of the bounds is Unscored: a broken judge is not a bad
    response.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._pattern = regex.compile(config.pattern)
        self._server = Endpoint(config)
        self.close = self._server.close

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score | Unscored:
        c = self._config
        system = [] if c.system is None else [{"role": "system", "content": c.system}]
        body = {
            "model": c.model,
            "messages": [*system, {"role": "user", "content": self._asked(prompt, sample)}],
            "temperature": c.temperature,
            "max_tokens": c.max_tokens,
        }
        reply = await self._server.post("/v1/chat/completions", body)
        return reply if isinstance(reply, Unscored) else self._read(reply)

    def _asked(self, prompt: Prompt, sample: Sample) -> str:
        """In one pass: braces in a response are no places. The question is the last message where there are several."""
        question = prompt.messages[-1]["content"] if prompt.messages else prompt.text
        given = {"prompt": question, "answer": prompt.answer, "response": sample.text}
        return str(_PLACES.sub(lambda place: given[place[1]], self._config.template))

    def _read(self, reply: Any) -> Score | Unscored:
        c = self._config
        try:
            choice = reply["choices"][0]
            said, cut = choice["message"]["content"], choice.get("finish_reason") in _CUT
        except (KeyError, IndexError, TypeError) as e:
            form = "an object" if isinstance(reply, Mapping) else type(reply).__name__
            raise ValueError(f"the judge sent {form} {str(reply)[:200]!r}, no chat completion: check its url") from e
        if cut:
            return Unscored(reason="the judgement was cut off")
        try:
            scores = [m[1] for m in self._pattern.finditer(said or "", timeout=_READ_S)]
            score = float(scores[-1]) if scores else None
        except (TimeoutError, TypeError, ValueError):
            score = None
        if score is None:
            return Unscored(reason="the judgement has no score")
        if not c.low <= score <= c.high:
            return Unscored(reason="the judgement's score is out of bounds")
        return Score(value=(score - c.low) / (c.high - c.low), parts={"score": score})

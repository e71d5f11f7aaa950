"""An engine in this process that has its turns from a script, in the tokens of a chat model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan
from rollout.sglang.samples import empty_sample
from tests.support.chat_templates import tokenizer
from tests.support.fakes import FakeEngine


class Script(FakeEngine):
    """Samples its lines in order, whose ends are in `stop_token_ids`. fed: the text before each turn."""

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self.lines = [tokenizer("qwen3").encode(line, add_special_tokens=False) for line in lines]
        self.fed: list[str] = []

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        return [
            SampleGroup(prompt=p, samples=tuple(self._turn(empty_sample(p, i), (), params, 0) for i in range(n)))
            for p in prompts
        ]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        self.fed.append(str(tokenizer("qwen3").decode(list(environment))))
        return self._turn(sample, environment, params, sample.turns)

    def _turn(self, sample: Sample, fed: Sequence[int], params: SamplingParams, turn: int) -> Sample:
        new = self.lines[turn][: params.max_new_tokens]
        mask = torch.arange(len(fed) + len(new)) >= len(fed)
        return replace(
            sample,
            token_ids=torch.cat([sample.token_ids, torch.tensor([*fed, *new], dtype=torch.int64)]),
            loss_mask=torch.cat([sample.loss_mask, mask]),
            logprobs=torch.cat([sample.logprobs, torch.where(mask, -1.0, 0.0)]),
            versions=(VersionSpan(0, 0, len(new)),),
            finish=Finish.STOP if new[-1] in params.stop_token_ids else Finish.LENGTH,
        )

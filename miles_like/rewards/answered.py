"""A sample with a given response, for calls of rewards outside of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_like.types import Finish, Prompt, Sample, VersionSpan


def answered_sample(prompt: Prompt, index: int, response: Sequence[int], text: str) -> Sample:
    """`response`: token ids of `text`. Log-probabilities are -1; the sample ended with a stop token."""
    before, s = len(prompt.token_ids), len(prompt.token_ids) + len(response)
    mask = torch.arange(s) >= before
    return Sample(
        prompt_id=prompt.id,
        index=index,
        token_ids=torch.tensor([*prompt.token_ids, *response]),
        loss_mask=mask,
        logprobs=torch.where(mask, -1.0, 0.0),
        routing=None,
        versions=(VersionSpan(0, 0, len(response)),),
        finish=Finish.STOP,
        text=text,
    )

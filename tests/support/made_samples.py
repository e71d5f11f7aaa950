"""Hand-made samples and groups for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from miles_like.batch.packing import pack
from miles_like.types import Finish, MicroBatch, Prompt, Sample, SampleGroup, TrainBatch, VersionSpan
from routing_replay.trace import RoutingTrace

LAYERS = (1, 2)
EXPERTS = 8
TOP_K = 2


def trace(rows: int, seed: int = 0) -> RoutingTrace:
    g = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, len(LAYERS), EXPERTS, generator=g).argsort(-1)[..., :TOP_K]
    return RoutingTrace(experts=order.to(torch.uint8), layers=LAYERS, num_experts=EXPERTS)


def sample(
    prompt_id: str = "p",
    index: int = 0,
    *,
    prompt_len: int = 2,
    response_len: int = 3,
    first_token: int = 0,
    reward: float | None = None,
    routing: bool = False,
    version: int = 0,
    finish: Finish = Finish.STOP,
    text: str = "",
) -> Sample:
    """Tokens count up from `first_token`, log-probs are -token / 1000 on the response."""
    s = prompt_len + response_len
    ids = torch.arange(first_token, first_token + s)
    mask = torch.arange(s) >= prompt_len
    return Sample(
        prompt_id=prompt_id,
        index=index,
        token_ids=ids,
        loss_mask=mask,
        logprobs=torch.where(mask, -ids / 1000, 0.0),
        routing=trace(s - 1, seed=first_token).with_checksums(ids[:-1], versions=(VersionSpan(version, 0, s - 1),))
        if routing
        else None,
        versions=(VersionSpan(version, 0, response_len),),
        finish=finish,
        text=text,
        reward=reward,
    )


def group(samples: Sequence[Sample], *, answer: str = "1") -> SampleGroup:
    prompt = Prompt(id=samples[0].prompt_id, token_ids=(1, 2), answer=answer, text="what?")
    return SampleGroup(prompt=prompt, samples=tuple(samples))


def packed(*samples: Sample, **how: Any) -> TrainBatch:
    """One step for one row, of one group."""
    return pack([group(samples)], [[1.0] * len(samples)], **{"dp_size": 1, "max_tokens": 99} | how)


def rewarded(rewards: Sequence[float], *, prompt_id: str = "p", version: int = 0, answer: str = "1") -> SampleGroup:
    """One sample a reward."""
    return group(
        [sample(prompt_id, i, reward=r, version=version) for i, r in enumerate(rewards)],
        answer=answer,
    )


def assert_same(one: MicroBatch, other: MicroBatch) -> None:
    """Bit for bit."""
    for f in fields(MicroBatch):
        a, b = getattr(one, f.name), getattr(other, f.name)
        if f.name == "streams":
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), f.name
        else:
            assert a == b, f.name

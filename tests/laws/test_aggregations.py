"""What the losses of a step's tokens become is the aggregation's closed form, however the step's samples are spread.

The trainer adds losses up and divides once: a mean over samples that was taken in a micro-batch or on a rank would
weigh a sample by what lies beside it. Not covered: the trainer's sum over ranks (test_parallel_invariance).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_like.batch.packing import pack
from miles_like.types import Aggregation, Finish, Prompt, Sample, SampleGroup


def groups():
    """Three prompts of 3, 1 and 2 samples, of 1 to 9 response tokens; one sample has none."""
    out = []
    for p, sizes in enumerate([(4, 0, 9), (1,), (6, 2)]):
        samples = []
        for i, n in enumerate(sizes):
            mask = torch.arange(n + 2) >= 2
            samples.append(
                Sample(
                    prompt_id=f"p{p}",
                    index=i,
                    token_ids=torch.arange(n + 2),
                    loss_mask=mask,
                    logprobs=torch.where(mask, -(torch.arange(n + 2) + p + i) / 10, 0.0),
                    routing=None,
                    versions=(),
                    finish=Finish.STOP,
                    text="",
                )
            )
        out.append(SampleGroup(prompt=Prompt(id=f"p{p}", token_ids=(1, 2), answer=""), samples=tuple(samples)))
    return out


def closed_form(aggregation, constant):
    """Of the token losses -logprob, sample by sample."""
    per_prompt = [[-s.logprobs[s.loss_mask].double() for s in g.samples if s.loss_mask.any()] for g in groups()]
    flat = [x for of_prompt in per_prompt for x in of_prompt]

    def mean(values):
        return sum(values) / len(values)

    return float(
        {
            Aggregation.TOKEN_MEAN: lambda: torch.cat(flat).mean(),
            Aggregation.SEQUENCE_MEAN: lambda: mean([x.mean() for x in flat]),
            Aggregation.SEQUENCE_SUM: lambda: mean([x.sum() for x in flat]),
            Aggregation.PROMPT_MEAN: lambda: mean([torch.cat(of_prompt).mean() for of_prompt in per_prompt]),
            Aggregation.CONSTANT: lambda: mean([x.sum() / constant for x in flat]),
        }[aggregation]()
    )


@pytest.mark.parametrize("aggregation", Aggregation)
def test_an_episode_counts_as_one_sample_whatever_rows_it_has(aggregation):
    """The weight of a token is that which it has where the rows of its episode are one sample."""
    several = [
        replace(g, samples=tuple(replace(s, index=s.index // 2, row=s.index % 2) for s in g.samples)) for g in groups()
    ]
    joined = [replace(g, samples=tuple(map(_joined, g.rows))) for g in several]
    found, want = (
        pack(of, [[1.0] * len(g.samples) for g in of], dp_size=1, max_tokens=99, aggregation=aggregation, constant=16)
        for of in (several, joined)
    )
    assert _weights(found) == [pytest.approx(pair) for pair in _weights(want)]


def _joined(rows):
    joined = {f: torch.cat([getattr(s, f) for s in rows]) for f in ("token_ids", "loss_mask", "logprobs")}
    return replace(rows[0], **joined)


def _weights(batch):
    """Log-prob and weight of each loss token."""
    out = []
    for m in (m for row in batch.grid for m in row):
        weights = torch.ones(len(m.tokens)) if m.weights is None else m.weights
        out += zip(m.rollout_logprobs[m.loss_mask].tolist(), weights[m.loss_mask].tolist(), strict=True)
    return sorted(out)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_every_aggregation_is_its_closed_form_in_every_layout(aggregation):
    want = closed_form(aggregation, 16)
    for dp_size, max_tokens, multiple in ((1, 99, 1), (1, 11, 1), (2, 11, 1), (3, 20, 2), (8, 11, 1)):
        batch = pack(
            groups(),
            [[1.0] * len(g.samples) for g in groups()],
            dp_size=dp_size,
            max_tokens=max_tokens,
            micro_multiple=multiple,
            aggregation=aggregation,
            constant=16,
        )
        total = torch.zeros((), dtype=torch.float64)
        for m in (m for row in batch.grid for m in row):
            weights = torch.ones(len(m.tokens)) if m.weights is None else m.weights
            total += (-m.rollout_logprobs * weights)[m.loss_mask].double().sum()
        assert float(total / batch.loss_tokens) == pytest.approx(want, rel=1e-6), (dp_size, max_tokens)

"""What a loss makes of a sample does not depend on which samples it is packed with.

The gradient is a sum over micro-batches, so a weight, a ratio or a mean that looked beyond its own sample would make
training depend on packing, on the number of ranks and on the order of the rollout. Every loss, with and without each
correction and each shared term, must give every token the same value and gradient alone and in any pack, and every
statistic must reduce to the same figure. A loss over pairs sees a pair at a time, and the mean it gives with its
weights is the one over pairs.
Not covered: the trainer's reduction over ranks (test_parallel_invariance, of pairs test_reference_weights).
"""

from __future__ import annotations

import pytest
import torch

from miles_like.algorithms.dpo import DpoLoss
from miles_like.algorithms.kto import KtoLoss
from miles_like.algorithms.losses.value import ValueLoss
from miles_like.algorithms.orpo import OrpoLoss
from miles_like.algorithms.process_reward import ProcessRewardLoss
from miles_like.algorithms.registry import make_algorithm
from miles_like.algorithms.reward_model import BradleyTerryLoss
from miles_like.algorithms.sft import NllLoss
from miles_like.algorithms.simpo import SimpoLoss
from miles_like.batch.packer import Packer
from miles_like.config.sections.algorithm import AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.correction import BOUNDS_OF, CorrectionConfig
from miles_like.config.sections.flat import names_of, parts_of, values
from miles_like.types import (
    ANSWER,
    DESIRABLE,
    KL_BASELINE,
    RETURNS,
    STEP_LABEL,
    VALUES,
    Aggregation,
    Finish,
    LossInputs,
    Prompt,
    Reduce,
    Sample,
    SampleGroup,
)

# Clip-Cov and KL-Cov choose tokens within a micro-batch: test_verl_objectives.py
KINDS = [kind for kind in names_of(parts_of(RolloutAlgorithm)["loss"]) if not kind.endswith("_cov")]

LENGTHS = (5, 1, 9, 4, 2)
CORRECTIONS = [
    CorrectionConfig(),
    *(CorrectionConfig(kind=kind, level=level, action=action) for kind, level, action in BOUNDS_OF),
]
LOSSES = {
    "-".join(map(str, (name, *list(values(c).values())[:3]))): make_algorithm(AlgorithmConfig(name=name), c).loss
    for name in ("grpo", "gspo")
    for c in CORRECTIONS
} | {"nll": NllLoss(), "value": ValueLoss(value_clip=0.2), "kto": KtoLoss(beta=0.3), "process": ProcessRewardLoss()}
SHARED = {"kl_coefficient": 0.1, "kl_unbiased": True, "entropy_coefficient": 0.1, "off_policy_delta": 1e-4}
LOSSES |= {
    f"{kind}-{'+'.join(keys) or 'bare'}": make_algorithm(AlgorithmConfig(loss=kind, **keys), CorrectionConfig()).loss
    for kind in KINDS
    for keys in ({}, SHARED)
}
PAIRS = {
    "dpo": DpoLoss(beta=0.3),
    "ipo": DpoLoss(kind="ipo"),
    "orpo": OrpoLoss(beta=0.3),
    "simpo": SimpoLoss(),
    "reward model": BradleyTerryLoss(center_coefficient=0.1),
}
STREAMS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "advantages", "loss_mask")


def samples() -> list[dict[str, torch.Tensor]]:
    """The second has no token under loss; the third is far off, the fourth a little."""
    g = torch.Generator().manual_seed(0)
    out = []
    for length, far in zip(LENGTHS, (0.0, 0.0, 2.0, 1e-3, 1e-4), strict=True):
        new = -3 * torch.rand(length, generator=g)
        old = new + 3e-4 * torch.randn(length, generator=g)
        rollout = old + far * torch.randn(length, generator=g)
        ref, entropy = new + 0.1, torch.rand(length, generator=g)
        advantages = torch.full((length,), float(torch.randn((), generator=g)))
        mask = torch.arange(length) % 4 != 0
        out.append(dict(zip(STREAMS, (new, old, rollout, ref, entropy, advantages, mask), strict=True)))
    return out


def pairs() -> list[dict[str, torch.Tensor]]:
    """Each the streams of two samples, and their lengths."""
    out = []
    for first, second in zip(samples(), reversed(samples()), strict=True):
        both = {
            k: torch.cat([first[k], second[k] * 0.9 if second[k].is_floating_point() else second[k]]) for k in STREAMS
        }
        out.append(both | {"lengths": torch.tensor([len(first["logprobs"]), len(second["logprobs"])])})
    return out


def run(loss, chosen):
    """(loss of every token, its gradient, statistics) of one pack."""
    streams = {k: torch.cat([s[k] for s in chosen]) for k in STREAMS}
    streams["logprobs"].requires_grad_()
    lengths = torch.cat([torch.zeros(1), *(s.get("lengths", torch.tensor([len(s["logprobs"])])) for s in chosen)])
    streams["entropy"].requires_grad_()
    more = {VALUES: streams["old_logprobs"], RETURNS: streams["ref_logprobs"], KL_BASELINE: streams["advantages"]}
    more |= {DESIRABLE: (streams["advantages"] > 0).float(), ANSWER: (streams["entropy"].detach() > 0.3).float()}
    more |= {STEP_LABEL: streams["entropy"].detach()}
    value, stats = loss(LossInputs(**streams, cu_seqlens=lengths.cumsum(0).to(torch.int32), streams=more))
    value.sum().backward()
    return value.detach(), streams["logprobs"].grad, stats


def reduced(parts):
    how = {
        Reduce.MEAN: lambda ss: sum(s.total.double() for s in ss) / sum(s.count.double() for s in ss),
        Reduce.SUM: lambda ss: sum(s.total.double() for s in ss),
        Reduce.MAX: lambda ss: max(s.total for s in ss),
        Reduce.MIN: lambda ss: min(s.total for s in ss),
    }
    return {name: float(how[stat.reduce]([p[name] for p in parts])) for name, stat in parts[0].items()}


@pytest.mark.parametrize("name", [*LOSSES, *PAIRS])
def test_packed_or_alone(name):
    loss, units = (LOSSES[name], samples) if name in LOSSES else (PAIRS[name], pairs)
    alone = [run(loss, [s]) for s in units()]
    want = reduced([stats for *_, stats in alone])
    for cuts in ([[0, 1, 2, 3, 4]], [[0, 3], [1], [2, 4]], [[4, 2, 1, 0], [3]]):
        packs = [run(loss, [units()[i] for i in cut]) for cut in cuts]
        order = [i for cut in cuts for i in cut]
        for k in (0, 1):
            got = torch.cat([p[k] for p in packs])
            assert torch.equal(got, torch.cat([alone[i][k] for i in order])), "a token's loss or gradient"
        assert reduced([stats for *_, stats in packs]) == pytest.approx(
            want, rel=1e-6, abs=1e-6 if name == "orpo" else 1e-9
        )


def pair_of(number: int, lengths: tuple[int, int]) -> SampleGroup:
    """Tokens are numbers of a table; the second half of each sample is its answer."""
    made, first = [], 20 * number
    for index, length in enumerate(lengths):
        made.append(
            Sample(
                prompt_id=f"pair {number}",
                index=index,
                token_ids=torch.arange(first, first + length),
                loss_mask=torch.arange(length) > length // 2,
                logprobs=torch.zeros(length),
                routing=None,
                versions=(),
                finish=Finish.STOP,
                text="",
            )
        )
        first += length
    return SampleGroup(prompt=Prompt(id=f"pair {number}", token_ids=(1,), answer=""), samples=tuple(made))


@pytest.mark.parametrize("name", PAIRS)
def test_the_mean_is_over_pairs_in_any_packing(name):
    """Pairs of long answers count as much as those of short ones, whatever lies beside them."""
    g = torch.Generator().manual_seed(1)
    groups = [pair_of(i, lengths) for i, lengths in enumerate([(3, 9), (6, 4), (8, 8), (3, 3), (5, 10)])]
    policy, reference = (-3 * torch.rand(200, generator=g) for _ in range(2))

    def taught(chosen, **how):
        """(loss, gradient of each table entry) of a step, as the trainer adds it up."""
        table = policy.clone().requires_grad_()
        batch = Packer(aggregation=Aggregation.SEQUENCE_MEAN, **how).examples(chosen)
        total = torch.zeros(())
        for m in (m for row in batch.grid for m in row):
            streams = {
                k: torch.zeros(len(m.tokens)) for k in ("entropy", "rollout_logprobs", "advantages", "old_logprobs")
            }
            given = {"logprobs": table[m.labels], "ref_logprobs": reference[m.labels], "loss_mask": m.loss_mask}
            more = {ANSWER: m.loss_mask.float()}
            loss, _ = PAIRS[name](LossInputs(**given, **streams, cu_seqlens=m.cu_seqlens, streams=more))
            total = total + torch.where(m.loss_mask, loss * m.weights, 0.0).sum()
        (total / batch.loss_tokens).backward()
        return float(total.detach() / batch.loss_tokens), table.grad

    each = [taught([group], dp_size=1, max_tokens=99) for group in groups]
    value, gradient = sum(v for v, _ in each) / 5, sum(x for _, x in each) / 5
    for how in ({"dp_size": 1, "max_tokens": 99}, {"dp_size": 1, "max_tokens": 20}, {"dp_size": 3, "max_tokens": 20}):
        got, grad = taught(groups, **how)
        assert got == pytest.approx(value, rel=1e-5)
        torch.testing.assert_close(grad, gradient, rtol=1e-5, atol=1e-7)

"""What a loss makes of a sample does not depend on which samples it is packed with.

The gradient is a sum over micro-batches, so a weight, a ratio or a mean that looked beyond its own sample would make
training depend on packing, on the number of ranks and on the order of the rollout. Every loss, with and without each
correction, must give every token the same value and gradient alone and in any pack, and every statistic must reduce to
the same figure. Not covered: the trainer's reduction over ranks (test_parallel_invariance).
"""

from __future__ import annotations

import pytest
import torch

from miles_like.algorithm_config import BOUNDS_OF, AlgorithmConfig, CorrectionConfig
from miles_like.algorithms.registry import make_algorithm
from miles_like.algorithms.sft import NllLoss
from miles_like.types import Reduce

LENGTHS = (5, 1, 9, 4, 2)
CORRECTIONS = [
    CorrectionConfig(),
    *(CorrectionConfig(kind=kind, level=level, action=action) for kind, level, action in BOUNDS_OF),
]
LOSSES = {
    f"{name}-{c.kind}-{c.level}-{c.action}": make_algorithm(AlgorithmConfig(name=name), c).loss
    for name in ("grpo", "gspo")
    for c in CORRECTIONS
} | {"nll": NllLoss()}
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


def run(loss, chosen):
    """(loss of every token, its gradient, statistics) of one pack."""
    streams = {k: torch.cat([s[k] for s in chosen]) for k in STREAMS}
    streams["logprobs"].requires_grad_()
    lengths = torch.tensor([0, *(len(s["logprobs"]) for s in chosen)])
    value, stats = loss(**streams, cu_seqlens=lengths.cumsum(0).to(torch.int32))
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


@pytest.mark.parametrize("name", LOSSES)
def test_packed_or_alone(name):
    alone = [run(LOSSES[name], [s]) for s in samples()]
    want = reduced([stats for *_, stats in alone])
    for cuts in ([[0, 1, 2, 3, 4]], [[0, 3], [1], [2, 4]], [[4, 2, 1, 0], [3]]):
        packs = [run(LOSSES[name], [samples()[i] for i in cut]) for cut in cuts]
        order = [i for cut in cuts for i in cut]
        for k in (0, 1):
            got = torch.cat([p[k] for p in packs])
            assert torch.equal(got, torch.cat([alone[i][k] for i in order])), "a token's loss or gradient"
        assert reduced([stats for *_, stats in packs]) == pytest.approx(want, rel=1e-6, abs=1e-9)

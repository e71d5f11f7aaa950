"""Random weights, and a supervised warm-up of them.

The warm-up takes examples (miles_like/supervised/data.py) in the order of a seeded shuffle and stops when the mean
probability of the right answer on a validation file reaches a target, so that models of all seeds end equally good.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_like.batch.packer import Packer
from miles_like.config.sections.make import MakeConfig
from miles_like.protocols import Trainer
from miles_like.types import NamedTensor, SampleGroup


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], hf_config: Mapping[str, Any], seed: int
) -> Iterator[NamedTensor]:
    """A random model, tensor by tensor: normal with std `initializer_range`, norms 1, biases 0 (the router's in fp32).

    A tensor's values depend on the seed and its name only, not on the order.
    """
    std = float(hf_config.get("initializer_range", 0.02))
    for name, shape in shapes.items():
        if name.endswith("e_score_correction_bias"):
            yield NamedTensor(name, torch.zeros(shape, dtype=torch.float32))
        elif name.endswith(".bias"):
            yield NamedTensor(name, torch.zeros(shape, dtype=torch.bfloat16))
        elif len(shape) == 1:
            yield NamedTensor(name, torch.ones(shape, dtype=torch.bfloat16))
        else:
            yield NamedTensor(name, (std * _normal(name, shape, seed)).to(torch.bfloat16))


def _normal(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(random.Random(f"{seed}/{name}").getrandbits(63))
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """The result of a warm-up."""

    steps: int
    right_prob: float  # mean probability of the right answer on the validation file
    reached: bool


async def warm_up(
    trainer: Trainer,
    make: MakeConfig,
    *,
    corpus: Sequence[SampleGroup],
    validation: Sequence[SampleGroup],
    max_tokens: int,
    micro_multiple: int = 1,
    progress: Callable[[int, float], None],
) -> WarmupReport:
    """Run supervised steps until the target or `max_steps`. `progress(step, right_prob)` is called at every check.

    `corpus` and `validation` have one sample per group; `max_tokens` and `micro_multiple` are those of `pack`.
    """

    packer = Packer(dp_size=trainer.dp_size, max_tokens=max_tokens, micro_multiple=micro_multiple)
    check = packer.examples(validation)
    rng, order = random.Random(make.seed), list(range(len(corpus)))
    rng.shuffle(order)
    cursor, right = 0, 0.0
    for step in range(1, make.max_steps + 1):
        if cursor + make.batch > len(order):
            rng.shuffle(order)
            cursor = 0
        await trainer.train([packer.examples([corpus[i] for i in order[cursor : cursor + make.batch]])])
        cursor += make.batch
        if step % make.check_every == 0 or step == make.max_steps:
            right = (await trainer.evaluate(check))["train/answer_prob"]
            progress(step, right)
            if right >= make.target:
                return WarmupReport(steps=step, right_prob=right, reached=True)
    return WarmupReport(steps=make.max_steps, right_prob=right, reached=False)

"""Make a checkpoint where none can be downloaded: random weights, then a supervised warm-up with the project's trainer.

The warm-up takes examples (supervised_data.py) in the order of a seeded shuffle and stops when the mean
probability of the right answer on a validation file reaches a target, so that one seed's slow start and another's quick
one end at the same skill.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_like.make_config import MakeConfig
from miles_like.packing import pack_examples
from miles_like.protocols import Trainer
from miles_like.types import NamedTensor, SampleGroup, TrainBatch


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], hf_config: Mapping[str, Any], seed: int
) -> Iterator[NamedTensor]:
    """A random model, tensor by tensor: normal with `initializer_range`, norms one, biases zero (the routing's fp32).

    Each tensor's values depend only on the seed and its name, not on the order.
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
    """How a warm-up ended."""

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
    """Supervised steps until the target or `max_steps`. `progress(step, right_prob)` is called at every check.

    `corpus` and `validation` are examples, one sample a group; `max_tokens` and `micro_multiple` are `pack`'s."""

    def batch(examples: Sequence[SampleGroup]) -> TrainBatch:
        return pack_examples(examples, dp_size=trainer.dp_size, max_tokens=max_tokens, micro_multiple=micro_multiple)

    check = batch(validation)
    rng, order = random.Random(make.seed), list(range(len(corpus)))
    rng.shuffle(order)
    cursor, right = 0, 0.0
    for step in range(1, make.max_steps + 1):
        if cursor + make.batch > len(order):
            rng.shuffle(order)
            cursor = 0
        await trainer.train([batch([corpus[i] for i in order[cursor : cursor + make.batch]])])
        cursor += make.batch
        if step % make.check_every == 0 or step == make.max_steps:
            right = (await trainer.evaluate(check))["train/answer_prob"]
            progress(step, right)
            if right >= make.target:
                return WarmupReport(steps=step, right_prob=right, reached=True)
    return WarmupReport(steps=make.max_steps, right_prob=right, reached=False)

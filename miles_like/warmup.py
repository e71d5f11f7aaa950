"""Make a checkpoint where none can be downloaded: random weights, then a supervised warm-up with the project's trainer.

The warm-up reads a jsonl corpus of (prompt, answer) rows in the order of a seeded shuffle and stops when the mean
probability of the right answer on a validation file reaches a target, so that one seed's slow start and another's quick
one end at the same skill.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_like.make_config import MakeConfig
from miles_like.packing import pack_pairs
from miles_like.protocols import Trainer
from miles_like.types import NamedTensor

Pair = tuple[list[int], list[int]]  # prompt ids, answer ids with the end token


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


def read_pairs(path: Path, answer_key: str, encode: Callable[[str], list[int]], eos: int) -> list[Pair]:
    """Rows of a jsonl as token ids, the end token after each answer. Raises ValueError naming file, line and key."""
    pairs = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}: name a jsonl file") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            pairs.append((encode(row["prompt"]), [*encode(str(row[answer_key])), eos]))
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}, line {number} is not JSON: {e}") from None
        except KeyError as e:
            raise ValueError(f"{path}, line {number} has no {e}; it has {sorted(row)}") from None
    if not pairs:
        raise ValueError(f"{path} has no rows")
    return pairs


async def warm_up(
    trainer: Trainer,
    make: MakeConfig,
    *,
    corpus: Sequence[Pair],
    validation: Sequence[Pair],
    max_tokens: int,
    micro_multiple: int = 1,
    progress: Callable[[int, float], None],
) -> WarmupReport:
    """Supervised steps until the target or `max_steps`. `progress(step, right_prob)` is called at every check.

    `max_tokens` and `micro_multiple` are `pack_pairs`'."""

    def batch(pairs: Sequence[Pair]):
        return pack_pairs(pairs, dp_size=trainer.dp_size, max_tokens=max_tokens, micro_multiple=micro_multiple)

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
            right = (await trainer.evaluate(check))["warmup/right_prob"]
            progress(step, right)
            if right >= make.target:
                return WarmupReport(steps=step, right_prob=right, reached=True)
    return WarmupReport(steps=make.max_steps, right_prob=right, reached=False)

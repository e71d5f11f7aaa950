"""Parameters by names that are the same in every layout, and name patterns matched over all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_bridge.parallel import ParallelContext

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def renamer(model: Any, parallel: ParallelContext) -> Callable[[str], str]:
    """Translates names inside one chunk of the model: pipeline stages count their layers, and expert ranks their
    experts, from 0; the new name has the global numbers."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = (model.config.num_moe_experts or 0) // parallel.config.ep

    def rename(name: str) -> str:
        name = _LOCAL_LAYER.sub(lambda m: f"decoder.layers.{numbers[int(m[1])]}.", name)
        return _LOCAL_EXPERT.sub(lambda m: f".local_experts.{parallel.ep_rank * experts + int(m[1])}.", name)

    return rename


def named_tensors(models: Sequence[Any], parallel: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of every parameter and routing bias that this rank holds; `models` are unwrapped chunks."""
    for model in models:
        rename = renamer(model, parallel)
        for name, value in model.named_parameters():
            yield rename(name), value
        for name, value in model.named_buffers():
            if name.endswith(".expert_bias"):
                yield rename(name), value


def matching(models: Sequence[Any], parallel: ParallelContext, patterns: Sequence[str], *, key: str) -> list[Tensor]:
    """This rank's tensors whose global name matches a pattern. Collective.

    Raises ValueError, on every rank, for a pattern that matches nothing on any; `key` is the config key that holds it.
    """
    if not patterns:
        return []
    held = list(named_tensors(models, parallel))
    local = [any(fnmatchcase(name, pattern) for name, _ in held) for pattern in patterns]
    gathered: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(gathered, local)
    for pattern, found in zip(patterns, zip(*gathered, strict=True), strict=True):
        if not any(found):
            example = next((name for name, _ in held if name.endswith("weight")), "none here")
            raise ValueError(
                f"{key}: {pattern!r} matches no parameter of the model: patterns are matched with whole names such as "
                f"{example!r}"
            )
    return [tensor for name, tensor in held if any(fnmatchcase(name, pattern) for pattern in patterns)]

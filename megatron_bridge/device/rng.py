"""The random states of a rank: torch's generators and megatron's tracker of model-parallel generators.

A rank draws from neither python's nor numpy's generator.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

KEY = "rng"


def rng_state(rank: int, world_size: int) -> ShardedObject:
    """This rank's states as its shard of a checkpoint; on load, the object that the states are read into."""
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "tracker": {name: x.clone() for name, x in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(KEY, state, (world_size,), (rank,))


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states of `rng_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))


def derive_rng_state(seed: int, step: int) -> None:
    """Set the states in a layout that differs from the checkpoint's: a function of (seed, step) and this rank's
    position, so resuming twice gives the same run twice. Megatron's seeding adds the position."""
    base = random.Random(f"{seed} {step}").getrandbits(31)
    torch.manual_seed(base)
    model_parallel_cuda_manual_seed(base)

"""The random states of a rank: torch's generators and megatron's tracker of model-parallel ones.

Neither python's nor numpy's generator is drawn from in a rank.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

KEY = "rng"


def rng_state(rank: int, world_size: int) -> ShardedObject:
    """This rank's states as its shard of a checkpoint; on load, the place they are read into."""
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "tracker": {name: x.clone() for name, x in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(KEY, state, (world_size,), (rank,))


def set_rng_state(state: dict[str, Any]) -> None:
    """What `rng_state` held."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))


def derive_rng_state(seed: int, step: int) -> None:
    """States for a layout that has none of its own: a function of (seed, step) and this rank's place, so that a run
    resumed twice is twice the same. Megatron's seeding adds the place."""
    base = random.Random(f"{seed} {step}").getrandbits(31)
    torch.manual_seed(base)
    model_parallel_cuda_manual_seed(base)

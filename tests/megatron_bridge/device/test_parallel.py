"""The groups of a layout as torch holds them. The values that collectives give are in the laws of invariance."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.spawn import run_ranks

LIMIT_S = 37.5


def _limits(rank: int, world: int, port: int) -> dict[str, float]:
    """The time limit in seconds of every group that this rank is in."""
    from megatron_bridge.device.device import init_device

    init_device()
    from megatron_bridge.config import ParallelConfig
    from megatron_bridge.device.parallel import close_parallel, init_parallel

    layout = ParallelConfig(tp=2, ep=2, dp=1)
    at: dict[str, Any] = {"master_addr": "127.0.0.1", "master_port": port, "backend": "gloo", "seed": 0}
    init_parallel(layout, rank=rank, world_size=world, timeout_s=LIMIT_S, **at)
    held = dist.distributed_c10d._world.pg_map
    found = {}
    for group in held:
        backend: Any = group._get_backend(torch.device("cpu"))
        found[f"{group.group_desc} {group.group_name}"] = backend.options._timeout.total_seconds()
    close_parallel()
    return found


def test_every_group_has_the_world_s_time_limit() -> None:
    """megatron-core's own default is half an hour, for some groups whatever is asked for; a collective of such a group
    would end a run whose world still waits, or wait where the world has given up."""
    for found in run_ranks(_limits, 2, keep=True):
        assert len(found) > 10 and set(found.values()) == {LIMIT_S}, found

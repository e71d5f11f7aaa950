"""Executes one rank. Imports megatron only when it is called, for CPU ranks or for CUDA ranks."""

from __future__ import annotations

from megatron_bridge.device.device import init_device
from megatron_bridge.fake.substitutes.cuda import init_fake_cuda
from megatron_bridge.fake.substitutes.facts import RankCounts, RankRun


def execute(run: RankRun) -> RankCounts:
    """Execute one rank on fake tensors of `run.device`. One rank at a time in a process; with device "cuda", in a
    process that has not imported megatron for CPU ranks.

    Raises ValueError as MegatronTrainer does, for kernels without a replacement, and for a number of micro-batches that
    the layout's schedule cannot run.
    """
    parallel = run.config.parallel
    if run.micro_batches % parallel.micro_multiple:
        raise ValueError(
            f"{run.micro_batches} micro-batches with parallel.vpp = {parallel.vpp}: choose a multiple of "
            f"{parallel.micro_multiple}"
        )
    env = init_fake_cuda() if run.device == "cuda" else init_device()
    from megatron_bridge.fake.phases import live_through

    return live_through(run, env)

"""The disk of a run's plan, from the bytes of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from miles_like.config.run import RunConfig
from miles_like.device_table import Device
from miles_like.pipeline.stages import Stage
from miles_like.planning.plan import DiskPlan
from miles_like.preflight.disks import checkpoint_size, stage_bytes


def disk_plan(config: RunConfig, stages: Sequence[Stage], gpu: Device) -> DiskPlan | None:
    """stages: all planned stages. None where sizes are known only after the fetch stage."""
    if not stages or (written := stage_bytes(config, stages)) is None:
        return None
    bf16 = next(s.size for s in stages if s.name == "convert") or 0
    node = max(written.by_node, default=0)
    return DiskPlan(
        shared={name: n for name, n in written.shared.items() if n},
        node={"staged weights": node} if node else {},
        checkpoint=0 if config.lora.rank else checkpoint_size(bf16) * (1 + config.algorithm.has_critic),
        node_disk=gpu.node_disk if config.cluster.stage_dir is not None else 0,
    )

"""The configuration section of the cluster. Torch-free."""

from __future__ import annotations

from pydantic import Field

from miles_like.section import Section


class ClusterConfig(Section):
    """Resources of the Ray cluster."""

    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)  # 0: CPU ranks
    # limit of a call to trainer or critic ranks, or ten times the longest such call so far; then the run ends
    timeout_s: float = Field(1800.0, gt=0)
    peak_tflops: float | None = Field(None, gt=0)  # of one rank's device in the training dtype; reported as perf/mfu
    # trainer and rollout share GPUs and take turns: one releases its memory while the other computes. None: true on
    # GPUs; CPU ranks take turns only if true is given
    colocate: bool | None = None
    stage_dir: str | None = None  # node-local directory; None: inside the run directory

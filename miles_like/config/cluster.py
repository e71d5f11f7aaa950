"""The configuration section of the cluster. Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from miles_like.section import Section
from miles_like.variables import read_variables


class ClusterConfig(Section):
    """Resources of the Ray cluster."""

    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)  # 0: CPU ranks
    # limit of a call to trainer or critic ranks, or ten times the longest such call so far; then the run ends
    timeout_s: float = Field(1800.0, gt=0)
    peak_tflops: float | None = Field(None, gt=0)  # of one rank's device in the training dtype; reported as perf/mfu
    colocate: bool = True  # trainer and rollout share GPUs; neither releases memory for the other
    stage_dir: str | None = None  # node-local directory; None: inside the run directory
    env: dict[str, str] = Field(
        {}
    )  # environment variables of trainer and critic ranks; "" takes a secret from the driver's

    @field_validator("env", mode="before")
    @classmethod
    def variables_can_be_set(cls, given: Any) -> Any:
        return read_variables("cluster.env", given)

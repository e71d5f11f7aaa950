"""What the embedded engine cannot do on a GPU, refused before anything is started. Torch-free."""

from __future__ import annotations

from megatron_bridge.config import PrecisionConfig
from miles_like.config.sections.alignment import AlignmentConfig
from rollout.config import RolloutConfig

_ON_CPU = "set rollout.embedded.device = 'cpu'"


def check_device(
    rollout: RolloutConfig, precision: PrecisionConfig, alignment: AlignmentConfig, *, gpus_per_node: int
) -> None:
    """Raises ValueError, with the remedy, for settings that a run with embedded servers on GPUs cannot have. What the
    section of the engine decides alone is checked with it."""
    if rollout.engine != "embedded" or not rollout.on_gpus:
        return
    if not gpus_per_node:
        raise ValueError(
            "rollout.embedded.device = 'cuda', but cluster.gpus_per_node = 0: set that to the GPUs of a node, or "
            f"{_ON_CPU}"
        )
    if alignment.deterministic:
        raise ValueError(
            "alignment.deterministic = true with rollout.embedded.device = 'cuda': no device computes the bits of the "
            f"exact operations; {_ON_CPU}, or alignment.deterministic = false"
        )
    if precision.activations != "none":
        raise ValueError(
            f"precision.activations = {precision.activations!r} with rollout.embedded.device = 'cuda', which does not "
            f"round inputs: {_ON_CPU}, or precision.activations = 'none'"
        )

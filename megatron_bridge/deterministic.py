"""What a trainer cannot do when its log-probabilities are to be the engine's bit for bit. Free of megatron.

What is left works and is exact: docs/alignment.md has the table.
"""

from __future__ import annotations

from megatron_bridge.config import TrainerConfig
from megatron_bridge.kernels import Spec


def check_deterministic(config: TrainerConfig, *, cuda: bool, spec: Spec) -> None:
    """Raises ValueError, with the remedy, for a device, kernel or layout that computes other bits than the engine."""
    if not config.deterministic:
        return
    kernels, etp = config.kernels, config.parallel.etp
    if cuda or spec != "local":
        refused = "it is for CPU ranks with megatron's local modules, this run has CUDA devices: set it to false"
    elif kernels.dispatcher != "alltoall":
        refused = (
            f"kernels.dispatcher = {kernels.dispatcher!r} adds experts' outputs in another order: set "
            "kernels.dispatcher = 'alltoall'"
        )
    elif kernels.overlap_shared_expert:
        refused = "kernels.overlap_shared_expert adds the shared expert's output elsewhere: set it to false"
    elif not kernels.swiglu_fusion:
        refused = "kernels.swiglu_fusion = false rounds elsewhere than the engine: set it to true"
    elif etp > 2:
        refused = (
            f"parallel.etp = {etp}: shares of more than 2 ranks are added in no fixed order; set it to 2 or spread the "
            "experts by parallel.ep"
        )
    else:
        return
    raise ValueError(f"alignment.deterministic = true: {refused}")

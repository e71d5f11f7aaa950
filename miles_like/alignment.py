"""What `alignment.deterministic` asks of a run's other sections, on CPU ranks and on GPUs. Torch-free.

On CPU ranks with the embedded engine both sides compute the same bits. On GPUs it is SGLang's and Megatron's own
settings: each side by itself then gives a token the same log-probability again, and they still differ by their kernels.
"""

from __future__ import annotations

from typing import Any

from megatron_bridge.config import PrecisionConfig, Section
from quant.spec import QuantFormat
from rollout.config import RolloutConfig

# What SGLang itself would take is asked of the GPU that it finds; written down, a run's configuration shows it. triton
# serves every model of ours on Blackwell, flashinfer those without latent attention.
_ATTENTION = {"hopper": "fa3", "blackwell": "triton"}


class AlignmentConfig(Section):
    """deterministic: the rollout's log-probabilities are the trainer's, bit for bit, on CPU ranks; on GPUs each side's
    own deterministic settings (docs/alignment.md)."""

    deterministic: bool = False


def with_deterministic_servers(given: dict[str, Any]) -> dict[str, Any]:
    """A run's sections as they are read, with the flags of its SGLang servers, where those are not given."""
    alignment, rollout = given.get("alignment"), given.get("rollout")
    if not isinstance(alignment, dict) or alignment.get("deterministic") is not True:
        return given
    if not isinstance(rollout, dict) or rollout.get("engine") != "sglang":
        return given
    flags = rollout.get("sglang", {})
    if not isinstance(flags, dict):
        return given
    wanted = {"enable_deterministic_inference": True, "attention_backend": _ATTENTION.get(flags.get("gpu", "hopper"))}
    return given | {"rollout": rollout | {"sglang": wanted | flags}}


def check_sides(rollout: RolloutConfig, precision: PrecisionConfig, gpus_per_node: int) -> None:
    """What a deterministic run cannot have; what the trainer alone cannot, megatron_bridge.deterministic refuses.

    Raises ValueError with the remedy.
    """
    if rollout.engine == "sglang":
        if not gpus_per_node:
            refused = (
                "stock SGLang has deterministic inference on GPUs only, cluster.gpus_per_node = 0: set "
                "rollout.engine = 'embedded'"
            )
        elif not rollout.sglang.enable_deterministic_inference:
            refused = "rollout.sglang.enable_deterministic_inference = false says the contrary: remove that key"
        else:
            return
    elif gpus_per_node:
        return
    elif rollout.embedded.dtype == "float32":
        refused = "the trainer computes in bfloat16, rollout.embedded.dtype = 'float32': remove that key"
    elif precision.format is not QuantFormat.BF16 and not precision.qat:
        refused = (
            f"the rollout is served {precision.format.value} weights, which the trainer does not know of: set "
            "precision.qat = true or precision.format = 'bf16'"
        )
    else:
        return
    raise ValueError(f"alignment.deterministic = true: {refused}, or alignment.deterministic = false")

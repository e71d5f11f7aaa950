"""Requirements of `alignment.deterministic` on the other sections, on CPU ranks and on GPUs. Torch-free.

On CPU ranks with the embedded engine both sides compute the same bits. On GPUs it enables SGLang's and Megatron's
deterministic settings: each side then repeats its own log-probabilities, and the two still differ by their kernels.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_bridge.config import PrecisionConfig
from miles_like.section import Section
from quant.spec import QuantFormat
from rollout.config import RolloutConfig

# Set explicitly, so that the run's configuration shows it: SGLang's own default depends on the GPU that it detects. On
# Blackwell triton serves all supported models, flashinfer only those without latent attention.
_ATTENTION = {"hopper": "fa3", "blackwell": "triton"}


class AlignmentConfig(Section):
    """How exactly the rollout's log-probabilities equal the trainer's (docs/alignment.md)."""

    # on CPU ranks, rollout and trainer compute bitwise equal log-probabilities; on GPUs, each side uses its own
    # deterministic settings
    deterministic: bool = False


def with_deterministic_servers(given: dict[str, Any]) -> dict[str, Any]:
    """The raw sections, with the deterministic flags of the SGLang servers filled in where they are not given."""
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
    """Raises ValueError, with the remedy, for settings that a deterministic run cannot have. Settings of the trainer
    alone are checked by megatron_bridge.plan.deterministic."""
    if rollout.engine == "vllm":
        refused = (
            "a vLLM server restarts the random stream of a seed when a sample is continued, so an aborted or "
            "resumed sample is not reproduced: set rollout.engine = 'embedded' or 'sglang'"
        )
    elif rollout.engine == "sglang":
        if not gpus_per_node:
            refused = (
                "stock SGLang supports deterministic inference on GPUs only, but cluster.gpus_per_node = 0: set "
                "rollout.engine = 'embedded'"
            )
        elif not rollout.sglang.enable_deterministic_inference:
            refused = (
                "it requires rollout.sglang.enable_deterministic_inference, which is set to false: remove that key"
            )
        else:
            return
    elif gpus_per_node:
        return
    elif rollout.embedded.dtype == "float32":
        refused = "the trainer computes in bfloat16, but rollout.embedded.dtype = 'float32': remove that key"
    elif precision.format is not QuantFormat.BF16 and not precision.qat:
        refused = (
            f"the rollout uses {precision.format.value} weights, but the trainer computes with unrounded weights: "
            "set precision.qat = true or precision.format = 'bf16'"
        )
    else:
        return
    raise ValueError(f"alignment.deterministic = true: {refused}, or alignment.deterministic = false")


class MismatchConfig(Section):
    """Bounds on the mismatch of trainer and rollout log-probabilities (docs/alignment.md), and what a breach does."""

    kl_max: float | None = Field(None, ge=0)  # upper bound of mismatch/kl; None: none, in `verify` a default
    logprob_abs_diff_max: float | None = Field(None, ge=0)  # upper bound of mismatch/logprob_abs_diff_max; None: none
    extreme_frac_max: float | None = Field(None, ge=0, le=1)  # upper bound of mismatch/extreme_frac; None: none
    on_breach: Literal["warn", "down_weight", "stop"] = "warn"  # what to do when a step exceeds a bound
    # with replay.mode = "r3": minimum share of the recorded experts that the trainer's routers also choose, over all
    # layers; None: a bound derived from the precision; 0: no check. A breach ends the run before the step
    expert_agreement_min: float | None = Field(None, ge=0, le=1)
    layer_agreement_min: float | None = Field(None, ge=0, le=1)  # the same minimum, for each layer
    check_prompts: int = Field(8, ge=0)  # prompts compared on both sides before the first step of a process; 0: none
    check_every: int = Field(50, ge=0)  # steps between further comparisons; 0: only before the first step
    # steps between comparisons of the servers' checksums with those of the last publication; 0: no comparison
    checksums_every: int = Field(10, ge=0)

    @property
    def bounds(self) -> dict[str, float | None]:
        return self.model_dump(include={"kl_max", "logprob_abs_diff_max", "extreme_frac_max"})

    @model_validator(mode="after")
    def there_is_something_to_break(self) -> MismatchConfig:
        if self.on_breach != "warn" and all(bound is None for bound in self.bounds.values()):
            raise ValueError(
                f"mismatch.on_breach = {self.on_breach!r} has no effect without a bound: set mismatch.kl_max, "
                "mismatch.logprob_abs_diff_max or mismatch.extreme_frac_max, or remove it"
            )
        return self

"""Settings of the bounds on the mismatch of trainer and rollout. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles_like.section import Section


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

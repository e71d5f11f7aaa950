"""What a simulation assumes of models and machines: the keys `simulation.*`, by calibration from a run or from `--set`.

Times are seconds, on devices without other work. What the loop does with them follows from the run's configuration.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles_like.section import Section

PARTS = ("engine", "train", "publish")  # sections without which nothing can be simulated


class LengthAssumptions(Section):
    """Tokens of an answer, cut off at the configuration's longest answer."""

    kind: Literal["fixed", "exponential", "geometric", "lognormal", "recorded"] = "exponential"
    mean: float | None = Field(None, gt=0)  # before the cut; None with "recorded"
    sigma: float = Field(1.0, ge=0)  # of the logarithm, with "lognormal"
    # with "lognormal": share of the variance of the logarithm that the answers of a prompt have in common
    of_prompt: float = Field(0.0, ge=0, le=1)
    prompt_tokens: int | None = Field(None, ge=1)  # of a prompt; None with "recorded"

    @model_validator(mode="after")
    def drawn_lengths_have_a_mean(self) -> LengthAssumptions:
        for key, value in (("mean", self.mean), ("prompt_tokens", self.prompt_tokens)):
            if value is None and self.kind != "recorded":
                raise ValueError(
                    f"simulation.lengths.{key} is not set, but simulation.lengths.kind = {self.kind!r} needs it: "
                    "set it, or pass a run with rollouts as --from"
                )
        return self


class EngineAssumptions(Section):
    """One rollout server. A step feeds the prompts that were just admitted and samples one token of every sample."""

    step_s: float = Field(ge=0)  # of every step
    token_s: float = Field(0.0, ge=0)  # for each running sample
    context_s: float = Field(0.0, ge=0)  # for each token of context of each running sample: reading keys and values
    prefill_s: float = Field(0.0, ge=0)  # for each prompt token that is fed
    prefill_tokens: int | None = Field(None, ge=1)  # most in one step; None: 4096, the embedded engine's
    slots: int | None = Field(None, ge=1)  # samples in a batch; None: the configuration's max_running_requests
    kv_tokens: int | None = Field(None, ge=1)  # of the cache; None: the embedded engine's, else no limit
    request_s: float = Field(0.0, ge=0)  # of the driver, for each request
    reply_s: float = Field(0.0, ge=0)  # of the driver, for each sample of a reply
    cores: float = Field(1.0, ge=0)  # that a step keeps busy


class TrainAssumptions(Section):
    """Seconds of a training step."""

    fixed_s: float = Field(0.0, ge=0)  # of every step
    token_s: float = Field(0.0, ge=0)  # for each token, prompts included, of the DP shard that has most
    packing: Literal["packed", "padded"] = "packed"  # "padded": each micro-batch to its longest sample
    cores: float | None = Field(None, ge=0)  # kept busy; None: one for each rank


class PublishAssumptions(Section):
    seconds: float = Field(ge=0)
    pause_s: float = Field(0.0, ge=0)  # at its end, in which the servers generate nothing
    cores: float | None = Field(None, ge=0)  # kept busy; None: one for each rank

    @model_validator(mode="after")
    def the_pause_is_a_part(self) -> PublishAssumptions:
        if self.pause_s > self.seconds:
            raise ValueError(
                f"simulation.publish.pause_s = {self.pause_s:g} exceeds simulation.publish.seconds = "
                f"{self.seconds:g}, of which it is a part: lower it, or raise simulation.publish.seconds"
            )
        return self


class TurnAssumptions(Section):
    """Changes between servers and trainer on the same devices (docs/turns.md)."""

    release_s: float = Field(0.0, ge=0)
    wake_s: float = Field(0.0, ge=0)
    sleep_s: float = Field(0.0, ge=0)
    resume_s: float = Field(0.0, ge=0)


class RewardAssumptions(Section):
    """Seconds until a sample is scored."""

    mean_s: float = Field(0.0, ge=0)  # of one sample; all samples are scored concurrently
    kind: Literal["fixed", "exponential"] = "fixed"


class FaultAssumptions(Section):
    """Independent faults at constant rates. A fault ends the run, which resumes from its last complete checkpoint."""

    server_s: float | None = Field(None, gt=0)  # mean time between faults of one server; None: none
    trainer_s: float | None = Field(None, gt=0)  # of the trainer; None: none
    resume_s: float = Field(0.0, ge=0)  # from the fault to the first step: restart, loading, first publication
    # a server alone is restarted, in this time, and other servers sample its answers from their prompts. This project
    # does not do so. None: the run ends
    server_restart_s: float | None = Field(None, ge=0)


class Assumptions(Section):
    engine: EngineAssumptions
    train: TrainAssumptions
    publish: PublishAssumptions
    lengths: LengthAssumptions
    reward: RewardAssumptions = RewardAssumptions()
    turns: TurnAssumptions = TurnAssumptions()
    faults: FaultAssumptions = FaultAssumptions()
    experience_s: float = Field(0.0, ge=0)  # reference, teachers, critic
    checks_s: float = Field(0.0, ge=0)
    other_s: float = Field(0.0, ge=0)  # of the driver between two steps: records, state
    save_s: float = Field(0.0, ge=0)  # of a checkpoint
    save_copy_s: float = Field(0.0, ge=0)  # part of it in which an asynchronous save delays the trainer
    evaluated: int = Field(0, ge=0)  # answers of one evaluation; 0: none is simulated
    discarded: float = Field(0.0, ge=0, lt=1)  # share of the groups that the filter discards
    spare_samples: int = Field(0, ge=0)  # sampled for each group beyond its need, and aborted; not of this project
    cores: float | None = Field(None, gt=0)  # shared by all processes; None: separate devices


def missing(tree: object) -> list[str]:
    """The sections of PARTS, and `lengths`, that a tree of assumptions lacks."""
    given = tree if isinstance(tree, dict) else {}
    return [f"simulation.{part}" for part in (*PARTS, "lengths") if part not in given]

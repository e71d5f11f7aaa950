"""Algorithm settings: presets, the parts that they combine, the keys of each, and importance weights. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from miles_like.config.choices import Choice, Choices, keys, keys_of, part
from miles_like.config.supervised import SUPERVISED
from miles_like.section import Section

Estimator: TypeAlias = Literal["k1", "k2", "k3"]

# Parts of an algorithm. Their fields are the keys that they read, with their defaults; AlgorithmConfig has the ranges.


class Named(Section):
    """An advantage without keys, or a user's advantage or loss."""

    name: str  # of NAMED, or an import path


class Grpo(Section):
    normalize_std: bool = True


class Reinforce(Section):
    batch_baseline: bool = False


class ReinforcePlusPlus(Section):
    gamma: float = 1.0


class Ppo(Section):
    gamma: float = 1.0
    gae_lambda: float = 1.0
    value_clip: float = 0.2


class PolicyTerms(Section):
    """Keys of every built-in loss."""

    entropy_coefficient: float = 0.0
    off_policy_delta: float | None = None


class Clipped(PolicyTerms):
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = None
    log_ratio_clamp: float | None = None


class Gspo(Clipped):
    clip_low: float = 3e-4  # arXiv:2507.18071, 5.1
    clip_high: float = 4e-4


class Decoupled(Clipped):
    behaviour_cap: float = 5.0  # AReaL's own


class Cispo(PolicyTerms):
    clip_low: float = 1.0  # no lower bound
    clip_high: float = 4.0  # weights up to 5, as in ScaleRL, arXiv:2510.13786
    log_ratio_clamp: float | None = None


class Sapo(PolicyTerms):
    tau_pos: float = 1.0  # arXiv:2511.20347
    tau_neg: float = 1.05
    log_ratio_clamp: float | None = None


class PenaltyInLoss(Section):
    kl_estimator: Estimator = "k3"
    kl_unbiased: bool = False


class PenaltyInReward(Section):
    kl_estimator: Estimator = "k1"


Advantage: TypeAlias = Grpo | Reinforce | ReinforcePlusPlus | Ppo
ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": Grpo,
    "reinforce": Reinforce,
    "reinforce_pp": ReinforcePlusPlus,
    "ppo": Ppo,
}
NAMED = ("dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl")  # advantages without keys
Loss: TypeAlias = Clipped | Cispo | Sapo | PolicyTerms
LOSSES: dict[str, type[Loss]] = {
    "clipped": Clipped,
    "gspo": Gspo,
    "cispo": Cispo,
    "sapo": Sapo,
    "decoupled": Decoupled,
    "reinforce": PolicyTerms,
}
ADVANTAGE_KEYS = {name: keys_of(kind) for name, kind in ADVANTAGES.items()} | {name: keys() for name in NAMED}
LOSS_KEYS = {name: keys_of(kind) for name, kind in LOSSES.items()}
TOKEN_LEVEL = ("reinforce_pp", "ppo")  # advantages of tokens; the others are of samples
GROUP_LEVEL = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline")  # always 0 with one sample per prompt
# name -> what it changes. Clip bounds are defaults of the loss, so that any part can be replaced.
PRESETS: dict[str, dict[str, str | float]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "rloo": {"advantage": "rloo", "loss": "reinforce", "aggregation": "sequence_sum"},
    "reinforce": {"advantage": "reinforce", "loss": "reinforce", "aggregation": "sequence_sum"},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl_coefficient": 1e-3, "kl_in": "reward"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl_coefficient": 1e-3, "kl_estimator": "k2"},
    "ppo": {"advantage": "ppo", "kl_in": "reward"},
    "dapo": {"filter": "nonzero_std", "overlong_penalty": 1.0},
    "maxrl": {"advantage": "maxrl"},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "decoupled_ppo": {"loss": "decoupled"},
}
_PARTS = {"advantage": "grpo", "loss": "clipped", "aggregation": "token_mean"}


class AlgorithmConfig(Section):
    """A preset's parts and their keys; docs/algorithms.md defines each. A key that is not given gets the default of the
    preset or of the part, and the resolved configuration shows it. A key that the chosen parts do not read is None."""

    name: str = "grpo"  # of PRESETS, or of SUPERVISED, which have no parts
    advantage: str | None = None  # of ADVANTAGE_KEYS, or pkg.module:name of a user's AdvantageFn
    loss: str | None = None  # of LOSS_KEYS, or pkg.module:name of a user's LossFn
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "prompt_mean", "constant"] | None = None
    aggregation_constant: int | None = Field(None, ge=1)  # tokens; None: the longest answer's
    normalize_std: bool | None = None  # divide advantages by the group's standard deviation
    batch_baseline: bool | None = None  # subtract the mean reward of the rollout
    gamma: float | None = Field(None, gt=0, le=1)
    gae_lambda: float | None = Field(None, ge=0, le=1)
    value_clip: float | None = Field(None, gt=0)
    clip_low: float | None = Field(None, gt=0, le=1)
    clip_high: float | None = Field(None, gt=0)
    clip_dual: float | None = Field(None, gt=1)  # None: no dual clip
    tau_pos: float | None = Field(None, gt=0)
    tau_neg: float | None = Field(None, gt=0)
    behaviour_cap: float | None = Field(None, ge=1)
    kl_coefficient: float = Field(0.0, ge=0)  # of the KL penalty; 0: no penalty and no reference
    kl_in: Literal["loss", "reward"] | None = None
    kl_estimator: Estimator | None = None
    kl_unbiased: bool | None = None  # multiply the penalty by p_train / p_rollout
    # Bounds in nats of log(p_train / p_old) and of k3's log-ratio, and of k3's value; None: no bound. verl: 20 and 10.
    log_ratio_clamp: float | None = Field(None, gt=0)
    k3_clamp: float | None = Field(None, gt=0)
    reference_every: int = Field(0, ge=0)  # rollouts between updates of the reference to the trained weights; 0: never
    entropy_coefficient: float = Field(0.0, ge=0)
    off_policy_delta: float | None = Field(None, ge=0)  # nats/token; None: no sample is masked
    filter: str = "off"  # of groups: "off", "nonzero_std", or pkg.module:name of a user's GroupFilter
    overlong_penalty: float = Field(0.0, ge=0)  # subtracted from the reward of a sample at the token limit
    overlong_buffer: int | None = Field(None, ge=1)  # tokens below the limit; None: a fifth of it
    mask_truncated: bool = False  # do not train on samples that were cut at the token limit
    shuffle_advantages: bool = False  # control experiment: shuffle advantages over the batch

    @model_validator(mode="before")
    @classmethod
    def parts_of_the_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {k: v for k, v in given.items() if v is not None}
        name = given.get("name", "grpo")
        if not isinstance(name, str):
            return given
        if name in SUPERVISED:
            return given
        if name not in PRESETS:
            raise ValueError(_unknown("name", name, [*PRESETS, *SUPERVISED]))
        asked = {"name": name} | _PARTS | PRESETS[name] | given
        read = CHOICES.read(asked)
        return read | {k: v for k, v in asked.items() if k in read or k in given}

    @model_validator(mode="after")
    def parts_are_known(self) -> AlgorithmConfig:
        for key, known in (("advantage", ADVANTAGE_KEYS), ("loss", LOSS_KEYS)):
            value = getattr(self, key)
            if value is not None and value not in known and ":" not in value:
                raise ValueError(_unknown(key, value, known) + " (or pkg.module:name of a custom one)")
        return self

    @model_validator(mode="after")
    def every_key_does_something(self) -> AlgorithmConfig:
        CHOICES.check(self)
        if self.own_loss and isinstance(self.penalty, PenaltyInLoss):
            raise ValueError(
                f"algorithm.kl_coefficient = {self.kl_coefficient} does nothing with the custom loss "
                f"{self.loss!r}: set algorithm.kl_in = 'reward', or remove it"
            )
        if self.advantage == "maxrl" and (self.overlong_penalty or self.kl_in == "reward"):
            key = "overlong_penalty" if self.overlong_penalty else "kl_in"
            raise ValueError(
                f"algorithm.{key} = {getattr(self, key)!r} makes rewards below 0, and algorithm.advantage = 'maxrl' "
                "divides by their mean: remove one of them"
            )
        if self.shuffle_advantages and self.advantage in TOKEN_LEVEL:
            raise ValueError(
                f"algorithm.shuffle_advantages cannot shuffle the token-level advantages of algorithm.advantage = "
                f"{self.advantage!r}: set it to false, or choose a sample-level advantage"
            )
        return self

    @property
    def advantage_part(self) -> Advantage | Named:
        """Raises ValueError as `sampled`."""
        name = self.sampled(self.advantage)
        return part(self, ADVANTAGES[name]) if name in ADVANTAGES else Named(name=name)

    @property
    def loss_part(self) -> Loss | Named:
        """Raises ValueError as `sampled`."""
        name = self.sampled(self.loss)
        return part(self, LOSSES[name]) if name in LOSSES else Named(name=name)

    @property
    def penalty(self) -> PenaltyInLoss | PenaltyInReward | None:
        """The KL penalty; None: off."""
        if not self.kl_coefficient:
            return None
        return part(self, PenaltyInReward) if self.kl_in == "reward" else part(self, PenaltyInLoss)

    def sampled(self, name: str | None) -> str:
        """`name` of a part. Raises ValueError for None: an algorithm without a rollout has no parts."""
        if name is None:
            raise ValueError(f"algorithm.name = {self.name!r} has no rollout to train on: see docs/supervised.md")
        return name

    @property
    def supervised(self) -> bool:
        """Whether training is on given answers, without a rollout."""
        return self.name in SUPERVISED

    @property
    def own_loss(self) -> bool:
        """Whether the loss is a user's."""
        return self.loss is not None and self.loss not in LOSS_KEYS

    @property
    def has_critic(self) -> bool:
        return self.advantage == "ppo"

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer keeps reference weights."""
        return self.kl_coefficient > 0 or self.name == "dpo"

    @property
    def reference_stream(self) -> bool:
        """Whether the advantages need every sample's log-probabilities under the reference."""
        return self.kl_in == "reward"

    def constant(self, longest_answer: int) -> int | None:
        """Tokens that aggregation "constant" divides by; None with another aggregation."""
        return (self.aggregation_constant or longest_answer) if self.aggregation == "constant" else None

    def check_run(
        self, *, longest_answer: int, group: int | None, taught: bool, correction: str, on_breach: str
    ) -> None:
        """Check against the other sections; raises ValueError for settings that would silently do nothing.

        longest_answer: tokens; group: samples per prompt, None if advantages do not come from rewards; taught: whether
        a teacher is the reference; correction: `correction.kind`; on_breach: `mismatch.on_breach`.
        """
        if self.reference_every and not (self.keeps_reference or taught):
            raise ValueError(
                f"algorithm.reference_every = {self.reference_every} does nothing without a reference: set "
                "algorithm.kl_coefficient, or add a teacher of kind 'self' with weights = 'reference'"
            )
        if group == 1 and self.filter == "nonzero_std":
            raise ValueError(
                "train.samples_per_group = 1 with algorithm.filter = 'nonzero_std', which discards every group of one "
                "sample: raise it, or set algorithm.filter = 'off'"
            )
        if group == 1 and self.advantage in GROUP_LEVEL:
            raise ValueError(
                f"train.samples_per_group = 1 with algorithm.advantage = {self.advantage!r}, which is 0 for a group of "
                "one sample: raise it, or set algorithm.advantage to 'reinforce', 'reinforce_pp' or 'ppo'"
            )
        if (self.overlong_buffer or 1) > longest_answer:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.overlong_buffer} tokens is larger than the limit of "
                f"{longest_answer} (rollout.max_new_tokens, or rollout.max_episode_tokens for episodes): lower it"
            )
        if correction != "off" and (self.own_loss or self.loss == "decoupled"):
            why = "a custom loss" if self.own_loss else "which already weights by p_old / p_rollout"
            raise ValueError(
                f"correction.kind = {correction!r} does nothing with algorithm.loss = {self.loss!r}, {why}: set it to "
                "'off', or choose another loss"
            )
        if on_breach == "down_weight" and self.own_loss:
            raise ValueError(
                f"mismatch.on_breach = 'down_weight' does nothing with the custom loss {self.loss!r}: set it to "
                "'warn' or 'stop'"
            )


def _unknown(key: str, value: object, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)
    return f"unknown algorithm.{key} {value!r}: did you mean {near[0]!r}? Known: {sorted(known)}"


_DECIDED = (
    Choice("advantage", ADVANTAGE_KEYS),
    Choice("loss", LOSS_KEYS),
    Choice("aggregation", {"constant": keys("aggregation_constant")}),
    Choice("overlong_penalty", otherwise=keys("overlong_buffer")),
    Choice("kl_coefficient", otherwise={"kl_in": "loss"}),
    Choice("kl_in", {"loss": keys_of(PenaltyInLoss), "reward": keys_of(PenaltyInReward)}),
    Choice("kl_estimator", {"k3": keys("log_ratio_clamp", "k3_clamp")}),
)
_COMMON = {
    key: default
    for key, default in keys_of(AlgorithmConfig).items()
    if key != "name" and not any(choice.decides(key) for choice in _DECIDED)
}
CHOICES = Choices("algorithm", Choice("name", {name: keys() for name in SUPERVISED}, otherwise=_COMMON), *_DECIDED)


Level: TypeAlias = Literal["token", "sequence", "geometric", "k3"]
Action: TypeAlias = Literal["truncate", "mask"]


class Weights(Section):
    """A correction that is on."""

    level: Level
    action: Action
    low: float
    high: float
    veto: float


class CorrectionConfig(Section):
    """Importance weights w against the mismatch of trainer and rollout; docs/corrections.md defines each kind.

    A key that is not given gets the default of the kind, level and action (`BOUNDS_OF`), and the resolved configuration
    shows it.
    """

    kind: Literal["off", "tis", "mis", "icepop"] = "off"
    level: Level | None = None  # of the ratio that is compared with the bounds
    action: Action | None = None  # outside the bounds w is the bound, or 0
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, gt=0)
    veto: float | None = Field(None, ge=0, lt=1)  # a sample with a token ratio below it has w = 0; 0: no veto

    @model_validator(mode="before")
    @classmethod
    def bounds_of_the_kind(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "off")
        first = next(((level, action) for k, level, action in BOUNDS_OF if k == kind), None)
        if first is None:
            return given
        out = {"level": first[0], "action": first[1]} | given
        bounds = BOUNDS_OF.get((kind, out["level"], out["action"]))
        return out if bounds is None else dict(zip(("low", "high", "veto"), bounds, strict=True)) | out

    @model_validator(mode="after")
    def every_key_does_something(self) -> CorrectionConfig:
        CORRECTION_CHOICES.check(self)
        if self.kind == "off":
            return self
        if (self.kind, self.level, self.action) not in BOUNDS_OF:
            ways = [f"{level}, {action}" for kind, level, action in BOUNDS_OF if kind == self.kind]
            raise ValueError(
                f"correction.kind = {self.kind!r} with level = {self.level!r} and action = {self.action!r}: it is "
                f"defined for (level, action) = ({'), ('.join(ways)}); kind 'mis' has more combinations"
            )
        weights = part(self, Weights)
        low, high, agrees = weights.low, weights.high, 0.0 if weights.level == "k3" else 1.0
        if self.level == "k3" and low:
            raise ValueError(
                f"correction.low = {low} with level = 'k3', which is 0 where trainer and rollout agree: remove it"
            )
        if not low <= agrees <= high:
            raise ValueError(
                f"correction.low = {low} and high = {high} exclude {agrees}, where trainer and rollout agree: set low "
                "below it and high above it"
            )
        if low == high:
            raise ValueError(
                f"correction.low = correction.high = {low} leaves no ratio to choose from: widen the bounds"
            )
        return self

    @property
    def weights(self) -> Weights | None:
        """None: off."""
        return None if self.kind == "off" else part(self, Weights)


CORRECTION_CHOICES = Choices("correction", Choice("kind", {"off": keys()}, otherwise=keys(*Weights.model_fields)))


# (kind, level, action) -> (low, high, veto); the first entry of a kind is its default
BOUNDS_OF: dict[tuple[str, str, str], tuple[float, float, float]] = {
    ("tis", "token", "truncate"): (0.0, 2.0, 0.0),
    ("mis", "token", "mask"): (0.5, 2.0, 1e-4),
    ("mis", "token", "truncate"): (0.0, 2.0, 1e-4),
    ("mis", "sequence", "mask"): (0.5, 2.0, 1e-4),
    ("mis", "sequence", "truncate"): (0.0, 2.0, 1e-4),
    ("mis", "geometric", "mask"): (0.999, 1.001, 1e-4),
    ("mis", "geometric", "truncate"): (0.0, 1.001, 1e-4),
    ("mis", "k3", "mask"): (0.0, 0.01, 1e-4),
    ("icepop", "token", "mask"): (0.5, 5.0, 0.0),
}

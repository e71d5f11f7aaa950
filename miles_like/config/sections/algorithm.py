"""Algorithm settings: presets, the parts that they combine, and the keys of each. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from miles_like.config.sections.flat import FlatSection, Part
from miles_like.config.sections.supervised import FROM_REFERENCE, SupervisedName

ClipLow: TypeAlias = Annotated[float, Field(gt=0, le=1)]
ClipHigh: TypeAlias = Annotated[float, Field(gt=0)]
Clamp: TypeAlias = Annotated[float | None, Field(gt=0)]


class AdvantagePart(Part):
    chosen_by = "advantage"
    token_level: ClassVar[bool] = False  # False: one number per sample


class Grpo(AdvantagePart):
    advantage: Literal["grpo"] = "grpo"
    normalize_std: bool = True  # divide by the group's standard deviation


class Reinforce(AdvantagePart):
    advantage: Literal["reinforce"] = "reinforce"
    batch_baseline: bool = False  # subtract the mean reward of the rollout


class ReinforcePlusPlus(AdvantagePart):
    advantage: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: float = Field(1.0, gt=0, le=1)  # discount factor of a token's reward

    token_level = True


class Ppo(AdvantagePart):
    advantage: Literal["ppo"] = "ppo"
    gamma: float = Field(1.0, gt=0, le=1)  # discount factor of a token's reward
    gae_lambda: float = Field(1.0, ge=0, le=1)  # lambda of generalized advantage estimation
    value_clip: float = Field(0.2, gt=0)  # largest change of a value in the critic's loss

    token_level = True


class Remax(AdvantagePart):
    advantage: Literal["remax"] = "remax"

    token_level = True


class Keyless(AdvantagePart):
    advantage: Literal["dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl", "opo"]


class CustomAdvantage(AdvantagePart):
    advantage: str  # pkg.module:name of a custom AdvantageFn


class EpisodeCredit(Part):
    chosen_by = "turn_credit"
    turn_credit: Literal["episode"] = "episode"


class TurnCredit(Part):
    chosen_by = "turn_credit"
    turn_credit: Literal["discounted", "turn_groups"]
    turn_discount: float = Field(1.0, ge=0, le=1)  # factor of the return of the next turn


class LossPart(Part):
    """Keys of every built-in loss."""

    chosen_by = "loss"
    entropy_coefficient: float = Field(0.0, ge=0)  # factor of the entropy that is subtracted from the loss; 0: none
    # mask samples of negative advantage with a mean log(p_rollout / p_train) above it, in nats/token; None: mask none
    off_policy_delta: float | None = Field(None, ge=0)


class _Clip(LossPart):
    clip_low: ClipLow = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: ClipHigh = 0.28  # the ratio is clipped above 1 + clip_high
    clip_dual: float | None = Field(None, gt=1)  # upper bound of the ratio for negative advantages; None: no bound
    # bound in nats of log(p_train / p_old), or of k3's log-ratio; None: no bound. verl's default: 20
    log_ratio_clamp: Clamp = None


class Clipped(_Clip):
    loss: Literal["clipped"] = "clipped"


class Gspo(_Clip):
    loss: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4  # arXiv:2507.18071, 5.1
    clip_high: ClipHigh = 4e-4


class Decoupled(_Clip):
    loss: Literal["decoupled"] = "decoupled"
    behaviour_cap: float = Field(5.0, ge=1)  # a token with p_old / p_rollout above it gets weight 0; AReaL's default


class Cispo(LossPart):
    loss: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0  # no lower bound
    clip_high: ClipHigh = 4.0  # weights up to 5, as in ScaleRL, arXiv:2510.13786
    log_ratio_clamp: Clamp = None


class Sapo(LossPart):
    loss: Literal["sapo"] = "sapo"
    tau_pos: float = Field(1.0, gt=0)  # gate temperature for positive advantages (arXiv:2511.20347)
    tau_neg: float = Field(1.05, gt=0)  # gate temperature for other advantages
    log_ratio_clamp: Clamp = None


class ClipCov(LossPart):
    loss: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    cov_ratio: float = Field(2e-4, gt=0, le=1)  # share of a micro-batch's tokens that are chosen; at least one is
    cov_low: float = 1.0  # lower bound of the covariance of a token that is chosen
    cov_high: float = 5.0  # upper bound of the covariance of a token that is chosen
    log_ratio_clamp: Clamp = None

    @model_validator(mode="after")
    def bounds_leave_room(self) -> ClipCov:
        if not self.cov_low < self.cov_high:
            raise ValueError(
                f"algorithm.cov_low = {self.cov_low} and cov_high = {self.cov_high} select no token: set cov_low "
                "below cov_high"
            )
        return self


class KlCov(LossPart):
    loss: Literal["kl_cov"] = "kl_cov"
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    cov_coefficient: float = Field(1.0, gt=0)  # factor of the penalty on the chosen tokens
    log_ratio_clamp: Clamp = None


class Unclipped(LossPart):
    loss: Literal["reinforce"] = "reinforce"


class CustomLoss(Part):
    chosen_by = "loss"
    loss: str  # pkg.module:name of a custom LossFn


class Mean(Part):
    chosen_by = "aggregation"
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "prompt_mean"] = "token_mean"


class Constant(Part):
    chosen_by = "aggregation"
    aggregation: Literal["constant"] = "constant"
    # divisor of the summed loss, in tokens; None: the longest answer's tokens
    aggregation_constant: int | None = Field(None, ge=1)


class K3(Part):
    chosen_by = "kl_estimator"
    kl_estimator: Literal["k3"] = "k3"
    log_ratio_clamp: Clamp = None
    k3_clamp: float | None = Field(None, gt=0)  # upper bound of k3; None: no bound. verl's default: 10


class Unclamped(Part):
    chosen_by = "kl_estimator"
    kl_estimator: Literal["k1", "k2", "abs"] = "k1"


class Penalty(Part):
    """The KL penalty, which needs reference weights."""

    chosen_by, switch = "kl_in", "kl_coefficient"
    kl_coefficient: float = Field(gt=0)  # factor of the KL penalty against the reference weights; 0: no penalty


class PenaltyInLoss(Penalty):
    kl_in: Literal["loss"] = "loss"
    # estimate of the KL divergence from the reference
    estimator: Annotated[K3 | Unclamped, Field(discriminator="kl_estimator")] = K3()
    kl_unbiased: bool = False  # multiply the penalty by p_train / p_rollout


class PenaltyInReward(Penalty):
    kl_in: Literal["reward"] = "reward"
    # estimate of the KL divergence from the reference
    estimator: Annotated[Unclamped | K3, Field(discriminator="kl_estimator")] = Unclamped()


class Overlong(Part):
    switch = "overlong_penalty"
    overlong_penalty: float = Field(gt=0)  # largest penalty, subtracted from the reward of a sample at the token limit
    # tokens below the limit where the penalty starts; None: a fifth of the limit
    overlong_buffer: int | None = Field(None, ge=1)


Advantage: TypeAlias = (
    Annotated[Grpo | Reinforce | ReinforcePlusPlus | Ppo | Remax | Keyless, Field(discriminator="advantage")]
    | CustomAdvantage
)
Credit: TypeAlias = Annotated[EpisodeCredit | TurnCredit, Field(discriminator="turn_credit")]
Loss: TypeAlias = (
    Annotated[Clipped | Gspo | Cispo | Sapo | Decoupled | ClipCov | KlCov | Unclipped, Field(discriminator="loss")]
    | CustomLoss
)
Aggregate: TypeAlias = Annotated[Mean | Constant, Field(discriminator="aggregation")]
KlPenalty: TypeAlias = Annotated[PenaltyInLoss | PenaltyInReward, Field(discriminator="kl_in")]
Preset: TypeAlias = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "dapo",
    "maxrl",
    "gspo",
    "cispo",
    "sapo",
    "decoupled_ppo",
    "remax",
    "opo",
    "clip_cov",
    "kl_cov",
]
# always 0 with one sample per prompt
GROUP_LEVEL = ("grpo", "dr_grpo", "rloo", "maxrl", "opo", "remax", "reinforce_pp_baseline")
# name -> what it changes. Clip bounds are defaults of the loss, so that any part can be replaced.
PRESETS: dict[Preset, dict[str, str | float]] = {
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
    "remax": {"advantage": "remax", "loss": "reinforce", "aggregation": "sequence_sum"},
    "opo": {"advantage": "opo"},
    "clip_cov": {"loss": "clip_cov"},
    "kl_cov": {"loss": "kl_cov"},
}


_OF_TURNS = {"advantage": "'grpo' or 'dr_grpo'", "kl_in": "'loss'", "shuffle_advantages": "false"}  # with turn_credit


class RolloutAlgorithm(Part):
    """The parts of a preset; docs/algorithms.md defines each."""

    chosen_by = "name"
    name: Preset = "grpo"
    advantage: Advantage = Grpo()  # estimator that turns rewards into advantages
    # which rewards of an episode a turn's tokens get: those of all turns together ("episode"), or their discounted sum
    # from this turn on, compared with all turns of the group ("discounted") or those of this number ("turn_groups")
    credit: Credit = EpisodeCredit()
    loss: Loss = Clipped()  # policy loss of a token, from its advantage and probability ratio
    aggregation: Aggregate = Mean()  # how the token losses of a step are reduced to one number
    penalty: KlPenalty | None = None  # where the KL penalty is applied
    reference_every: int = Field(0, ge=0)  # rollouts between updates of the reference to the trained weights; 0: never
    filter: str = "off"  # which groups to discard: "off", "nonzero_std", or pkg.module:name of a custom GroupFilter
    overlong: Overlong | None = None
    mask_truncated: bool = False  # do not train on samples that were cut at the token limit
    shuffle_advantages: bool = False  # control experiment: shuffle advantages over the batch

    @model_validator(mode="after")
    def parts_fit_each_other(self) -> RolloutAlgorithm:
        if isinstance(self.loss, CustomLoss) and isinstance(self.penalty, PenaltyInLoss):
            raise ValueError(
                f"algorithm.kl_coefficient = {self.penalty.kl_coefficient} has no effect with the custom loss "
                f"{self.loss.loss!r}: set algorithm.kl_in = 'reward', or remove it"
            )
        below_0: dict[str, object] = {
            "overlong_penalty": self.overlong and self.overlong.overlong_penalty,
            "kl_in": "reward" if self.reference_stream else None,
        }
        for key, value in below_0.items():
            if value and self.advantage.advantage == "maxrl":
                raise ValueError(
                    f"algorithm.{key} = {value!r} allows rewards below 0, but algorithm.advantage = 'maxrl' "
                    "divides by their mean: remove one of them"
                )
        if isinstance(self.credit, TurnCredit):
            name, own = self.advantage.advantage, self.shuffle_advantages
            wrong = {
                "advantage": name not in ("grpo", "dr_grpo"),
                "kl_in": self.reference_stream,
                "shuffle_advantages": own,
            }
            for key in [key for key, is_wrong in wrong.items() if is_wrong]:
                raise ValueError(
                    f"algorithm.turn_credit = {self.credit.turn_credit!r} compares the turns of a group, each by its "
                    f"own reward: set algorithm.{key} to {_OF_TURNS[key]}, or turn_credit = 'episode'"
                )
        if self.shuffle_advantages and self.advantage.token_level:
            raise ValueError(
                f"algorithm.shuffle_advantages cannot shuffle the token-level advantages of algorithm.advantage = "
                f"{self.advantage.advantage!r}: set it to false, or choose a sample-level advantage"
            )
        return self

    @property
    def reference_stream(self) -> bool:
        """Whether the advantages need every sample's log-probabilities under the reference."""
        return isinstance(self.penalty, PenaltyInReward)

    def constant(self, longest_answer: int) -> int | None:
        """Tokens that aggregation "constant" divides by; None with another aggregation."""
        mean = self.aggregation
        return (mean.aggregation_constant or longest_answer) if isinstance(mean, Constant) else None

    def check_run(
        self, *, longest_answer: int, group: int | None, taught: bool, correction: str, on_breach: str
    ) -> None:
        """Check against the other sections; raises ValueError for settings that would silently do nothing.

        longest_answer: tokens; group: samples per prompt, None if advantages do not come from rewards; taught: whether
        a teacher is the reference; correction: `correction.kind`; on_breach: `mismatch.on_breach`.
        """
        loss, advantage, own = self.loss.loss, self.advantage.advantage, isinstance(self.loss, CustomLoss)
        if self.reference_every and not (self.penalty or taught):
            raise ValueError(
                f"algorithm.reference_every = {self.reference_every} has no effect without a reference: set "
                "algorithm.kl_coefficient, or add a teacher of kind 'self' with weights = 'reference'"
            )
        if group == 1 and self.filter == "nonzero_std":
            raise ValueError(
                "train.samples_per_group = 1, but algorithm.filter = 'nonzero_std' discards all groups of one "
                "sample: increase train.samples_per_group, or set algorithm.filter = 'off'"
            )
        if group == 1 and advantage in GROUP_LEVEL:
            raise ValueError(
                f"train.samples_per_group = 1, but algorithm.advantage = {advantage!r} needs at least 2 samples per "
                "group: increase it, or use 'reinforce', 'reinforce_pp' or 'ppo'"
            )
        if self.overlong is not None and (self.overlong.overlong_buffer or 1) > longest_answer:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.overlong.overlong_buffer} tokens is larger than the limit of "
                f"{longest_answer} (rollout.max_new_tokens, or rollout.max_episode_tokens for episodes): lower it"
            )
        if correction != "off" and (own or loss == "decoupled"):
            why = "a custom loss" if own else "which already weights by p_old / p_rollout"
            raise ValueError(
                f"correction.kind = {correction!r} has no effect with algorithm.loss = {loss!r}, {why}: set it to "
                "'off', or choose another loss"
            )
        if on_breach == "down_weight" and own:
            raise ValueError(
                f"mismatch.on_breach = 'down_weight' has no effect with the custom loss {loss!r}: set it to "
                "'warn' or 'stop'"
            )


class SupervisedAlgorithm(Part):
    """Without a rollout; its keys are in [supervised]."""

    chosen_by = "name"
    name: SupervisedName


class AlgorithmConfig(FlatSection):
    """An algorithm. A key that is not given gets the default of the preset or of the part, and the resolved
    configuration shows it."""

    # a preset of the keys below, or training without a rollout (docs/supervised.md)
    of: Annotated[RolloutAlgorithm | SupervisedAlgorithm, Field(discriminator="name")] = RolloutAlgorithm()

    section = "algorithm"
    order = (
        *("name", "advantage", "loss", "aggregation", "aggregation_constant"),
        *("turn_credit", "turn_discount"),
        *("normalize_std", "batch_baseline", "gamma", "gae_lambda", "value_clip"),
        *("clip_low", "clip_high", "clip_dual", "tau_pos", "tau_neg", "behaviour_cap"),
        *("cov_ratio", "cov_low", "cov_high", "cov_coefficient"),
        *("kl_coefficient", "kl_in", "kl_estimator", "kl_unbiased", "log_ratio_clamp", "k3_clamp", "reference_every"),
        *("entropy_coefficient", "off_policy_delta", "filter", "overlong_penalty", "overlong_buffer"),
        *("mask_truncated", "shuffle_advantages"),
    )
    absent: ClassVar[Mapping[str, object]] = {
        **dict.fromkeys(("kl_coefficient", "entropy_coefficient", "overlong_penalty"), 0.0),
        **dict.fromkeys(("mask_truncated", "shuffle_advantages"), False),
        "reference_every": 0,
        "filter": "off",
    }

    @classmethod
    def implied(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """The parts and keys of the preset."""
        return next((keys for name, keys in PRESETS.items() if name == given.get("name")), {})

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def parts(self) -> RolloutAlgorithm:
        """Raises ValueError for an algorithm without a rollout, which has no parts."""
        if isinstance(self.of, RolloutAlgorithm):
            return self.of
        raise ValueError(f"algorithm.name = {self.name!r} trains without a rollout: see docs/supervised.md")

    @property
    def supervised(self) -> bool:
        """Whether training is on given answers, without a rollout."""
        return isinstance(self.of, SupervisedAlgorithm)

    @property
    def has_critic(self) -> bool:
        return not self.supervised and isinstance(self.parts.advantage, Ppo)

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer keeps reference weights."""
        return self.name in FROM_REFERENCE if self.supervised else self.parts.penalty is not None

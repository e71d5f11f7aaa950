"""Algorithms from their configuration: each typed part becomes an advantage or a loss.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from torch import Tensor

from miles_like.algorithms.advantages.grpo import GroupRelative
from miles_like.algorithms.advantages.maxrl import over_mean
from miles_like.algorithms.advantages.opo import length_weighted
from miles_like.algorithms.advantages.parts import InParts, OfSamples
from miles_like.algorithms.advantages.penalty import KlPenalty, Penalized
from miles_like.algorithms.advantages.ppo import Gae
from miles_like.algorithms.advantages.reinforce import Reinforce
from miles_like.algorithms.advantages.reinforce_pp import ReinforcePlusPlus, whitened_baseline
from miles_like.algorithms.advantages.remax import Remax
from miles_like.algorithms.advantages.rloo import leave_one_out
from miles_like.algorithms.advantages.turns import TurnRelative
from miles_like.algorithms.losses.cispo import CispoLoss
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.covariance import ClipCovLoss, KlCovLoss
from miles_like.algorithms.losses.custom import CustomLoss, KeywordLoss, KeywordLossFn
from miles_like.algorithms.losses.decoupled import behaviour_weights
from miles_like.algorithms.losses.gspo import GspoLoss
from miles_like.algorithms.losses.reinforce import ReinforceLoss
from miles_like.algorithms.losses.sapo import SapoLoss
from miles_like.algorithms.losses.value import ValueLoss
from miles_like.algorithms.terms.bounds import Bounds
from miles_like.algorithms.terms.correction import Correction
from miles_like.algorithms.terms.kl import Estimator
from miles_like.config.sections import algorithm as parts
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.watched.mismatch import MismatchConfig
from miles_like.plugins import load, misfit
from miles_like.protocols import AdvantageFn, AdvantageParts, Algorithm, LossFn
from miles_like.types import GREEDY, REFERENCE, VALUES, Aggregation, SampleGroup

_KEYLESS: dict[str, AdvantageFn] = {
    "dr_grpo": GroupRelative(False),
    "rloo": leave_one_out,
    "reinforce_pp_baseline": whitened_baseline,
    "maxrl": over_mean,
    "opo": length_weighted,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """An `Algorithm` from its parts."""

    name: str
    advantage: AdvantageFn
    loss: LossFn
    aggregation: Aggregation
    needs: frozenset[str]
    of_user: bool = False  # the advantage is a user's function

    @property
    def parts(self) -> AdvantageParts | None:
        return self.advantage if isinstance(self.advantage, InParts) and not self.of_user else None

    def advantages(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """For each group [G] numbers, or [S] fp32; raises ValueError for a sample without a finite reward or without a
        stream of `needs`."""
        return self.advantage(groups)

    def returns(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[Tensor]] | None:
        """For each group [G] of [S] fp32, the critic's training targets; None without a critic."""
        return self.advantage.returns(groups) if isinstance(self.advantage, Gae) else None


def make_algorithm(
    config: AlgorithmConfig, correction: CorrectionConfig, mismatch: MismatchConfig | None = None
) -> Algorithm:
    """The configured algorithm. Raises ValueError for parts that do not fit each other, for a user's part that cannot
    be loaded, and for an algorithm without a rollout."""
    of, penalty = config.parts, None
    if isinstance(of.penalty, parts.PenaltyInReward):
        kl = of.penalty.estimator
        penalty = KlPenalty(coefficient=of.penalty.kl_coefficient, estimator=kl.kl_estimator)
        if isinstance(kl, parts.K3):
            penalty = replace(penalty, log_ratio_clamp=kl.log_ratio_clamp, k3_clamp=kl.k3_clamp)
    turns = _of_turns(of.advantage, of.credit)
    needs = ({VALUES} if config.has_critic else set()) | ({REFERENCE} if penalty else set())
    needs |= {GREEDY} if isinstance(of.advantage, parts.Remax) else set()
    return PolicyGradient(
        name=config.name,
        advantage=_advantage(of.advantage, penalty) if turns is None else turns,
        loss=_loss(of.loss, _terms(of, correction, mismatch)),
        aggregation=Aggregation(of.aggregation.aggregation),
        needs=frozenset(needs),
        of_user=isinstance(of.advantage, parts.CustomAdvantage),
    )


def make_critic_loss(config: AlgorithmConfig) -> ValueLoss | None:
    """The loss of the critic; None: the algorithm has no critic."""
    advantage = None if config.supervised else config.parts.advantage
    return ValueLoss(value_clip=advantage.value_clip) if isinstance(advantage, parts.Ppo) else None


def make_correction(config: CorrectionConfig) -> Correction | None:
    """The configured correction; None: off."""
    w = config.weights
    if w is None:
        return None
    return Correction(level=w.level, action=w.action, low=w.low, high=w.high, veto=w.veto)


def make_bounds(config: MismatchConfig) -> Bounds:
    return Bounds(**config.bounds)


def _advantage(part: parts.Advantage, penalty: KlPenalty | None) -> AdvantageFn:
    """Token-level advantages take the penalty; others are wrapped in `Penalized`."""
    match part:
        case parts.Grpo():
            return _of_samples(GroupRelative(part.normalize_std), penalty)
        case parts.Reinforce():
            return _of_samples(Reinforce(part.batch_baseline), penalty)
        case parts.ReinforcePlusPlus():
            return ReinforcePlusPlus(gamma=part.gamma, penalty=penalty)
        case parts.Ppo():
            return Gae(gamma=part.gamma, gae_lambda=part.gae_lambda, penalty=penalty)
        case parts.Remax():
            return Remax(penalty=penalty)
        case parts.Keyless():
            return _of_samples(_KEYLESS[part.advantage], penalty)
        case parts.CustomAdvantage():
            found = load(part.advantage, AdvantageFn, key="algorithm.advantage")
            return found if penalty is None else _of_samples(found, penalty)


def _of_turns(part: parts.Advantage, credit: parts.Credit) -> TurnRelative | None:
    """None: the credit is of whole episodes."""
    if isinstance(credit, parts.EpisodeCredit):
        return None
    return TurnRelative(
        normalize_std=isinstance(part, parts.Grpo) and part.normalize_std,
        discount=credit.turn_discount,
        by_number=credit.turn_credit == "turn_groups",
    )


def _of_samples(advantage: AdvantageFn, penalty: KlPenalty | None) -> AdvantageFn:
    return OfSamples(advantage) if penalty is None else Penalized(advantage=advantage, penalty=penalty)


class _Terms(TypedDict, total=False):
    """Arguments of `PolicyLoss`; those not given have their defaults."""

    kl_coefficient: float
    kl_estimator: Estimator
    kl_unbiased: bool
    k3_clamp: float | None
    entropy_coefficient: float
    off_policy_delta: float | None
    log_ratio_clamp: float | None
    correction: Correction | None
    bounds: Bounds | None


def _terms(config: parts.RolloutAlgorithm, correction: CorrectionConfig, mismatch: MismatchConfig | None) -> _Terms:
    """Terms of a built-in loss; a user's own has none."""
    if isinstance(config.loss, parts.CustomLoss):
        return {}
    out: _Terms = {
        "entropy_coefficient": config.loss.entropy_coefficient,
        "off_policy_delta": config.loss.off_policy_delta,
        "correction": make_correction(correction),
        "bounds": make_bounds(mismatch) if mismatch is not None and mismatch.on_breach == "down_weight" else None,
    }
    if isinstance(config.loss, parts.Decoupled):  # RolloutAlgorithm.check_run refuses a correction beside it
        out["correction"] = behaviour_weights(config.loss.behaviour_cap)
    if not isinstance(config.loss, parts.Unclipped):
        out["log_ratio_clamp"] = config.loss.log_ratio_clamp
    if isinstance(config.penalty, parts.PenaltyInLoss):
        kl = config.penalty.estimator
        out["kl_coefficient"], out["kl_unbiased"] = config.penalty.kl_coefficient, config.penalty.kl_unbiased
        out["kl_estimator"] = kl.kl_estimator
        if isinstance(kl, parts.K3):
            out["log_ratio_clamp"], out["k3_clamp"] = kl.log_ratio_clamp, kl.k3_clamp
    return out


def _loss(part: parts.Loss, terms: _Terms) -> LossFn:
    match part:
        case parts.Gspo(clip_low=low, clip_high=high, clip_dual=dual):
            return GspoLoss(clip_low=low, clip_high=high, clip_dual=dual, **terms)
        case (
            parts.Clipped(clip_low=low, clip_high=high, clip_dual=dual)
            | parts.Decoupled(clip_low=low, clip_high=high, clip_dual=dual)
        ):
            return ClippedLoss(clip_low=low, clip_high=high, clip_dual=dual, **terms)
        case parts.Cispo(clip_low=low, clip_high=high):
            return CispoLoss(clip_low=low, clip_high=high, **terms)
        case parts.Sapo():
            return SapoLoss(tau_pos=part.tau_pos, tau_neg=part.tau_neg, **terms)
        case parts.ClipCov():
            keys = ("clip_low", "clip_high", "cov_ratio", "cov_low", "cov_high")
            return ClipCovLoss(**{key: getattr(part, key) for key in keys}, **terms)
        case parts.KlCov():
            return KlCovLoss(cov_ratio=part.cov_ratio, cov_coefficient=part.cov_coefficient, **terms)
        case parts.Unclipped():
            return ReinforceLoss(**terms)
        case parts.CustomLoss():
            return _custom_loss(part.loss)


def _custom_loss(name: str) -> CustomLoss:
    """The loss at the import path `name`, of either signature; one that fits both is called with keywords.

    Raises ValueError as `load`, and for a function with another parameter than `inputs`.
    """
    found = load(name, LossFn, KeywordLossFn, key="algorithm.loss")
    if misfit(found, KeywordLossFn) is None:
        return CustomLoss(KeywordLoss(found))
    parameters = inspect.signature(found).parameters
    if "inputs" not in parameters:
        raise ValueError(
            f"algorithm.loss {name!r} cannot be called as LossFn(inputs): its parameter is "
            f"{next(iter(parameters))!r}; rename it to 'inputs', or choose another loss; see docs/extending.md"
        )
    return CustomLoss(found)

"""Algorithms from their configuration: one dict of advantages, one of losses.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miles_like.algorithm_config import LOSS_KEYS, AlgorithmConfig, CorrectionConfig
from miles_like.algorithms.advantages.grpo import GroupRelative
from miles_like.algorithms.advantages.maxrl import over_mean
from miles_like.algorithms.advantages.penalty import KlPenalty, Penalized
from miles_like.algorithms.advantages.ppo import Gae
from miles_like.algorithms.advantages.reinforce import Reinforce
from miles_like.algorithms.advantages.reinforce_pp import ReinforcePlusPlus
from miles_like.algorithms.advantages.reinforce_pp_baseline import whitened_baseline
from miles_like.algorithms.advantages.rloo import leave_one_out
from miles_like.algorithms.bounds import Bounds
from miles_like.algorithms.correction import Correction
from miles_like.algorithms.losses.cispo import CispoLoss
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.decoupled import decoupled_loss
from miles_like.algorithms.losses.gspo import GspoLoss
from miles_like.algorithms.losses.own import OwnLoss
from miles_like.algorithms.losses.reinforce import ReinforceLoss
from miles_like.algorithms.losses.sapo import SapoLoss
from miles_like.algorithms.losses.value import ValueLoss
from miles_like.by_import_path import load
from miles_like.config import MismatchConfig
from miles_like.protocols import AdvantageFn, Algorithm, LossFn
from miles_like.types import REFERENCE, VALUES, Aggregation, SampleGroup

# Those of tokens take the penalty themselves; around the others stands Penalized.
ADVANTAGES: dict[str, Callable[[AlgorithmConfig, KlPenalty | None], AdvantageFn]] = {
    "grpo": lambda c, p: _of_samples(GroupRelative(bool(c.normalize_std)), p),
    "dr_grpo": lambda c, p: _of_samples(GroupRelative(False), p),
    "rloo": lambda c, p: _of_samples(leave_one_out, p),
    "reinforce": lambda c, p: _of_samples(Reinforce(bool(c.batch_baseline)), p),
    "reinforce_pp": lambda c, p: ReinforcePlusPlus(gamma=_set(c.gamma), penalty=p),
    "reinforce_pp_baseline": lambda c, p: _of_samples(whitened_baseline, p),
    "ppo": lambda c, p: Gae(gamma=_set(c.gamma), gae_lambda=_set(c.gae_lambda), penalty=p),
    "maxrl": lambda c, p: _of_samples(over_mean, p),
}
# Each takes its keys of LOSS_KEYS and what PolicyLoss has.
LOSSES: dict[str, Callable[..., LossFn]] = {
    "clipped": ClippedLoss,
    "gspo": GspoLoss,
    "cispo": CispoLoss,
    "sapo": SapoLoss,
    "decoupled": decoupled_loss,
    "reinforce": ReinforceLoss,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """An advantage, a loss and an aggregation, whichever they are."""

    name: str
    advantage: AdvantageFn
    loss: LossFn
    aggregation: Aggregation
    needs: frozenset[str]

    def advantages(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """For each group [G] numbers, or [S] fp32; raises ValueError for a sample that was not scored, whose reward is
        not finite, or without a stream of `needs`."""
        return self.advantage(groups)

    def returns(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[Tensor]] | None:
        """For each group [G] of [S] fp32, what a critic is to learn; None where there is none."""
        return self.advantage.returns(groups) if isinstance(self.advantage, Gae) else None


def make_algorithm(
    config: AlgorithmConfig, correction: CorrectionConfig, mismatch: MismatchConfig | None = None
) -> Algorithm:
    """Raises ValueError for parts that do not make sense, and for a user's own that cannot be had."""
    if config.supervised:
        raise ValueError(f"algorithm.name = {config.name!r} has no rollout to train on: see docs/supervised.md")
    assert config.advantage and config.loss and config.aggregation, "config filled them in"
    penalty = None
    if config.reference_stream:
        assert config.kl_estimator is not None, "config filled it in"
        penalty = KlPenalty(
            coefficient=config.kl_coefficient,
            estimator=config.kl_estimator,
            log_ratio_clamp=config.log_ratio_clamp,
            k3_clamp=config.k3_clamp,
        )
    build = ADVANTAGES.get(config.advantage)
    if build is None:
        advantage = _of_samples(load(config.advantage, AdvantageFn, key="algorithm.advantage"), penalty)
    else:
        advantage = build(config, penalty)
    needs = ({VALUES} if config.has_critic else set()) | ({REFERENCE} if penalty else set())
    return PolicyGradient(
        name=config.name,
        advantage=advantage,
        loss=_loss(config, correction, mismatch),
        aggregation=Aggregation(config.aggregation),
        needs=frozenset(needs),
    )


def make_critic_loss(config: AlgorithmConfig) -> ValueLoss | None:
    """None: there is no critic."""
    return ValueLoss(value_clip=_set(config.value_clip)) if config.has_critic else None


def make_correction(config: CorrectionConfig) -> Correction | None:
    """None: off."""
    if config.kind == "off":
        return None
    level, action, low, high, veto = config.level, config.action, config.low, config.high, config.veto
    assert level and action and low is not None and high is not None and veto is not None, "config filled them in"
    return Correction(level=level, action=action, low=low, high=high, veto=veto)


def make_bounds(config: MismatchConfig) -> Bounds:
    return Bounds(**config.bounds)


def _loss(config: AlgorithmConfig, correction: CorrectionConfig, mismatch: MismatchConfig | None) -> LossFn:
    assert config.loss is not None
    if config.own_loss:
        return OwnLoss(load(config.loss, LossFn, key="algorithm.loss"))
    shared: dict[str, Any] = {
        "entropy_coefficient": config.entropy_coefficient,
        "off_policy_delta": config.off_policy_delta,
        "log_ratio_clamp": config.log_ratio_clamp,
    }
    if config.kl_in == "loss":
        shared |= {
            name: getattr(config, name) for name in ("kl_coefficient", "kl_estimator", "kl_unbiased", "k3_clamp")
        }
    if (weights := make_correction(correction)) is not None:
        shared["correction"] = weights
    if mismatch is not None and mismatch.on_breach == "down_weight":
        shared["bounds"] = make_bounds(mismatch)
    return LOSSES[config.loss](**{key: getattr(config, key) for key in LOSS_KEYS[config.loss]}, **shared)


def _of_samples(advantage: AdvantageFn, penalty: KlPenalty | None) -> AdvantageFn:
    return advantage if penalty is None else Penalized(advantage=advantage, penalty=penalty)


def _set(value: float | None) -> float:
    assert value is not None, "config filled it in"
    return value

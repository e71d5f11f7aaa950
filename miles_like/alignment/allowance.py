"""Bounds on the gap that the chosen precision explains; a larger gap is a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron_bridge.config import AgreementConfig, PrecisionConfig
from miles_like.algorithms.terms.bounds import Bounds
from quant.spec import QuantFormat

_EXACT = Bounds(kl_max=0.0, logprob_abs_diff_max=0.0, extreme_frac_max=0.0)
# Mean k3. Measured where both sides round alike and only kernels differ: 3e-5 to 5e-4 over all formats, with or without
# replay; a published 30B-A3B has 1.5e-3 without replay and 7.5e-4 with it (arXiv:2510.11370).
_KERNELS = 1e-3
_OWN_ROUTES = 5e-3  # the same where the rollout returns no routes, so that flipped experts count
_EXTREME = 1e-2  # share of tokens; measured over those formats: fewer than one in a thousand
# A published model in FP8 on one side only: 0.058. 50 % more here, because this only decides whether a run may start.
_ROUNDED_ON_ONE_SIDE = 9e-2
# Least agreement of replayed routes with the trainer's own routers, on the scale of Cohen's kappa: 1 minus the share of
# rows that may hold random experts. A published 30B-A3B chooses another set in one of ten rows (arXiv:2510.11370), most
# of which differ in one expert; small models whose sides round alike were measured at 0.98 and more.
_AGREE = 0.9
_AGREE_ROUNDED_ON_ONE_SIDE = 0.75  # measured where only the rollout rounds: 0.9 and more
_AGREE_STALE = 0.5  # routes of older weights; measured eight versions later at a high learning rate: 0.6 and more
_ROOM = 0.1  # least distance of the explained share from that of random sets; below it wrong routes pass the check
_UNIT = 2.0**-8  # relative error of a rounding to bf16; of e4m3; of the four bits of a group's largest value
_UNIT_OF = dict.fromkeys((QuantFormat.FP8, QuantFormat.FP8_UE8M0, QuantFormat.MXFP8), 2.0**-4)
_UNIT_OF_FOUR_BITS = 2.0**-2
_WEIGHTS_ONLY = (QuantFormat.INT4, QuantFormat.MXFP4)  # a stock server multiplies these with bf16 activations


def of_steps(configured: Bounds, *, exact: bool) -> Bounds:
    """The bounds that each step is checked against. exact: both sides compute the same bits with the same weights."""
    return _EXACT if exact else configured


def allowance(
    configured: Bounds,
    precision: PrecisionConfig,
    *,
    engine: Literal["embedded", "sglang", "vllm"],
    exact: bool,
    more: bool = False,
    routed: bool = True,
) -> Bounds:
    """`configured`; where it does not bound the KL or the share of extreme tokens, the bound that the precision
    implies.

    exact: both sides compute the same bits. more: one side rounds something besides weights. routed: the comparison
    replays the rollout's routes, or the model has no experts.
    """
    if exact:
        return _EXACT
    alike = _rounded_alike(precision, engine) and not more
    kl, extreme = configured.kl_max, configured.extreme_frac_max
    kernels = _KERNELS if routed else _OWN_ROUTES
    return replace(
        configured,
        kl_max=kl if kl is not None else kernels if alike else _ROUNDED_ON_ONE_SIDE,
        extreme_frac_max=extreme if extreme is not None or not alike else _EXTREME,
    )


def rounding_units(
    precision: PrecisionConfig, *, engine: Literal["embedded", "sglang", "vllm"], exact: bool, more: bool
) -> tuple[float, float]:
    """Relative error of one rounding in a layer, and of the residual stream, that is always bf16 or more: what
    `compare_states` explains. exact, more: as in `allowance`."""
    if exact:
        return 0.0, 0.0
    alike = _rounded_alike(precision, engine)
    unit = _UNIT if alike else _UNIT_OF.get(precision.format, _UNIT_OF_FOUR_BITS)
    return max(unit, _UNIT_OF[QuantFormat.FP8]) if more else unit, _UNIT


def agreement_bounds(
    overall: float | None,
    layer: float | None,
    precision: PrecisionConfig,
    *,
    engine: Literal["embedded", "sglang", "vllm"],
    exact: bool,
    more: bool,
    stale: bool,
    top_k: int,
    num_experts: int,
) -> AgreementConfig:
    """Bounds on the agreement of replayed routes with the trainer's routers, `overall` and of each `layer`.

    A bound that is None is derived; 0 disables the check. With `exact`, where both sides compute the same bits, every
    row agrees. Otherwise `overall` is the share that the precision explains, which is lower where weights have changed
    since the rollout (`stale`), and a layer's bound is derived from it and from the share that neighbouring rows have
    in common in each step (megatron_bridge/step/routing_check.py). Random sets share top_k / num_experts. exact, more:
    as in `allowance`.

    Raises ValueError where random experts reach a given bound, or where a derived bound is too close to their share.
    """
    alike = _rounded_alike(precision, engine) and not more
    kappa = _AGREE if alike else _AGREE_ROUNDED_ON_ONE_SIDE
    if stale:
        kappa = min(kappa, _AGREE_STALE)
    if exact:
        kappa = 1.0
    chance = top_k / num_experts
    explained = chance + (1 - chance) * kappa
    for key, bound in (("expert_agreement_min", overall), ("layer_agreement_min", layer)):
        if bound is None and explained - chance < _ROOM:
            raise ValueError(
                f"mismatch.{key} cannot be derived: {top_k} of {num_experts} experts chosen at random agree in a "
                f"share of {chance:.2f}, but the precision explains an agreement of only {explained:.2f}: set it "
                f"above {chance:.2f}, or to 0 for no check"
            )
        if bound is not None and 0 < bound <= chance:
            raise ValueError(
                f"mismatch.{key} = {bound:g} does not exceed the agreement of {top_k} of {num_experts} experts "
                f"chosen at random ({chance:.2f}): raise it, or set it to 0 for no check"
            )
    return AgreementConfig(overall=explained if overall is None else overall, layer=layer, explained=kappa)


def _rounded_alike(precision: PrecisionConfig, engine: str) -> bool:
    """Whether both sides multiply the same rounded values, so that only kernels differ."""
    if precision.format is QuantFormat.BF16:
        return True
    return precision.qat and (engine == "embedded" or precision.format in _WEIGHTS_ONLY)

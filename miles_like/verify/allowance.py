"""What the chosen precision explains of a gap: more than that is somebody's mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron_bridge.config import PrecisionConfig
from miles_like.algorithms.bounds import Bounds
from quant.spec import QuantFormat

_EXACT = Bounds(kl_max=0.0, logprob_abs_diff_max=0.0, extreme_frac_max=0.0)
# Mean k3. Sides that round alike and differ in kernels were measured at 3e-5 to 5e-4 over all formats, with the routes
# replayed or not; a published 30B-A3B has 1.5e-3 without replay and 7.5e-4 with it (arXiv:2510.11370).
_KERNELS = 1e-3
_OWN_ROUTES = 5e-3  # the same where the rollout tells no routes, whose flipped experts then count
_EXTREME = 1e-2  # share of tokens; over those formats fewer than one in a thousand
# A published model in FP8 on one side only: 0.058. Half as much again: this only decides whether a run may start.
_ROUNDED_ON_ONE_SIDE = 9e-2
_WEIGHTS_ONLY = (QuantFormat.INT4, QuantFormat.MXFP4)  # a stock server multiplies bf16 activations with these


def of_steps(configured: Bounds, *, exact: bool) -> Bounds:
    """What each step is held to. exact: both sides compute the same bits with the same weights."""
    return _EXACT if exact else configured


def allowance(
    configured: Bounds,
    precision: PrecisionConfig,
    *,
    engine: Literal["embedded", "sglang"],
    exact: bool,
    more: bool = False,
    routed: bool = True,
) -> Bounds:
    """`configured`, and where that does not bound KL or extreme tokens what the precision does. exact:
    both sides compute the same bits. more: one side rounds something besides weights. routed: under the rollout's
    routes, or without experts."""
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


def _rounded_alike(precision: PrecisionConfig, engine: str) -> bool:
    """Whether both sides multiply the same numbers, but for their kernels."""
    if precision.format is QuantFormat.BF16:
        return True
    return precision.qat and (engine == "embedded" or precision.format in _WEIGHTS_ONLY)

"""Detect the convention of the rollout's log-probabilities: token shift, unit, renormalization, temperature.

Letters: S tokens a sample, n loss tokens.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from miles_like.alignment.tokens import SHIFTS, shifted

_SIGMAS = 3  # of a sign test over tokens
_FEW = 3  # tokens beyond those used by a fit that suffice where a correction removes _NEARLY_ALL of the difference
_NEARLY_ALL = 0.95
_ABOVE = 1e-3  # a log-probability above this is more than 0 plus rounding
_OUTSIDE = 0.25  # share of a difference that rounding may put outside its expected interval
_TEMPERATURES = (0.1, 10.0)  # the interval that is searched
_ITERATIONS = 12  # of the search over its logarithm, a forward pass of the trainer each; three to six are usual
_PRECISION = 1e-3  # of the logarithm, at which the search ends
_STEP = 1.05  # relative change of the temperature that must lower the mean before a search starts
_STRIDE = 1.0  # longest step of the search, in the logarithm

UNITS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "logarithms to base 2": lambda x: x * math.log(2),
    "logarithms to base 10": lambda x: x * math.log(10),
    "negative log-probabilities": lambda x: -x,
    "probabilities": lambda x: x.clamp(min=torch.finfo(torch.float32).tiny).log(),
}


def differences(a: Sequence[Tensor], b: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """[n] fp64 |a - b| of all loss tokens."""
    return (_loss_tokens(a, masks) - _loss_tokens(b, masks)).abs()


def _loss_tokens(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    return torch.cat([x[m].double() for x, m in zip(values, masks, strict=True)])


def explains(after: Tensor, before: Tensor, *, fitted: int = 0) -> bool:
    """Whether a correction that reduces [n] `before` to `after` is right. It must at least halve the mean, and either
    improve significantly more tokens than it worsens (sign test), or remove nearly all of the difference and worsen no
    token. nan: a token that the correction does not cover. fitted: number of fitted parameters."""
    known = ~(after.isnan() | before.isnan())
    after, before = after[known], before[known]
    better, worse = int((after < before).sum()), int((after > before).sum())
    left, was = float(after.sum()), float(before.sum())
    if not left < was / 2:
        return False
    all_gone = not worse and len(after) - fitted >= _FEW and left < (1 - _NEARLY_ALL) * was
    return all_gone or better - worse > _SIGMAS * math.sqrt(better + worse)


# ---- token shift


def shift_of(own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor]) -> int:
    """By how many tokens the reported [S] are to be moved; 0 where a shift explains nothing. Another temperature or
    unit changes log-probabilities almost linearly, so that fitting a line separates it from a shift."""
    mine, theirs = _loss_tokens(own, masks), _loss_tokens(reported, masks)
    if bool((theirs > _ABOVE).any()):
        return 0  # these are not log-probabilities
    for d in SHIFTS:
        moved = _loss_tokens([shifted(x, m, d) for x, m in zip(reported, masks, strict=True)], masks)
        # The same tokens before and after the shift: short answers leave few, and a line through few fits any values.
        known = ~moved.isnan()
        if explains(_line_residuals(mine[known], moved[known]), _line_residuals(mine[known], theirs[known]), fitted=2):
            return d
    return 0


def _line_residuals(a: Tensor, b: Tensor) -> Tensor:
    """[n] |a - line(b)| for the least-squares line; nan where a or b is not finite."""
    known = torch.isfinite(a) & torch.isfinite(b)
    out = torch.full_like(a, torch.nan)
    if int(known.sum()) < 2:
        return out
    x, y = b[known], a[known]
    across = x - x.mean()
    spread = float(across.square().sum())
    slope = float((across * y).sum()) / spread if spread else 0.0
    out[known] = (y - y.mean() - slope * across).abs()
    return out


# ---- unit and renormalization


def unit_of(own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor]) -> str | None:
    """The name in UNITS that explains the difference; None for natural logarithms, or where no unit explains it."""
    now = differences(own, reported, masks)
    for name, change in UNITS.items():
        if name == "probabilities" and not all(bool(((x >= 0) & (x <= 1)).all()) for x in reported):
            continue
        if explains(differences(own, [change(x) for x in reported], masks), now):
            return name
    return None


def is_renormalized(
    own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor], *, top_p: float = 1.0, top_k: int = -1
) -> bool:
    """Whether the reported log-probabilities are renormalized over the tokens that top_p and top_k keep. They then
    exceed the trainer's by -log of the kept probability mass. `top_p` alone keeps a mass of at least top_p. `top_k`,
    also with `top_p` (docs/sampling.md), may keep any mass, and the only bound on a reported value is 0."""
    mine, theirs = _loss_tokens(own, masks), _loss_tokens(reported, masks)
    above = theirs - mine
    most = torch.full_like(above, -math.log(top_p)) if top_k == -1 else -mine
    known = torch.isfinite(above) & torch.isfinite(most)
    above, most = above[known], most[known].clamp(min=0.0)
    higher, lower = int((above > 0).sum()), int((above < 0).sum())
    outside = float((above - above.clamp(min=0.0).minimum(most)).abs().sum())
    within = outside < _OUTSIDE * float(above.abs().sum())
    return within and higher - lower > _SIGMAS * math.sqrt(higher + lower)


# ---- temperature

Score = Callable[[float], Awaitable[Sequence[Tensor]]]  # temperature -> [S] per sample, by the trainer


async def temperature_of(
    score: Score, own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor], temperature: float
) -> tuple[float, Sequence[Tensor]]:
    """(temperature of the reported log-probabilities, the trainer's [S] at it); `temperature` and `own` where no other
    temperature explains the difference."""
    now = differences(own, reported, masks)
    if not float(now.nansum()):
        return temperature, own
    theirs = _loss_tokens(reported, masks)

    async def at(log: float) -> _Tried:
        scores = await score(math.exp(log))
        return _Tried(log, scores, _loss_tokens(scores, masks) - theirs)

    begin = _Tried(math.log(temperature), own, _loss_tokens(own, masks) - theirs)
    near = [await at(begin.log + change) for change in (math.log(_STEP), -math.log(_STEP))]
    if min(tried.mean for tried in near) >= begin.mean:
        return temperature, own  # the mean does not fall for a small change, so no temperature explains it
    best = await _search(at, begin, min(near, key=lambda tried: tried.mean))
    if not explains(best.errors.abs(), now, fitted=1):
        return temperature, own
    return math.exp(best.log), best.scores


class _Tried(NamedTuple):
    """One temperature."""

    log: float  # its logarithm
    scores: Sequence[Tensor]  # the trainer's [S] at it
    errors: Tensor  # [n] fp64 minus the reported, of all loss tokens

    @property
    def mean(self) -> float:
        return float(self.errors.abs().nanmean())


async def _search(at: Callable[[float], Awaitable[_Tried]], before: _Tried, last: _Tried) -> _Tried:
    """The temperature with the least mean of |errors| among those that are tried, by a secant method: each token's
    error is taken as linear in the logarithm of the temperature. Of such functions the weighted median of their roots,
    weighted by their slopes, minimizes the mean; a few tokens that differ for another reason do not move it."""
    best = min(before, last, key=lambda tried: tried.mean)
    low, high = (math.log(t) for t in _TEMPERATURES)
    for _ in range(_ITERATIONS):
        slopes = (last.errors - before.errors) / (last.log - before.log)
        known = torch.isfinite(slopes) & torch.isfinite(last.errors) & (slopes != 0)
        if not bool(known.any()):
            break
        root = _weighted_median(-last.errors[known] / slopes[known], slopes[known].abs())
        log = min(max(last.log + min(max(root, -_STRIDE), _STRIDE), low), high)
        if abs(log - last.log) < _PRECISION:
            break
        before, last = last, await at(log)
        best = min(best, last, key=lambda tried: tried.mean)
    return best


def _weighted_median(values: Tensor, weights: Tensor) -> float:
    values, order = values.sort()
    share = weights[order].cumsum(0)
    return float(values[int(torch.searchsorted(share, share[-1] / 2))])

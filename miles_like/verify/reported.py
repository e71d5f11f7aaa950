"""By what convention the rollout reported its log-probabilities: of which token, in which unit, of how much of the
vocabulary, at which temperature.

Letters: S tokens a sample, n tokens under loss.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch
from torch import Tensor

from miles_like.verify.tokens import SHIFTS, shifted

_SIGMAS = 3  # of a sign test over tokens
_FEW = 3  # tokens, besides those that a fit takes, that are enough where nearly all of the difference goes
_NEARLY_ALL = 0.95
_ABOVE = 1e-3  # 0, which a log-probability is at most, by more than rounding
_OUTSIDE = 0.25  # of a difference: a part that rounding may put outside of where it should be
_TEMPERATURES = (0.1, 10.0)  # between which one is looked for
_HALVINGS = 24  # of that interval's logarithm, by the golden section: to 1e-4
_STEP = 1.05

UNITS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "logarithms to base 2": lambda x: x * math.log(2),
    "logarithms to base 10": lambda x: x * math.log(10),
    "negative log-probabilities": lambda x: -x,
    "probabilities": lambda x: x.clamp(min=torch.finfo(torch.float32).tiny).log(),
}


def differences(a: Sequence[Tensor], b: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """[n] fp64 |a - b| of all tokens under loss."""
    return (_under_loss(a, masks) - _under_loss(b, masks)).abs()


def _under_loss(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    return torch.cat([x[m].double() for x, m in zip(values, masks, strict=True)])


def explains(after: Tensor, before: Tensor, *, fitted: int = 0) -> bool:
    """Whether a correction that leaves [n] `after` of `before` is right: it at least halves the mean, and makes more
    tokens better than worse by more than chance would (a sign test), or takes nearly all of it away from every token.
    nan: a token that it says nothing of. fitted: numbers that were fitted."""
    known = ~(after.isnan() | before.isnan())
    after, before = after[known], before[known]
    better, worse = int((after < before).sum()), int((after > before).sum())
    left, was = float(after.sum()), float(before.sum())
    if not left < was / 2:
        return False
    all_gone = not worse and len(after) - fitted >= _FEW and left < (1 - _NEARLY_ALL) * was
    return all_gone or better - worse > _SIGMAS * math.sqrt(better + worse)


# ---- of which token


def shift_of(own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor]) -> int:
    """By how many tokens the reported [S] are to be moved; 0 where that explains nothing. What another temperature or
    unit changes is nearly a line, and is fitted away: the two are told apart."""
    mine, theirs = _under_loss(own, masks), _under_loss(reported, masks)
    if bool((theirs > _ABOVE).any()):
        return 0  # no log-probabilities at all
    for d in SHIFTS:
        moved = _under_loss([shifted(x, m, d) for x, m in zip(reported, masks, strict=True)], masks)
        # Of the same tokens on both sides: a line through the few that short answers leave fits whatever it is of.
        told = ~moved.isnan()
        if explains(_beside_a_line(mine[told], moved[told]), _beside_a_line(mine[told], theirs[told]), fitted=2):
            return d
    return 0


def _beside_a_line(a: Tensor, b: Tensor) -> Tensor:
    """[n] how far `a` is from the line through (b, a) that least squares finds; nan where one is not finite."""
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


# ---- in which unit, of how much of the vocabulary


def unit_of(own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor]) -> str | None:
    """The one of UNITS that they are in; None: natural logarithms, or no other unit explains more."""
    now = differences(own, reported, masks)
    for name, change in UNITS.items():
        if name == "probabilities" and not all(bool(((x >= 0) & (x <= 1)).all()) for x in reported):
            continue
        if explains(differences(own, [change(x) for x in reported], masks), now):
            return name
    return None


def of_the_cut(
    own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor], *, top_p: float = 1.0, top_k: int = -1
) -> bool:
    """Whether they are of the part of the vocabulary that was sampled from, made to add up to 1 again: then they are
    above the trainer's by -log of that part. `top_p` alone leaves a part of at least top_p. `top_k`, also with `top_p`
    (docs/sampling.md), may leave any part, and only 0 bounds what is reported."""
    mine, theirs = _under_loss(own, masks), _under_loss(reported, masks)
    above = theirs - mine
    most = torch.full_like(above, -math.log(top_p)) if top_k == -1 else -mine
    known = torch.isfinite(above) & torch.isfinite(most)
    above, most = above[known], most[known].clamp(min=0.0)
    higher, lower = int((above > 0).sum()), int((above < 0).sum())
    outside = float((above - above.clamp(min=0.0).minimum(most)).abs().sum())
    within = outside < _OUTSIDE * float(above.abs().sum())
    return within and higher - lower > _SIGMAS * math.sqrt(higher + lower)


# ---- at which temperature

Score = Callable[[float], Awaitable[Sequence[Tensor]]]  # temperature -> [S] of each, by the trainer


async def temperature_of(
    score: Score, own: Sequence[Tensor], reported: Sequence[Tensor], masks: Sequence[Tensor], temperature: float
) -> tuple[float, Sequence[Tensor]]:
    """(that of the reported log-probabilities, the trainer's [S] at it); `temperature` and `own` where no other
    explains more."""
    now = differences(own, reported, masks)
    if not float(now.nansum()):
        return temperature, own

    async def at(log: float) -> tuple[float, Sequence[Tensor]]:
        scores = await score(math.exp(log))
        return float(differences(scores, reported, masks).nanmean()), scores

    near = [await at(math.log(temperature * factor)) for factor in (_STEP, 1 / _STEP)]
    if min(mean for mean, _ in near) >= float(now.nanmean()):
        return temperature, own  # where the mean does not fall when it moves a little, none will do
    log, scores = await _least(at)
    if not explains(differences(scores, reported, masks), now, fitted=1):
        return temperature, own
    return math.exp(log), scores


async def _least(
    at: Callable[[float], Awaitable[tuple[float, Sequence[Tensor]]]],
) -> tuple[float, Sequence[Tensor]]:
    """The logarithm that leaves the least mean, by golden-section search (Kiefer, 1953), and the scores at it."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = (math.log(t) for t in _TEMPERATURES)
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    of_a, of_b = await at(a), await at(b)
    for _ in range(_HALVINGS):
        if of_a[0] <= of_b[0]:
            high, b, of_b = b, a, of_a
            a = high - ratio * (high - low)
            of_a = await at(a)
        else:
            low, a, of_a = a, b, of_b
            b = low + ratio * (high - low)
            of_b = await at(b)
    return (a, of_a[1]) if of_a[0] <= of_b[0] else (b, of_b[1])

"""Step by step, what the gap between trainer and rollout is made of.

Both sides score the same samples. Each step compares one thing, and where it finds it wrong it is set right before the
next: so that what a step explains is the gap before less the gap after, and what no step explains is numerics.

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from miles_like.algorithms.bounds import Bounds
from miles_like.verify.findings import Cause, Finding, Gap, Profile, Report, gap_of
from miles_like.verify.tokens import SHIFTS, Blamed, compare_prompts, compare_tokens, shifted
from miles_like.verify.weights import WeightEvidence, judge_weights
from routing_replay.compare import agreement, route_fault

_SIGMAS = 5  # of a sign test over tokens: what chance gives once in three million comparisons
_TEMPERATURES = (0.1, 10.0)  # between which one is looked for
_HALVINGS = 24  # of that interval's logarithm, by the golden section: to 1e-4
_STEP = 1.05
_OWN = ("kl", "logprob_abs_diff", "logprob_abs_diff_max")  # reported of the gap without replay too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What one side says of all samples."""

    logprobs: tuple[Tensor, ...]  # [S] fp32 of each: of token i given those before it; 0 where not under loss
    routes: tuple[Tensor, ...] | None  # [S-1, L, K] of each: its own choice; None: it has none, or was told


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fed:
    """Tokens as one side has them."""

    tokens: tuple[Tensor, ...]  # [S] int64 of each sample
    masks: tuple[Tensor, ...]  # [S] bool: the policy sampled it


class TrainerSide(Protocol):
    """Who trains on the samples."""

    async def score(self, fed: Fed, *, temperature: float, routes: Sequence[Tensor] | None) -> Scores:
        """`routes`: [S-1, L, K] of each sample, taken in place of its own choice."""


class RolloutSide(Protocol):
    """Who sampled them."""

    async def score(self, fed: Fed) -> Scores:
        """Under the weights that it serves now, at temperature 1."""

    async def mend(self) -> bool:
        """Publish the trainer's weights to it; False where it does not take them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All that is compared. What is None cannot be, and its step says so."""

    names: tuple[str, ...]
    told: Fed  # the rollout's
    logprobs: tuple[Tensor, ...]  # [S] fp32, the rollout's, as it reported them when it sampled
    routes: tuple[Tensor, ...] | None  # [S-1, L, K], as it reported them
    layers: tuple[int, ...]  # [L] global numbers
    temperature: float  # at which the run means to sample, and the trainer computes
    trainer: TrainerSide
    fed: Fed | None = None  # as the trainer gets the samples; None: as the rollout has them
    prompts: tuple[Sequence[int], ...] | None = None  # what tokenizer and template make of each prompt now
    replay: bool = False  # whether the run replays the rollout's routes
    weights: WeightEvidence | None = None
    rollout: RolloutSide | None = None


@dataclass(slots=True, kw_only=True)
class _State:
    """Both sides with all that was found so far set right."""

    fed: Fed
    logprobs: tuple[Tensor, ...]  # the rollout's
    temperature: float
    routes: tuple[Tensor, ...] | None  # the rollout's
    trusted: bool = True  # whether routes can be judged: both sides have the same tokens and weights
    gap: Gap
    own_gap: Gap  # as it was found, where both sides choose their experts
    own: Scores  # the trainer's, by its own choice of experts
    findings: list[Finding] = field(default_factory=list)


async def attribute(e: Evidence, bounds: Bounds, allowed: Bounds) -> Report:
    """bounds: those of the configuration, which the gap as it was found is held to. allowed: what the precision may
    leave in the end; more is itself a cause. Raises ValueError where there is nothing to compare."""
    s = await _begin(e)
    profile = _profile(e, s)
    await _tokens(e, s)
    await _sampling(e, s)
    await _weights(e, s)
    await _routing(e, s)
    _numerics(s, allowed)
    extra = {f"verify/own_routes/{k}": s.own_gap.figures[f"mismatch/{k}"] for k in _OWN}
    if profile.layers:
        extra["routing/agreement"] = float(profile.agreement.mean())
    return Report(findings=tuple(s.findings), profile=profile, bounds=bounds, extra=extra)


async def _begin(e: Evidence) -> _State:
    fed = e.told if e.fed is None else e.fed
    own = await e.trainer.score(fed, temperature=e.temperature, routes=None)
    same = [len(a) for a in fed.tokens] == [len(a) for a in e.told.tokens]
    gap = gap_of(own.logprobs, e.logprobs, e.told.masks)
    out = _State(
        fed=fed,
        logprobs=e.logprobs,
        temperature=e.temperature,
        routes=e.routes if same else None,
        gap=gap,
        own_gap=gap,
        own=own,
    )
    if e.replay:
        await _measure(e, out)
    return out


def _profile(e: Evidence, s: _State) -> Profile:
    positions, deltas = [], []
    for mine, theirs, mask in zip(s.own.logprobs, e.logprobs, e.told.masks, strict=True):
        n = min(len(mine), len(theirs))
        at = mask[:n].nonzero()[:, 0]
        positions.append(torch.arange(len(at)))
        deltas.append((mine[at] - theirs[at]).float())
    comparable = s.routes is not None and s.own.routes is not None
    shares = agreement(s.routes, s.own.routes) if comparable and s.routes and s.own.routes else torch.zeros(0)
    layers = e.layers if len(shares) else ()
    return Profile(position=torch.cat(positions), delta=torch.cat(deltas), layers=layers, agreement=shares)


async def _measure(e: Evidence, s: _State) -> None:
    """The gap of the state as it is now, as the run would compute it."""
    scores = s.own
    if e.replay and s.routes is not None:
        scores = await e.trainer.score(s.fed, temperature=s.temperature, routes=s.routes)
    s.gap = gap_of(scores.logprobs, s.logprobs, e.told.masks)


async def _choose_again(e: Evidence, s: _State) -> None:
    """The trainer's own choice and log-probabilities in the state as it is now."""
    s.own = await e.trainer.score(s.fed, temperature=s.temperature, routes=None)


def _note(s: _State, step: str, compared: str, before: Gap, causes: Sequence[Blamed] = (), *, mended: bool) -> None:
    s.findings.append(
        Finding(step=step, compared=compared, before=before, after=s.gap if mended else None, causes=tuple(causes))
    )


# ---- tokens


async def _tokens(e: Evidence, s: _State) -> None:
    before, causes = s.gap, []
    if (blamed := compare_tokens(e.told.tokens, s.fed.tokens, e.told.masks, e.names)) is not None:
        causes.append(blamed)
        s.fed, s.routes = e.told, e.routes
        await _choose_again(e, s)
    if e.prompts is not None and (blamed := compare_prompts(e.told.tokens, e.told.masks, e.prompts, e.names)):
        causes.append(blamed)
    if not causes and (d := _shift(e, s)):
        said = f"the rollout's log-probability of response token i is that of token i{-d:+d}"
        causes.append((Cause.TOKENS_SHIFTED, said))
        moved = [shifted(x, m, d) for x, m in zip(s.logprobs, e.told.masks, strict=True)]
        # the last ones have none: there the trainer's own stand, and add nothing to the gap
        s.logprobs = tuple(torch.where(m.isnan(), o, m) for m, o in zip(moved, s.own.logprobs, strict=True))
    if causes:
        await _measure(e, s)
    samples, tokens = len(e.names), sum(map(len, e.told.tokens))
    _note(s, "tokens", f"{tokens} tokens of {samples} samples", before, causes, mended=True)


def _shift(e: Evidence, s: _State) -> int:
    """By how many tokens the rollout's log-probabilities are to be moved; 0 where that explains nothing."""
    now = _differences(s.own.logprobs, s.logprobs, e.told.masks)
    for d in SHIFTS:
        moved = [shifted(x, m, d) for x, m in zip(s.logprobs, e.told.masks, strict=True)]
        if _explains(_differences(s.own.logprobs, moved, e.told.masks), now):
            return d
    return 0


def _differences(a: Sequence[Tensor], b: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """[n] fp64 |a - b| of all tokens under loss."""
    return torch.cat([(x[m].double() - y[m].double()).abs() for x, y, m in zip(a, b, masks, strict=True)])


def _explains(after: Tensor, before: Tensor) -> bool:
    """Whether a correction that leaves [n] `after` of `before` is right: it at least halves the mean, and makes more
    tokens better than worse by more than chance would (a sign test). nan: a token that it says nothing of."""
    known = ~(after.isnan() | before.isnan())
    after, before = after[known], before[known]
    better, worse = int((after < before).sum()), int((after > before).sum())
    return bool(after.sum() < before.sum() / 2) and better - worse > _SIGMAS * math.sqrt(better + worse)


# ---- sampling


async def _sampling(e: Evidence, s: _State) -> None:
    """At which temperature the reported log-probabilities are the trainer's."""
    before, causes = s.gap, []
    now = _differences(s.own.logprobs, s.logprobs, e.told.masks)
    best, scores = s.temperature, s.own
    if float(now.nansum()) > 0 and await _another_is_better(e, s, float(now.nanmean())):
        best, scores = await _temperature(e, s)
    if _explains(_differences(scores.logprobs, s.logprobs, e.told.masks), now):
        causes.append(
            (
                Cause.TEMPERATURE,
                f"the rollout's log-probabilities are those of temperature {best:.3g}, not {s.temperature:g}",
            )
        )
        s.temperature, s.own = best, replace(scores, routes=s.own.routes)
        await _measure(e, s)
    _note(s, "sampling", f"temperature {e.temperature:g}", before, causes, mended=True)


async def _another_is_better(e: Evidence, s: _State, now: float) -> bool:
    """Whether the mean |difference| falls at all when the temperature moves a little: where it does not, none will do
    and the search is spared."""
    for factor in (_STEP, 1 / _STEP):
        scores = await e.trainer.score(s.fed, temperature=s.temperature * factor, routes=None)
        if float(_differences(scores.logprobs, s.logprobs, e.told.masks).nanmean()) < now:
            return True
    return False


async def _temperature(e: Evidence, s: _State) -> tuple[float, Scores]:
    """The one that leaves the least mean |difference|, by golden-section search over its logarithm (Kiefer, 1953), and
    the trainer's scores at it."""

    async def at(log: float) -> tuple[float, Scores]:
        scores = await e.trainer.score(s.fed, temperature=math.exp(log), routes=None)
        return float(_differences(scores.logprobs, s.logprobs, e.told.masks).nanmean()), scores

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
    return (math.exp(a), of_a[1]) if of_a[0] <= of_b[0] else (math.exp(b), of_b[1])


# ---- weights and quantizer


async def _weights(e: Evidence, s: _State) -> None:
    before = s.gap
    if e.weights is None:
        _note(s, "weights", "not compared", before, mended=True)
        _note(s, "quantizer", "not compared", before, mended=True)
        return
    weights, quantizer = judge_weights(e.weights)
    # a server keeps the format that it was started with: that cannot be set right from here
    s.trusted = not quantizer
    mended = not quantizer and (not weights or await _mend(e, s))
    compared = f"hashes of {len(e.weights.served)} tensors"
    after = s.gap
    if weights and quantizer:  # both are set right at once: it is all put down to the first
        _note(s, "weights", compared, before, weights, mended=mended)
        _note(s, "quantizer", _how(e.weights), after, quantizer, mended=mended)
        return
    if quantizer:
        s.findings.append(Finding(step="weights", compared=compared, before=before, after=before))
        _note(s, "quantizer", _how(e.weights), before, quantizer, mended=mended)
        return
    _note(s, "weights", compared, before, weights, mended=mended)
    _note(s, "quantizer", _how(e.weights), after, mended=mended)


def _how(w: WeightEvidence) -> str:
    if w.spec is None:
        return "bf16 on both sides"
    return f"{w.spec.format.value} in groups of {w.spec.block[0]} x {w.spec.block[1]}"


async def _mend(e: Evidence, s: _State) -> bool:
    """The rollout gets the trainer's weights and scores the samples anew. False where it cannot: what comes after is
    then measured, not judged."""
    s.trusted = False
    if e.rollout is None or not await e.rollout.mend():
        return False
    again = await e.rollout.score(e.told)
    s.logprobs, s.temperature, s.trusted = again.logprobs, 1.0, True
    s.routes = again.routes if again.routes is not None else s.routes
    await _choose_again(e, s)
    await _measure(e, s)
    return True


# ---- routing


async def _routing(e: Evidence, s: _State) -> None:
    before = s.gap
    if s.routes is None or s.own.routes is None:
        _note(s, "routing", "not compared: one side told no routes", before, mended=True)
        return
    fault = route_fault(s.routes, s.own.routes, e.names) if s.trusted else None
    causes: list[Blamed] = [] if fault is None else [(_OF_ROUTES[fault.kind], fault.what)]
    if fault is not None:
        s.routes = fault.corrected
    told = await e.trainer.score(s.fed, temperature=s.temperature, routes=s.routes)
    s.gap = gap_of(told.logprobs, s.logprobs, e.told.masks)
    share = float(agreement(s.routes, s.own.routes).mean())
    _note(s, "routing", f"replayed routes; own ones agree in {share:.2%}", before, causes, mended=True)


_OF_ROUTES = {
    "shifted": Cause.ROUTES_SHIFTED,
    "layers": Cause.LAYERS_ROTATED,
    "rows": Cause.BAD_ROWS,
    "strangers": Cause.ROUTES,
}


def _numerics(s: _State, allowed: Bounds) -> None:
    """What is left is of kernels and of what one side rounds and the other does not."""
    causes: list[Blamed] = []
    measured = all(f.after is not None for f in s.findings)
    if measured and (broken := allowed.broken(s.gap.figures)):
        causes = [(Cause.NUMERICS, "; ".join(broken))]
    _note(s, "numerics", "what is left", s.gap, causes, mended=True)

"""Step by step, what the gap between trainer and rollout is made of.

Both sides score the same samples. Each step compares one thing, and where it finds it wrong it is set right before the
next: so that what a step explains is the gap before less the gap after, and what no step explains is numerics. What is
known for certain comes first: hashes of weights, then the ids of tokens; what log-probabilities and routes tell is
judged on sides that agree in these.

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.algorithms.bounds import Bounds
from miles_like.verify.findings import Cause, Finding, Gap, Profile, Report, gap_of
from miles_like.verify.reported import UNITS, differences, of_the_cut, shift_of, temperature_of, unit_of
from miles_like.verify.sides import Evidence, Sampled, Scores
from miles_like.verify.tokens import Blamed, compare_prompts, compare_tokens, shifted
from miles_like.verify.weights import WeightEvidence, judge_weights
from routing_replay.compare import BadRow, RouteFault, agreement, bad_rows, judge_routes, replaced

_OWN = ("kl", "logprob_abs_diff", "logprob_abs_diff_max")  # reported of the gap without replay too
_MANY = 3  # extreme tokens at least, before a share of them says anything
_ERRORS = 2  # standard errors of the mean that a KL must be above what is allowed
_FEW = 0.1  # of all rows
_PART = 0.25  # of a difference: a temperature that leaves more is not what made it


@dataclass(slots=True, kw_only=True)
class _State:
    """Both sides with all that was found so far set right."""

    sampled: Sampled
    logprobs: tuple[Tensor, ...]  # the rollout's
    routes: tuple[Tensor, ...] | None  # the rollout's
    own: Scores  # the trainer's, by its own choice of experts
    mine: tuple[Tensor, ...]  # [S], the trainer's, by `routes` once these were judged
    gap: Gap
    same_weights: bool = True
    same_quantizer: bool = True
    same_tokens: bool = True
    findings: list[Finding] = field(default_factory=list)


async def attribute(e: Evidence, bounds: Bounds, allowed: Bounds) -> Report:
    """bounds: those of the configuration, which the gap as it was found is held to. allowed: what the precision may
    leave in the end; more is itself a cause. Raises ValueError where there is nothing to compare."""
    s = await _begin(e, e.sampled)
    profile, by_itself = _profile(e, s), gap_of(s.own.logprobs, s.logprobs, s.sampled.told.masks)
    extra = {f"verify/own_routes/{k}": by_itself.figures[f"mismatch/{k}"] for k in _OWN}
    if e.rollout is not None and e.temperature == 1.0:  # of a server's own scoring at another nothing is known
        again = await e.rollout.score(s.sampled.told)
        extra["verify/rescored/kl"] = gap_of(again, s.logprobs, s.sampled.told.masks).kl
    if profile.layers:
        extra["routing/agreement"] = float(profile.agreement.mean())
    s = await _weights(e, s)
    await _tokens(e, s)
    await _routing(e, s, allowed)
    await _sampling(e, s)
    _numerics(s, allowed)
    differing = () if isinstance(e.weights, str) else tuple(e.weights.differing)
    return Report(
        findings=tuple(s.findings), profile=profile, bounds=bounds, extra=extra, allowed=allowed, differing=differing
    )


async def _begin(e: Evidence, sampled: Sampled) -> _State:
    own = await e.trainer.score(sampled.told, temperature=e.temperature, routes=None)
    comparable = own.routes is not None and sampled.routes is not None
    same = comparable and [len(r) for r in own.routes or ()] == [len(r) for r in sampled.routes or ()]
    out = _State(
        sampled=sampled,
        logprobs=sampled.logprobs,
        routes=sampled.routes if same else None,
        own=own,
        mine=own.logprobs,
        gap=gap_of(own.logprobs, sampled.logprobs, sampled.told.masks),
    )
    await _measure(e, out)
    return out


def _profile(e: Evidence, s: _State) -> Profile:
    positions, deltas = [], []
    for mine, theirs, mask in zip(s.own.logprobs, s.logprobs, s.sampled.told.masks, strict=True):
        n = min(len(mine), len(theirs))
        at = mask[:n].nonzero()[:, 0]
        positions.append(torch.arange(len(at)))
        deltas.append((mine[at] - theirs[at]).float())
    shares = agreement(s.routes, s.own.routes) if s.routes and s.own.routes else torch.zeros(0)
    layers = e.layers if len(shares) else ()
    return Profile(position=torch.cat(positions), delta=torch.cat(deltas), layers=layers, agreement=shares)


async def _measure(e: Evidence, s: _State) -> None:
    """The gap of the state as it is now, as the run would compute it."""
    scores = s.own
    if e.replay and s.routes is not None:
        scores = await e.trainer.score(s.sampled.told, temperature=e.temperature, routes=s.routes)
    s.gap = gap_of(scores.logprobs, s.logprobs, s.sampled.told.masks)


def _note(
    s: _State,
    step: str,
    compared: str,
    before: Gap,
    causes: Sequence[Blamed] = (),
    *,
    mended: bool,
    left_out: str = "",
) -> None:
    after = s.gap if mended else None
    found = Finding(step=step, compared=compared, before=before, after=after, causes=tuple(causes), left_out=left_out)
    s.findings.append(found)


def _skip(s: _State, step: str, why: str) -> None:
    s.findings.append(Finding(step=step, compared=why, before=s.gap, after=s.gap, skipped=True))


# ---- weights and quantizer


async def _weights(e: Evidence, s: _State) -> _State:
    """Where the rollout takes the trainer's weights, what follows is of samples that it drew with them."""
    before = s.gap
    if isinstance(e.weights, str):
        _skip(s, "weights", e.weights)
        _skip(s, "quantizer", e.weights)
        return s
    weights, quantizer = judge_weights(e.weights)
    mended = not weights
    if weights and not quantizer and e.rollout is not None:
        # a server keeps the format that it was started with: with another quantizer nothing can be set right from here
        again = await e.rollout.mend()
        if again is not None:
            s, mended = await _begin(e, again), True
    s.same_weights, s.same_quantizer = mended, not quantizer
    compared, left_out = f"hashes of {len(e.weights.served)} tensors", ""
    if e.weights.unknown:
        left_out = f"{len(e.weights.unknown)} tensors ({e.weights.unknown[0]}, ...)"
        compared += f", not of {left_out}"
    _note(s, "weights", compared, before, weights, mended=mended, left_out=left_out)
    _note(s, "quantizer", _how(e.weights), s.gap, quantizer, mended=not quantizer)
    return s


def _how(w: WeightEvidence) -> str:
    if w.spec is None:
        return "bf16 on both sides"
    return f"{w.spec.format.value} in groups of {w.spec.block[0]} x {w.spec.block[1]}"


# ---- tokens


async def _tokens(e: Evidence, s: _State) -> None:
    before, told, names = s.gap, s.sampled.told, s.sampled.names
    causes = compare_tokens(told, s.own.fed, names)
    s.same_tokens = not causes
    if s.sampled.prompts is not None and (blamed := compare_prompts(told, s.sampled.prompts, names)):
        causes.append(blamed)
    if s.same_tokens and (d := shift_of(s.own.logprobs, s.logprobs, told.masks)):
        said = f"the rollout's log-probability of response token i is that of token i{-d:+d}"
        causes.append((Cause.TOKENS_SHIFTED, said))
        moved = [shifted(x, m, d) for x, m in zip(s.logprobs, told.masks, strict=True)]
        # the last ones have none: there the trainer's own stand, and add nothing to the gap
        s.logprobs = tuple(torch.where(m.isnan(), o, m) for m, o in zip(moved, s.own.logprobs, strict=True))
        await _measure(e, s)
    compared = f"{sum(map(len, told.tokens))} tokens of {len(names)} samples"
    _note(s, "tokens", compared, before, causes, mended=s.same_tokens)


# ---- routing


async def _routing(e: Evidence, s: _State, allowed: Bounds) -> None:
    before, told = s.gap, s.sampled.told
    if s.routes is None or s.own.routes is None or not s.same_tokens:
        _skip(s, "routing", "one side has no routes of these tokens")
        return
    same = s.same_weights and s.same_quantizer
    exact = same and allowed.kl_max == 0
    judged = judge_routes(s.routes, s.own.routes, s.sampled.names, same_weights=same)
    by_itself = gap_of(s.own.logprobs, s.logprobs, told.masks)
    faults: tuple[RouteFault, ...] = judged.faults
    if any(fault.kind == "strangers" for fault in faults) and not await _worse(e, s, by_itself):
        # not the routes alone: what chose them is another model
        faults, same, s.same_weights = (), False, False
    causes: list[Blamed] = [(_OF_ROUTES[fault.kind], fault.what) for fault in faults]
    s.routes = judged.corrected
    if same and (rows := await _bad_rows(e, s, exact)):
        causes.append((Cause.BAD_ROWS, _said(rows, s)))
        s.routes = replaced(s.routes, s.own.routes, rows)
    s.mine = (await e.trainer.score(told, temperature=e.temperature, routes=s.routes)).logprobs
    s.gap = gap_of(s.mine, s.logprobs, told.masks)
    nearer = by_itself.kl < s.gap.kl  # a bound may be so tight that only the errors of the two differ
    if not causes and nearer and _beyond(allowed, s.gap) and not _beyond(allowed, by_itself):
        said = f"replaying them leaves a KL of {s.gap.kl:.2e}, the trainer's own choice {by_itself.kl:.2e}"
        causes, s.gap, s.mine, s.routes = [(Cause.ROUTES, said)], by_itself, s.own.logprobs, s.own.routes
    share, known = float(agreement(s.routes, s.own.routes).mean()), all(fault.known for fault in faults)
    _note(s, "routing", f"replayed routes; own ones agree in {share:.2%}", before, causes, mended=known)


async def _bad_rows(e: Evidence, s: _State, exact: bool) -> list[BadRow]:
    """Those that look like it; where near-ties may look the same, or many do, those of samples whose difference from
    the rollout's log-probabilities is at least halved by the trainer's own choice in these rows: of near-ties every
    other brings them nearer."""
    told, routes, own = s.sampled.told, s.routes, s.own.routes
    assert routes is not None and own is not None
    rows = bad_rows(routes, own, exact=exact)
    few = exact or len(rows) <= _FEW * sum(map(len, routes))
    if few and all(row.sure for row in rows):
        return rows
    of_both = []
    for tried in (routes, replaced(routes, own, rows)):
        scores = await e.trainer.score(told, temperature=e.temperature, routes=tried)
        triples = zip(scores.logprobs, s.logprobs, told.masks, strict=True)
        of_both.append([float(differences([a], [b], [m]).nansum()) for a, b, m in triples])
    recorded, mended = of_both
    return [row for row in rows if (few and row.sure) or mended[row.sample] < recorded[row.sample] / 2]


def _said(rows: Sequence[BadRow], s: _State) -> str:
    shown = ", ".join(f"sample {s.sampled.names[r.sample]}, position {r.row}" for r in rows[:3])
    total = sum(len(t) - 1 for t in s.sampled.told.tokens)
    return f"{len(rows)} of {total} rows are not their tokens': {shown}{', ...' if len(rows) > 3 else ''}"


async def _worse(e: Evidence, s: _State, by_itself: Gap) -> bool:
    """Whether replaying the routes as they were recorded at least doubles the gap of the trainer's own choice."""
    told = s.sampled.told
    replayed = await e.trainer.score(told, temperature=e.temperature, routes=s.routes)
    return by_itself.kl < gap_of(replayed.logprobs, s.logprobs, told.masks).kl / 2


_OF_ROUTES = {
    "shifted": Cause.ROUTES_SHIFTED,
    "layers": Cause.LAYERS_ROTATED,
    "strangers": Cause.ROUTES,
}


# ---- sampling


async def _sampling(e: Evidence, s: _State) -> None:
    """Unit, part of the vocabulary and temperature of the reported log-probabilities."""
    before, told, causes, mended = s.gap, s.sampled.told, [], True
    cuts = [f"top_k = {e.top_k}"] * (e.top_k != -1) + [f"top_p = {e.top_p:g}"] * (e.top_p < 1)
    compared = ", ".join([f"temperature {e.temperature:g}", *cuts])
    if not (s.same_tokens and s.same_weights):
        other = "weights" if s.same_tokens else "tokens"
        _skip(s, "sampling", f"the sides have other {other}")
        return

    async def score(temperature: float) -> Sequence[Tensor]:
        return (await e.trainer.score(told, temperature=temperature, routes=s.routes)).logprobs

    own: Sequence[Tensor] = s.mine
    t, scores = await temperature_of(score, own, s.logprobs, told.masks, e.temperature)
    now, at_t = (float(differences(x, s.logprobs, told.masks).nanmean()) for x in (own, scores))
    unit = unit_of(own, s.logprobs, told.masks)
    changed = s.logprobs if unit is None else tuple(UNITS[unit](x) for x in s.logprobs)
    if unit is not None and float(differences(own, changed, told.masks).nanmean()) <= at_t:
        causes.append((Cause.CONVENTION, f"the rollout reports {unit}"))
        s.logprobs = changed
    elif cuts and of_the_cut(own, s.logprobs, told.masks, top_p=e.top_p, top_k=e.top_k) and at_t > _PART * now:
        leave = "leaves" if len(cuts) == 1 else "leave"
        said = f"the rollout's are of the tokens that {' and '.join(cuts)} {leave}, renormalised to a sum of 1"
        causes.append((Cause.CONVENTION, said))
        mended = False
    elif t != e.temperature:
        said = f"the rollout's log-probabilities are those of temperature {t:.3g}, not {e.temperature:g}"
        causes.append((Cause.TEMPERATURE, said))
        own = scores
    if causes and mended:
        s.gap = gap_of(own, s.logprobs, told.masks)
    _note(s, "sampling", compared, before, causes, mended=mended)


# ---- numerics


def _numerics(s: _State, allowed: Bounds) -> None:
    """What is left is of kernels and of what one side rounds and the other does not."""
    if any(f.after is None for f in s.findings):
        _skip(s, "numerics", "the gap still holds what was found and cannot be set right from here")
        return
    broken = _beyond(allowed, s.gap)
    causes: list[Blamed] = [(Cause.NUMERICS, "; ".join(broken))] if broken else []
    _note(s, "numerics", "what is left", s.gap, causes, mended=True)


def _beyond(allowed: Bounds, gap: Gap) -> list[str]:
    """What of a gap is more than is allowed, by more than chance: where kernels choose another expert, which is rare,
    one token can make the mean of few."""
    figures = dict(gap.figures)
    if allowed.kl_max and not math.isnan(gap.kl):
        figures["mismatch/kl"] = max(gap.kl - _ERRORS * gap.kl_error, 0.0)
    if allowed.extreme_frac_max and figures["mismatch/extreme_count"] < _MANY:
        figures["mismatch/extreme_frac"] = 0.0
    return allowed.broken(figures)

"""Attribute the gap between trainer and rollout to causes, step by step.

Both sides score the same samples. Each step compares one input and corrects what differs before the next step, so that
a step explains the gap before it minus the gap after it, and what no step explains is numerics. Exact comparisons come
first (hashes of weights, then token ids); log-probabilities and routes are compared once these agree.

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.algorithms.terms.bounds import Bounds
from miles_like.alignment.evidence import Evidence, Sampled, Scores
from miles_like.alignment.logprob_convention import (
    UNITS,
    differences,
    is_renormalized,
    shift_of,
    temperature_of,
    unit_of,
)
from miles_like.alignment.report import Cause, CauseDetail, Finding, Gap, Profile, Report, gap_of
from miles_like.alignment.tokens import compare_prompts, compare_tokens, shifted
from miles_like.alignment.weights import WeightEvidence, compare_weights
from routing_replay.compare import BadRow, RouteFault, agreement, bad_rows, compare_routes, replaced

_OWN = ("kl", "logprob_abs_diff", "logprob_abs_diff_max")  # also reported for the gap without replay
_MANY = 3  # extreme tokens needed before their share is compared with a bound
_ERRORS = 2  # standard errors of the mean by which a KL must exceed its bound
_FEW = 0.1  # of all rows
_PART = 0.25  # a temperature that leaves more of the difference than this share is not its cause


@dataclass(slots=True, kw_only=True)
class _State:
    """Both sides, with all differences found so far corrected."""

    sampled: Sampled
    logprobs: tuple[Tensor, ...]  # the rollout's
    routes: tuple[Tensor, ...] | None  # the rollout's
    own: Scores  # the trainer's, with its own routes
    mine: tuple[Tensor, ...]  # [S], the trainer's, replaying `routes` once these are corrected
    gap: Gap
    same_weights: bool = True
    same_quantizer: bool = True
    same_tokens: bool = True
    findings: list[Finding] = field(default_factory=list)


async def attribute(e: Evidence, bounds: Bounds, allowed: Bounds) -> Report:
    """Compare both sides in six steps: weights, quantizer, tokens, routing, sampling, numerics.

    bounds: of the configuration, for the initial gap. allowed: bounds on the remaining gap; exceeding them is the cause
    NUMERICS. Raises ValueError where there is nothing to compare.
    """
    s = await _begin(e, e.sampled)
    profile, own_gap = _profile(e, s), gap_of(s.own.logprobs, s.logprobs, s.sampled.tokens.masks)
    extra = {f"verify/own_routes/{k}": own_gap.figures[f"mismatch/{k}"] for k in _OWN}
    if e.rollout is not None and e.temperature == 1.0:  # servers score prompts at temperature 1 only
        again = await e.rollout.score(s.sampled.tokens)
        extra["verify/rescored/kl"] = gap_of(again, s.logprobs, s.sampled.tokens.masks).kl
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
    own = await e.trainer.score(sampled.tokens, temperature=e.temperature, routes=None)
    comparable = own.routes is not None and sampled.routes is not None
    same = comparable and [len(r) for r in own.routes or ()] == [len(r) for r in sampled.routes or ()]
    out = _State(
        sampled=sampled,
        logprobs=sampled.logprobs,
        routes=sampled.routes if same else None,
        own=own,
        mine=own.logprobs,
        gap=gap_of(own.logprobs, sampled.logprobs, sampled.tokens.masks),
    )
    await _measure(e, out)
    return out


def _profile(e: Evidence, s: _State) -> Profile:
    positions, deltas = [], []
    for mine, theirs, mask in zip(s.own.logprobs, s.logprobs, s.sampled.tokens.masks, strict=True):
        n = min(len(mine), len(theirs))
        at = mask[:n].nonzero()[:, 0]
        positions.append(torch.arange(len(at)))
        deltas.append((mine[at] - theirs[at]).float())
    shares = agreement(s.routes, s.own.routes) if s.routes and s.own.routes else torch.zeros(0)
    layers = e.layers if len(shares) else ()
    return Profile(position=torch.cat(positions), delta=torch.cat(deltas), layers=layers, agreement=shares)


async def _measure(e: Evidence, s: _State) -> None:
    """Set `s.gap` as the run would compute it, with its replay setting."""
    scores = s.own
    if e.replay and s.routes is not None:
        scores = await e.trainer.score(s.sampled.tokens, temperature=e.temperature, routes=s.routes)
    s.gap = gap_of(scores.logprobs, s.logprobs, s.sampled.tokens.masks)


def _note(
    s: _State,
    step: str,
    compared: str,
    before: Gap,
    causes: Sequence[CauseDetail] = (),
    *,
    corrected: bool,
    uncompared: str = "",
) -> None:
    after = s.gap if corrected else None
    found = Finding(
        step=step, compared=compared, before=before, after=after, causes=tuple(causes), uncompared=uncompared
    )
    s.findings.append(found)


def _skip(s: _State, step: str, why: str) -> None:
    s.findings.append(Finding(step=step, compared=why, before=s.gap, after=s.gap, skipped=True))


# ---- weights and quantizer


async def _weights(e: Evidence, s: _State) -> _State:
    """Where weights differ and the rollout accepts the trainer's, the later steps use new samples drawn with them."""
    before = s.gap
    if isinstance(e.weights, str):
        _skip(s, "weights", e.weights)
        _skip(s, "quantizer", e.weights)
        return s
    weights, quantizer = compare_weights(e.weights)
    corrected = not weights
    if weights and not quantizer and e.rollout is not None:
        # a server keeps the format it was started with, so that publishing does not correct another quantizer
        again = await e.rollout.republish()
        if again is not None:
            s, corrected = await _begin(e, again), True
    s.same_weights, s.same_quantizer = corrected, not quantizer
    compared, uncompared = f"hashes of {len(e.weights.served)} tensors", ""
    if e.weights.unknown:
        uncompared = f"{len(e.weights.unknown)} tensors ({e.weights.unknown[0]}, ...)"
        compared += f", not of {uncompared}"
    _note(s, "weights", compared, before, weights, corrected=corrected, uncompared=uncompared)
    _note(s, "quantizer", _format_text(e.weights), s.gap, quantizer, corrected=not quantizer)
    return s


def _format_text(w: WeightEvidence) -> str:
    if w.spec is None:
        return "bf16 on both sides"
    return f"{w.spec.format.value} in groups of {w.spec.block[0]} x {w.spec.block[1]}"


# ---- tokens


async def _tokens(e: Evidence, s: _State) -> None:
    before, tokens, names = s.gap, s.sampled.tokens, s.sampled.names
    causes = compare_tokens(tokens, s.own.tokens, names)
    s.same_tokens = not causes
    if s.sampled.prompts is not None and (of_prompts := compare_prompts(tokens, s.sampled.prompts, names)):
        causes.append(of_prompts)
    if s.same_tokens and (d := shift_of(s.own.logprobs, s.logprobs, tokens.masks)):
        what = f"the rollout's log-probability of response token i belongs to token i{-d:+d}"
        causes.append((Cause.TOKENS_SHIFTED, what))
        moved = [shifted(x, m, d) for x, m in zip(s.logprobs, tokens.masks, strict=True)]
        # after the shift the last tokens have no value: the trainer's are used and add nothing to the gap
        s.logprobs = tuple(torch.where(m.isnan(), o, m) for m, o in zip(moved, s.own.logprobs, strict=True))
        await _measure(e, s)
    compared = f"{sum(map(len, tokens.ids))} tokens of {len(names)} samples"
    _note(s, "tokens", compared, before, causes, corrected=s.same_tokens)


# ---- routing


async def _routing(e: Evidence, s: _State, allowed: Bounds) -> None:
    before, tokens = s.gap, s.sampled.tokens
    if s.routes is None or s.own.routes is None or not s.same_tokens:
        _skip(s, "routing", "one side has no routes for these tokens")
        return
    same = s.same_weights and s.same_quantizer
    exact = same and allowed.kl_max == 0
    comparison = compare_routes(s.routes, s.own.routes, s.sampled.names, same_weights=same)
    own_gap = gap_of(s.own.logprobs, s.logprobs, tokens.masks)
    faults: tuple[RouteFault, ...] = comparison.faults
    if any(fault.kind == "strangers" for fault in faults) and not await _replay_is_worse(e, s, own_gap):
        # another model chose these routes, so that the weights differ and not only the routes
        faults, same, s.same_weights = (), False, False
    causes: list[CauseDetail] = [(_OF_ROUTES[fault.kind], fault.what) for fault in faults]
    s.routes = comparison.corrected
    if same and (rows := await _bad_rows(e, s, exact)):
        causes.append((Cause.BAD_ROWS, _list_rows(rows, s)))
        s.routes = replaced(s.routes, s.own.routes, rows)
    s.mine = (await e.trainer.score(tokens, temperature=e.temperature, routes=s.routes)).logprobs
    s.gap = gap_of(s.mine, s.logprobs, tokens.masks)
    nearer = own_gap.kl < s.gap.kl  # needed too: with a tight bound the two may differ only in their standard errors
    if not causes and nearer and _beyond(allowed, s.gap) and not _beyond(allowed, own_gap):
        what = f"with replay the KL is {s.gap.kl:.2e}, but with the trainer's own routes {own_gap.kl:.2e}"
        causes, s.gap, s.mine, s.routes = [(Cause.ROUTES, what)], own_gap, s.own.logprobs, s.own.routes
    share, known = float(agreement(s.routes, s.own.routes).mean()), all(fault.known for fault in faults)
    _note(s, "routing", f"replayed routes; {share:.2%} agree with the trainer's own", before, causes, corrected=known)


async def _bad_rows(e: Evidence, s: _State, exact: bool) -> list[BadRow]:
    """Rows whose routes belong to other tokens.

    Where a near-tie of experts may look the same, or many rows are suspected, only rows of samples are kept whose
    difference from the rollout's log-probabilities is at least halved by the trainer's own routes in these rows; of
    near-ties, about half of the replacements bring the two nearer.
    """
    tokens, routes, own = s.sampled.tokens, s.routes, s.own.routes
    assert routes is not None and own is not None
    rows = bad_rows(routes, own, exact=exact)
    few = exact or len(rows) <= _FEW * sum(map(len, routes))
    if few and all(row.sure for row in rows):
        return rows
    of_both = []
    for tried in (routes, replaced(routes, own, rows)):
        scores = await e.trainer.score(tokens, temperature=e.temperature, routes=tried)
        triples = zip(scores.logprobs, s.logprobs, tokens.masks, strict=True)
        of_both.append([float(differences([a], [b], [m]).nansum()) for a, b, m in triples])
    recorded, corrected = of_both
    return [row for row in rows if (few and row.sure) or corrected[row.sample] < recorded[row.sample] / 2]


def _list_rows(rows: Sequence[BadRow], s: _State) -> str:
    shown = ", ".join(f"sample {s.sampled.names[r.sample]}, position {r.row}" for r in rows[:3])
    total = sum(len(t) - 1 for t in s.sampled.tokens.ids)
    return f"{len(rows)} of {total} rows have routes of other tokens: {shown}{', ...' if len(rows) > 3 else ''}"


async def _replay_is_worse(e: Evidence, s: _State, own_gap: Gap) -> bool:
    """Whether replaying the recorded routes at least doubles the gap of the trainer's own routes."""
    tokens = s.sampled.tokens
    replayed = await e.trainer.score(tokens, temperature=e.temperature, routes=s.routes)
    return own_gap.kl < gap_of(replayed.logprobs, s.logprobs, tokens.masks).kl / 2


_OF_ROUTES = {
    "shifted": Cause.ROUTES_SHIFTED,
    "layers": Cause.LAYERS_ROTATED,
    "strangers": Cause.ROUTES,
}


# ---- sampling


async def _sampling(e: Evidence, s: _State) -> None:
    """Unit, renormalization and temperature of the reported log-probabilities."""
    before, tokens, causes, corrected = s.gap, s.sampled.tokens, [], True
    cuts = [f"top_k = {e.top_k}"] * (e.top_k != -1) + [f"top_p = {e.top_p:g}"] * (e.top_p < 1)
    compared = ", ".join([f"temperature {e.temperature:g}", *cuts])
    if not (s.same_tokens and s.same_weights):
        other = "weights" if s.same_tokens else "tokens"
        _skip(s, "sampling", f"the two sides have different {other}")
        return

    async def score(temperature: float) -> Sequence[Tensor]:
        return (await e.trainer.score(tokens, temperature=temperature, routes=s.routes)).logprobs

    own: Sequence[Tensor] = s.mine
    t, scores = await temperature_of(score, own, s.logprobs, tokens.masks, e.temperature)
    now, at_t = (float(differences(x, s.logprobs, tokens.masks).nanmean()) for x in (own, scores))
    unit = unit_of(own, s.logprobs, tokens.masks)
    changed = s.logprobs if unit is None else tuple(UNITS[unit](x) for x in s.logprobs)
    if unit is not None and float(differences(own, changed, tokens.masks).nanmean()) <= at_t:
        causes.append((Cause.CONVENTION, f"the rollout reports {unit}"))
        s.logprobs = changed
    elif cuts and is_renormalized(own, s.logprobs, tokens.masks, top_p=e.top_p, top_k=e.top_k) and at_t > _PART * now:
        leave = "leaves" if len(cuts) == 1 else "leave"
        what = f"the rollout's log-probabilities are renormalized over the tokens that {' and '.join(cuts)} {leave}"
        causes.append((Cause.CONVENTION, what))
        corrected = False
    elif t != e.temperature:
        what = f"the rollout's log-probabilities are those of temperature {t:.3g}, not {e.temperature:g}"
        causes.append((Cause.TEMPERATURE, what))
        own = scores
    if causes and corrected:
        s.gap = gap_of(own, s.logprobs, tokens.masks)
    _note(s, "sampling", compared, before, causes, corrected=corrected)


# ---- numerics


def _numerics(s: _State, allowed: Bounds) -> None:
    """Compare the remaining gap, of kernels and of rounding on one side only, with `allowed`."""
    if any(f.after is None for f in s.findings):
        _skip(s, "numerics", "the remaining gap includes causes that this command cannot correct")
        return
    broken = _beyond(allowed, s.gap)
    causes: list[CauseDetail] = [(Cause.NUMERICS, "; ".join(broken))] if broken else []
    _note(s, "numerics", "unexplained remainder", s.gap, causes, corrected=True)


def _beyond(allowed: Bounds, gap: Gap) -> list[str]:
    """Bounds that a gap exceeds by more than chance: a kernel that chooses another expert is rare, but in a mean over
    few tokens one such token may decide."""
    figures = dict(gap.figures)
    if allowed.kl_max and not math.isnan(gap.kl):
        figures["mismatch/kl"] = max(gap.kl - _ERRORS * gap.kl_error, 0.0)
    if allowed.extreme_frac_max and figures["mismatch/extreme_count"] < _MANY:
        figures["mismatch/extreme_frac"] = 0.0
    return allowed.broken(figures)

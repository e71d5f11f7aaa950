"""The result of comparing trainer and rollout: the gap, the steps that explain it, the report.

Letters: S tokens a sample.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from miles_like.algorithms.terms.bounds import Bounds
from miles_like.algorithms.terms.mismatch import SAFE_LOG, finish, mismatch_stats
from miles_like.alignment.layers.compare import LayerComparison
from miles_like.types import Reduce


class Cause(StrEnum):
    """What a gap is attributed to."""

    TOKENS_SHIFTED = "shifted tokens"
    TOKENS_TRUNCATED = "truncated tokens"
    TEMPLATE = "another prompt template"
    TOKENS = "other tokens"
    TEMPERATURE = "wrong temperature"
    CONVENTION = "another log-prob convention"
    STALE = "stale weights"
    EXPERT_BIAS = "expert bias dropped"
    GATE_UP = "gate and up swapped"
    MISPLACED = "weights in another's place"
    WEIGHTS = "other weights"
    GROUP_SIZE = "wrong group size"
    SCALE_DTYPE = "wrong scale dtype"
    FORMAT = "wrong weight format"
    ROUTES_SHIFTED = "routes shifted"
    LAYERS_ROTATED = "layers of routes in another order"
    BAD_ROWS = "bad rows of routes"
    ROUTES = "routes of other tokens"
    LAYER = "a layer that computes otherwise"
    NUMERICS = "more than the precision explains"


class Verdict(StrEnum):
    """The result of one step."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


CauseDetail = tuple[Cause, str]  # (cause, what shows it)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Difference of the trainer's and the rollout's log-probabilities over loss tokens; `figures` has the keys of
    docs/metrics.md."""

    tokens: int
    figures: Mapping[str, float]
    kl_error: float  # standard error of the mean k3 over tokens; 0 for one token

    @property
    def kl(self) -> float:
        return self.figures["mismatch/kl"]

    @property
    def mean(self) -> float:
        return self.figures["mismatch/logprob_abs_diff"]

    @property
    def largest(self) -> float:
        return self.figures["mismatch/logprob_abs_diff_max"]


def gap_of(trainer: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]) -> Gap:
    """The gap between [S] log-probabilities of each sample, where the rollout's mask is set. A sample whose sides
    differ in length is cut to the shorter. Raises ValueError where no token is left to compare."""
    cut = [
        (t[:n], r[:n], m[:n]) for t, r, m in zip(trainer, rollout, masks, strict=True) for n in [min(len(t), len(r))]
    ]
    mask = torch.cat([m for _, _, m in cut])
    if not bool(mask.any()):
        raise ValueError(f"0 loss tokens in {len(cut)} samples: there is nothing to compare")
    ends = torch.tensor([0] + [len(m) for _, _, m in cut]).cumsum(0).to(torch.int32)
    stats = mismatch_stats(
        old_logprobs=torch.cat([t for t, _, _ in cut]).float(),
        rollout_logprobs=torch.cat([r for _, r, _ in cut]).float(),
        loss_mask=mask,
        cu_seqlens=ends,
    )
    means = {k: float(s.total / s.count.clamp(min=1)) for k, s in stats.items() if s.reduce is Reduce.MEAN}
    rest = {k: float(s.total) for k, s in stats.items() if s.reduce is not Reduce.MEAN}
    delta = torch.cat([t[m].double() - r[m].double() for t, r, m in cut])
    delta = delta[delta.isfinite()].clamp(-SAFE_LOG, SAFE_LOG)
    error = float((torch.expm1(delta) - delta).std()) / math.sqrt(len(delta)) if len(delta) > 1 else 0.0
    return Gap(tokens=int(mask.sum()), figures=finish(means | rest), kl_error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One step: what was compared, the gap before and, where the causes could be corrected, the gap after."""

    step: str
    compared: str  # where nothing was compared, the reason
    before: Gap
    after: Gap | None  # None: the causes cannot be corrected in this comparison
    causes: tuple[CauseDetail, ...] = ()  # none: nothing is wrong
    skipped: bool = False  # nothing was compared
    uncompared: str = ""  # the part that was not compared although the rest was

    @property
    def verdict(self) -> Verdict:
        if self.causes:
            return Verdict.DIFFERS
        return Verdict.NOT_COMPARED if self.skipped else Verdict.AGREES

    @property
    def description(self) -> str:
        """The verdict with its causes."""
        return "; ".join(f"{cause.value}: {what}" for cause, what in self.causes) or self.verdict.value


class RhoHistogram(NamedTuple):
    """Tokens by their importance ratio rho = p of the trainer / p of the rollout, in bins of equal width in log rho.

    `counts[0]` are below `edges[0]`, `counts[-1]` at or above `edges[-1]`; the bin in the middle holds 1. A ratio that
    is not a number is in no bin.
    """

    edges: tuple[float, ...]  # [n]
    counts: tuple[int, ...]  # [n + 1]
    nan: int


def rho_histogram(delta: Tensor) -> RhoHistogram:
    """delta: [n], log-probability of each token by the trainer minus that by the rollout."""
    edges = (torch.arange(2 * _RHO_BINS) - _RHO_BINS + 0.5) * _RHO_WIDTH
    known = delta.double()[~delta.isnan()]
    counts = torch.bincount(torch.bucketize(known, edges.double(), right=True), minlength=len(edges) + 1)
    return RhoHistogram(tuple(edges.double().exp().tolist()), tuple(counts.tolist()), len(delta) - len(known))


_RHO_WIDTH = math.log(2) / 16  # a factor of 1.044
_RHO_BINS = 48  # on either side of the middle one: up to a factor of 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """The data of the plots: the gap before any correction."""

    position: Tensor  # [n] int64, position of each loss token in its response, from 0
    delta: Tensor  # [n] fp32, trainer minus rollout
    layers: tuple[int, ...]  # global numbers; empty: no routes were compared
    agreement: Tensor  # [L] fp64: share of rows with the same set of experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """All steps in order, with the gap that remains after the last."""

    findings: tuple[Finding, ...]
    profile: Profile
    bounds: Bounds
    extra: Mapping[str, float]
    allowed: Bounds = field(default_factory=Bounds)  # bounds on the remaining gap
    layers: tuple[LayerComparison, ...] = ()  # of each server, if they were compared
    differing: tuple[str, ...] = ()  # names of all served tensors that differ from what the trainer publishes

    def with_layers(self, found: Sequence[LayerComparison]) -> Report:
        """With a further step, which explains no part of the gap: each server's streams, compared at each layer."""
        gap, parts = self.findings[-1].before, len(found[0].parts)
        step = Finding(
            step="layers",
            compared=f"the residual stream of {found[0].tokens} tokens after each of {parts} parts",
            before=gap,
            after=gap,
            causes=tuple((Cause.LAYER, c.sentence()) for c in found if c.first is not None),
        )
        return replace(self, findings=(*self.findings, step), layers=tuple(found))

    @property
    def initial_gap(self) -> Gap:
        """The gap before any correction, as the run would have it."""
        return self.findings[0].before

    @property
    def causes(self) -> list[tuple[str, Cause, str]]:
        """(step, cause, what shows it), in step order."""
        return [(f.step, cause, what) for f in self.findings for cause, what in f.causes]

    @property
    def broken(self) -> list[str]:
        """Configured bounds that the initial gap breaks."""
        return self.bounds.broken(self.initial_gap.figures)

    @property
    def ok(self) -> bool:
        return not self.causes and not self.broken

    def sentence(self) -> str:
        """All causes and broken bounds in one sentence."""
        return "; ".join([*(f"{step}: {c.value} ({what})" for step, c, what in self.causes), *self.broken])

    def conclusion(self) -> str:
        """The result in one sentence. Its KL is that of the remaining gap, which `allowed` bounds."""
        gap, bound = self.findings[-1].before, self.allowed.kl_max
        figures = f"KL {gap.kl:.1e}, " + ("no bound" if bound is None else f"bound {bound:g}")
        if self.ok and bound is not None and gap.kl > bound:
            figures += f" (within two standard errors, {gap.kl_error:.1e} each)"
        skipped = [f"{f.step} ({f.compared})" for f in self.findings if f.verdict is Verdict.NOT_COMPARED]
        skipped += [f"{f.uncompared} of {f.step}" for f in self.findings if f.uncompared]
        less = f"; not compared: {', '.join(skipped)}" if skipped else ""
        if self.ok:
            return f"Trainer and rollout agree: {figures}{less}."
        return f"Trainer and rollout differ: {self.sentence()}; {figures}{less}."

    def to_json(self) -> dict[str, object]:
        """One flat object: figures, the verdict of each step, of each server the first layer that differs and of each
        part of a layer its difference as a share of what is explained, `verdicts` (all causes), `bounds_broken`,
        `differing_tensors`, `rho_edges` and `rho_counts` (of `RhoHistogram`), `ok` and `conclusion`."""
        out: dict[str, object] = {**self.initial_gap.figures, **self.extra}
        rho = rho_histogram(self.profile.delta)
        out["rho_edges"], out["rho_counts"] = list(rho.edges), list(rho.counts)
        out["mismatch/tokens"] = self.initial_gap.tokens
        for f in self.findings:
            out[f"verify/{f.step}/verdict"] = f.verdict.value
            out[f"verify/{f.step}/compared"] = f.compared
            out[f"verify/{f.step}/kl_before"] = f.before.kl
            if f.after is not None:
                out[f"verify/{f.step}/kl_after"] = f.after.kl
                out[f"verify/{f.step}/kl_explained"] = f.before.kl - f.after.kl
        for c in self.layers:
            out[f"verify/layers/first/{c.url}"] = None if c.first is None else c.first.name
            out |= {f"verify/layers/{p.name}/{c.url}": p.share for p in c.parts}
        out["verdicts"] = [{"step": s, "cause": c.value, "what": what} for s, c, what in self.causes]
        out["bounds_broken"] = self.broken
        out["differing_tensors"] = list(self.differing)
        out["ok"], out["conclusion"] = self.ok, self.conclusion()
        return out

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in self.to_json().items()}
        path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def table(self) -> Table:
        table = Table(title="Trainer and rollout, step by step", title_justify="left")
        for name in ("step", "checked"):
            table.add_column(name)
        for name in ("KL before", "KL after", "mean |Δ|", "max |Δ|"):
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for f in self.findings:
            after = "-" if f.after is None else f"{f.after.kl:.2e}"
            table.add_row(
                *(f.step, escape(f.compared), f"{f.before.kl:.2e}", after),
                *(f"{f.before.mean:.2e}", f"{f.before.largest:.2e}", escape(f.description)),
                style={Verdict.DIFFERS: "bold red", Verdict.NOT_COMPARED: "yellow"}.get(f.verdict),
            )
        return table

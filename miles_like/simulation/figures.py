"""The figures of a simulated run."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypedDict

from miles_like.simulation.clock.timeline import running_mean, shares, while_idle
from miles_like.simulation.inputs.assumptions import Assumptions
from miles_like.simulation.loop.waits import CAUSES
from miles_like.simulation.simulate import Outcome

WORK = ("experience", "train", "publish", "save")  # in which the trainer is not idle


class Seconds(TypedDict):
    """Statistics of the seconds of a step."""

    mean: float
    median: float
    p90: float


class Goodput(TypedDict):
    """tokens_per_s, samples_per_s: trained, a second of the whole run. useful: tokens trained, of those sampled."""

    tokens_per_s: float
    samples_per_s: float
    useful: float


class Groups(TypedDict):
    admitted: int
    trained: int
    discarded: dict[str, int]  # by reason
    outstanding: int


class Faults(TypedDict):
    ended_runs: int
    server_restarts: int
    lost_steps: int


class StepFigures(TypedDict):
    """Seconds since the run began."""

    step: int
    began: float
    taken: float
    trained: float
    published: float
    samples: int
    tokens: int


class SimulationFigures(TypedDict):
    """What `miles-like simulate --json` writes. Shares are of the counted steps, which begin with the publication of
    step `warm` and end with the last one; of servers they are means over servers."""

    seed: int
    steps: int
    warm: int
    wall_s: float
    step_s: Seconds  # from publication to publication
    trainer_idle: float  # share without experience, training, publication or checkpoint
    servers_idle: float  # share without a sample
    trainer: dict[str, float]  # state -> share
    servers: dict[str, float]  # state -> share
    servers_idle_while: dict[str, float]  # state of the trainer -> share in which the servers are idle
    running: float  # mean batch of a busy server
    waits_s: dict[str, float]  # cause -> seconds a step
    staleness: dict[str, float]  # weight versions -> share of the tokens trained
    goodput: Goodput
    groups: Groups
    faults: Faults
    turn_changes: int
    cores: float | None  # mean that are kept busy; None: separate devices
    rows: list[StepFigures]


def warm_steps(steps: int, max_staleness: int) -> int:
    """Number of first steps that are not counted: after them the loop is as far ahead as it can be."""
    return max(min(1 + max_staleness, steps - 1), 0)


def figures_of(outcome: Outcome, warm: int | None = None) -> SimulationFigures:
    """The figures of a run. warm: steps that are not counted, at least 1; None: `warm_steps`. Raises ValueError for a
    run of fewer than two counted steps, and for one that takes no time."""
    rows, settings = outcome.state.rows, outcome.settings
    if rows and not outcome.wall_s:
        raise ValueError("every time of the simulation is 0: set simulation.engine.step_s or simulation.train.fixed_s")
    if len(rows) < 2:
        raise ValueError(f"train.steps = {settings.steps}: expected at least 2, to measure from one step to the next")
    warm = warm_steps(len(rows), settings.max_staleness) if warm is None else warm
    counted = rows[warm - 1 :]
    begin, end = counted[0].published, counted[-1].published
    seconds = [b.published - a.published for a, b in itertools.pairwise(counted)]
    trainer = _share(shares(outcome.trainer, begin, end), end - begin)
    each = (end - begin) * len(outcome.servers)
    server = _share(_sum(shares(t.intervals, begin, end) for t in outcome.servers), each)
    idle_while = _sum(while_idle(t.intervals, outcome.trainer, begin, end) for t in outcome.servers)
    return SimulationFigures(
        seed=settings.seed,
        steps=len(rows),
        warm=warm,
        wall_s=outcome.wall_s,
        step_s=_seconds(seconds),
        trainer_idle=1 - sum(trainer.get(state, 0.0) for state in WORK),
        servers_idle=server.get("idle", 0.0),
        trainer=trainer,
        servers=server,
        servers_idle_while=_share(idle_while, each),
        running=statistics.fmean(running_mean(t.intervals, begin, end) for t in outcome.servers),
        waits_s={cause: statistics.fmean(row.waits[cause] for row in counted[1:]) for cause in CAUSES},
        staleness=_staleness(outcome),
        goodput=_goodput(outcome),
        groups=Groups(
            admitted=outcome.state.ledger.admitted,
            trained=len(outcome.state.ledger.trained),
            discarded=dict(outcome.state.ledger.reasons),
            outstanding=outcome.state.ledger.outstanding,
        ),
        faults=Faults(ended_runs=outcome.faults, server_restarts=outcome.restarts, lost_steps=outcome.lost_steps),
        turn_changes=outcome.turns,
        cores=_cores(outcome, outcome.assumed),
        rows=[
            StepFigures(
                step=r.step,
                began=r.began,
                taken=r.taken,
                trained=r.trained,
                published=r.published,
                samples=r.samples,
                tokens=r.tokens,
            )
            for r in rows
        ],
    )


def _seconds(values: list[float]) -> Seconds:
    p90 = statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
    return Seconds(mean=statistics.fmean(values), median=statistics.median(values), p90=p90)


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    out = defaultdict[str, float](float)
    for part in parts:
        for key, value in part.items():
            out[key] += value
    return out


def _share(seconds: Mapping[str, float], of: float) -> dict[str, float]:
    return {state: value / of for state, value in sorted(seconds.items(), key=lambda item: -item[1])} if of else {}


def _staleness(outcome: Outcome) -> dict[str, float]:
    tokens = Counter[int]()
    for row in outcome.state.rows:
        tokens.update(row.staleness)
    return {str(k): tokens[k] / tokens.total() for k in sorted(tokens)}


def _goodput(outcome: Outcome) -> Goodput:
    tokens, samples = (sum(getattr(row, key) for row in outcome.state.rows) for key in ("tokens", "samples"))
    return Goodput(
        tokens_per_s=tokens / outcome.wall_s,
        samples_per_s=samples / outcome.wall_s,
        useful=tokens / max(outcome.generated, 1),
    )


def _cores(outcome: Outcome, assumed: Assumptions) -> float | None:
    return None if assumed.cores is None else outcome.core_seconds / outcome.wall_s

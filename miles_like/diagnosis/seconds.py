"""What bounds the step of a run, in seconds of a step, from its metrics and, where it was traced, its traces.

The wall time of a step is divided without a rest: phases of the driver, of which waiting for samples and training are
divided further. With traces the divisions are measured; without them the tail of the samples is estimated from the
lengths of their answers, and what is left of the step is the wait for samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miles_like.report.traces.parts import TracedSpan

LAST = 50  # steps that are looked at, the last ones
FULL = 0.9  # share of a step's samples that have ended when its tail begins
PHASES = ("experience", "train", "publish", "checks")
Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the step. remedy: the keys that change it, and how."""

    what: str
    seconds: float
    remedy: str


REMEDIES = {
    "longest samples": "buffer.max_staleness lets other samples run meanwhile; buffer.over_sampling does not wait for "
    "them; rollout.max_new_tokens bounds them",
    "sampling": "rollout.servers; buffer.max_staleness samples while the trainer trains",
    "rewards after the last sample": "reward: a faster one, or one that scores each sample (docs/rewards.md); "
    "buffer.max_staleness",
    "publication": "publish.path (docs/weight_sync.md); publish.during_training with buffer.max_staleness",
    "reference, critic and teachers": "cluster.pools.reference; algorithm.kl_coefficient = 0 needs no reference",
    "checks": "mismatch.check_every and mismatch.checksums_every",
    "training": "parallel and cluster.nodes (miles-like plan --search); train.recompute",
    "packing waste": "train.max_tokens_per_rank; train.balance",
    "pipeline bubble": "parallel.pp, parallel.vpp; smaller train.max_tokens_per_rank for more micro-batches",
    "ranks that wait for the batch": "rollout.workers, which keep values and routes out of the driver",
    "driver": "rollout.workers, which take sampling and scoring out of the driver",
    "packing": "train.groups_per_step examples are packed by the driver",
}


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step that its traces have. None: not traced."""

    wait: float  # of the loop, for samples
    tail: float = 0.0  # of it, after FULL of the samples had ended
    rewards: float = 0.0  # of it, after the last sample had ended
    meet: float = 0.0  # of training: mean over ranks
    waste: float = 0.0  # share of training in which the mean rank waits for the one with the most tokens
    micros: float = 0.0  # micro-batches of an optimizer step


def traced_steps(spans: Sequence[TracedSpan]) -> dict[int, StepTimes]:
    """Step -> its seconds, for every step whose wait for samples, or without a rollout whose training, was traced."""
    driver = [s for s in spans if s.process == "driver"]
    waits = {int(s.args["step"]): s for s in driver if s.name == "rollout"}
    samples = {int(s.args["step"]): s.args.get("samples", []) for s in driver if s.name == "train"}
    if not waits:  # of a run without a rollout
        return _with_ranks({step: StepTimes(wait=0.0) for step in samples}, spans)
    ended = _ends(s for s in spans if s.name == "generate" and not s.process.startswith("rollout_server"))
    scored = _ends(s for s in spans if s.name == "reward")
    out = {}
    for step, wait in waits.items():
        found = StepTimes(wait=wait.took / 1e9)
        times = sorted(_last(ended, samples.get(step, ()), wait.end).values())
        if times:
            last = times[-1]
            full = times[_full(len(times))]
            found.tail = _within(wait, full, last)
            found.rewards = _within(wait, last, max(_last(scored, samples[step], wait.end).values(), default=last))
        out[step] = found
    return _with_ranks(out, spans)


def _with_ranks(out: dict[int, StepTimes], spans: Sequence[TracedSpan]) -> dict[int, StepTimes]:
    """The seconds of steps, with what the trainer ranks' spans say of them."""
    for step, of_ranks in _by_version(
        s for s in spans if s.name == "train" and s.process.startswith("trainer")
    ).items():
        if step in out:
            inner = [_inside(spans, rank, "meet") for rank in of_ranks]
            out[step].meet = statistics.fmean(inner) / 1e9
            tokens = [float(s.args.get("tokens", 0)) for s in of_ranks]
            out[step].waste = 1 - statistics.fmean(tokens) / max(tokens) if max(tokens) else 0.0
            out[step].micros = statistics.fmean(float(s.args.get("micros", 0.0)) for s in of_ranks)
    return out


def shares(
    rows: Sequence[Row], traced: Mapping[int, StepTimes], tail_share: float | None = None, stages: int = 1
) -> list[Share]:
    """The mean step of the last LAST rows, the largest part first. tail_share: of the wait, from the lengths of
    answers, where a step is not traced. stages: of the pipeline. Raises ValueError for rows without times."""
    measured = [row for row in rows if "perf/step_s" in row][-LAST:]
    measured = measured[1:] or measured  # the first step compiles and fills caches
    if not measured:
        raise ValueError("metrics.jsonl has no step with perf/step_s yet: wait for the first step")
    sums: dict[str, float] = {}
    for row in measured:
        for what, seconds in _parts(row, traced.get(int(row["step"])), tail_share, stages).items():
            sums[what] = sums.get(what, 0.0) + seconds / len(measured)
    found = [Share(what, seconds, REMEDIES[what]) for what, seconds in sums.items() if seconds > 0]
    return sorted(found, key=lambda s: -s.seconds)


def _parts(row: Row, times: StepTimes | None, tail_share: float | None, stages: int) -> dict[str, float]:
    """Of one step; the sum is `perf/step_s`."""
    step = row["perf/step_s"]
    phases = {phase: min(row.get(f"perf/{phase}_s", 0.0), step) for phase in PHASES}
    rest = max(step - sum(phases.values()), 0.0)
    sampled = "perf/rollout_s" in row
    if times is None:
        wait, driver = (rest, 0.0) if sampled else (0.0, rest)
        tail = wait * (tail_share or 0.0)
        rewards, meet, waste, micros = 0.0, 0.0, 0.0, 0.0
    else:
        wait = min(times.wait, rest)
        driver = rest - wait
        scale = wait / times.wait if times.wait else 0.0
        tail, rewards = times.tail * scale, times.rewards * scale
        meet, waste, micros = min(times.meet, phases["train"]), times.waste, times.micros
    busy = phases["train"] - meet
    bubble = busy * (stages - 1) / (micros + stages - 1) if micros and stages > 1 else 0.0
    wasted = (busy - bubble) * waste
    return {
        "longest samples": tail,
        "rewards after the last sample": rewards,
        "sampling": wait - tail - rewards,
        "publication": phases["publish"],
        "reference, critic and teachers": phases["experience"],
        "checks": phases["checks"],
        "ranks that wait for the batch": meet,
        "pipeline bubble": bubble,
        "packing waste": wasted,
        "training": busy - bubble - wasted,
        "driver" if sampled else "packing": driver,
    }


def tail_of_lengths(lengths: Iterable[Sequence[int]]) -> float | None:
    """The share of a rollout in which fewer than 1 - FULL of its samples run, from the answers' tokens of each step,
    if all begin together and each gets its tokens at one rate. None: there is no answer."""
    found = []
    for tokens in lengths:
        if tokens and max(tokens):
            ordered = sorted(tokens)
            found.append(1 - ordered[_full(len(ordered))] / ordered[-1])
    return statistics.fmean(found) if found else None


def _full(samples: int) -> int:
    """The place of the sample with which FULL of them have ended."""
    return math.ceil(samples * FULL) - 1


def _last(ends: Mapping[str, Sequence[int]], names: Iterable[str], until: int) -> dict[str, int]:
    """Sample -> when it ended last before `until`: its prompt is sampled again in each epoch, under the same key."""
    found = {name: [end for end in ends.get(name, ()) if end <= until] for name in names}
    return {name: max(times) for name, times in found.items() if times}


def _ends(found: Iterable[TracedSpan]) -> dict[str, list[int]]:
    """Sample -> when it ended, in nanoseconds; of a request of several, by its share of the longest one's tokens."""
    out: dict[str, list[int]] = {}
    for span in found:
        names, tokens = span.args.get("samples", []), span.args.get("tokens")
        most = max(tokens, default=0) if tokens else 0
        for i, name in enumerate(names):
            share = tokens[i] / most if tokens and most and i < len(tokens) else 1.0
            out.setdefault(name, []).append(span.start + int(span.took * share))
    return out


def _within(wait: TracedSpan, start: int, end: int) -> float:
    """Seconds of the stretch that lie in the wait."""
    return max(0, min(end, wait.end) - max(start, wait.start)) / 1e9


def _by_version(found: Iterable[TracedSpan]) -> dict[int, list[TracedSpan]]:
    out: dict[int, list[TracedSpan]] = {}
    for span in found:
        out.setdefault(int(span.args.get("version", -1)), []).append(span)
    return out


def _inside(spans: Sequence[TracedSpan], outer: TracedSpan, name: str) -> int:
    """Nanoseconds of spans within another one of the same process."""
    return sum(
        s.took
        for s in spans
        if s.name == name and s.process == outer.process and outer.start <= s.start and s.end <= outer.end
    )

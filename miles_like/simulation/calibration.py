"""Assumptions from a recorded run: its answers from `rollouts/`, seconds of each part from `metrics.jsonl`.

The engine's and the trainer's times are fitted to steps of a synchronous run, in which nothing overlaps: in an
asynchronous one the seconds of a rollout are those of the step, and on shared processors each part delays the other.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_like.limits.regular_files import parse_json, read_text
from miles_like.simulation.inputs.lengths import Answers
from miles_like.simulation.inputs.settings import busiest_shard

WARM, LAST = 3, 1  # steps that are not read: caches fill in the first ones, the last one ends in an evaluation
STEPS = 40  # most steps that are read
METRICS_BYTES, CONFIG_BYTES = 1 << 28, 1 << 20
_STEP = re.compile(r"step_(\d+)\.jsonl")  # files of samples


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Seconds of one step of a run. between_s: from the row before to this step's row; None: not known.
    groups: the answers that it trained."""

    rollout_s: float
    experience_s: float
    train_s: float
    publish_s: float
    pause_s: float
    checks_s: float
    between_s: float | None
    groups: tuple[Answers, ...]

    @property
    def longest(self) -> int:
        return max(n for g in self.groups for n in g.lengths)

    @property
    def tokens(self) -> int:
        """Sampled."""
        return sum(sum(g.lengths) for g in self.groups)

    @property
    def prompt_tokens(self) -> int:
        """Fed once for each group."""
        return sum(g.prompt_tokens for g in self.groups)

    def inputs(self) -> list[int]:
        """Tokens that the trainer is fed of each sample."""
        return [g.prompt_tokens + n - 1 for g in self.groups for n in g.lengths]


def read_run(run_dir: Path) -> list[MeasuredStep]:
    """The steps of a run directory, without its first and last ones. Raises ValueError for one without enough."""
    rows = [row for row in _rows(run_dir / "metrics.jsonl") if row.get("perf/step_s") is not None]
    counted = range(WARM, len(rows) - LAST)[:STEPS]
    if not counted:
        raise ValueError(
            f"{run_dir} has {len(rows)} trained steps in metrics.jsonl, expected at least {WARM + LAST + 1}, "
            f"because the first {WARM} and the last {LAST} are not used"
        )
    return [_step(run_dir, rows[i], rows[i - 1]) for i in counted]


def read_answers(rollouts: Path) -> list[Answers]:
    """The groups of a directory of samples, `step_N.jsonl` as runs write them, in the order of the steps. Raises
    ValueError for one without any, and for a line that is no sample."""
    files = [(int(found[1]), path) for path in rollouts.glob("*.jsonl") if (found := _STEP.fullmatch(path.name))]
    answers = [group for _, path in sorted(files) for group in _groups(path)]
    if not answers:
        raise ValueError(
            f"--lengths-from {rollouts} has no samples in files step_N.jsonl: pass the directory rollouts of a run"
        )
    return answers


def is_synchronous(run_dir: Path) -> bool:
    """Whether the run sampled nothing while it trained. Raises ValueError where its config.toml cannot be read."""
    try:
        buffer = tomllib.loads(read_text(run_dir / "config.toml", CONFIG_BYTES)).get("buffer", {})
    except (OSError, ValueError) as e:
        raise ValueError(f"{run_dir} is not a run directory: its config.toml cannot be read ({e})") from None
    return not buffer.get("max_staleness", 0) and buffer.get("old_tokens", "drop") == "drop"


def calibrated(steps: Sequence[MeasuredStep], *, servers: int, shards: int, one_pass: bool) -> dict[str, Any]:
    """Assumptions, as the tree of `Assumptions`, from the steps of a synchronous run.

    one_pass: the engine feeds a prompt's token in the same pass and time as a sample's next token, as the embedded one
    does; otherwise feeding prompts is part of the time of sampled tokens.
    """
    fed = [(s.tokens + (s.prompt_tokens if one_pass else 0)) / servers for s in steps]
    step_s, token_s = nonnegative_fit([float(s.longest) for s in steps], fed, [s.rollout_s for s in steps])
    trained = [float(sum(busiest_shard(s.inputs(), shards))) for s in steps]
    fixed_s, train_token_s = nonnegative_fit([1.0] * len(steps), trained, [s.train_s for s in steps])
    others = [
        s.between_s - (s.rollout_s + s.experience_s + s.train_s + s.publish_s + s.checks_s)
        for s in steps
        if s.between_s is not None
    ]
    publish_s = statistics.median(s.publish_s for s in steps)
    return {
        "engine": {"step_s": step_s, "token_s": token_s, "prefill_s": token_s if one_pass else 0.0},
        "train": {"fixed_s": fixed_s, "token_s": train_token_s},
        "publish": {"seconds": publish_s, "pause_s": min(statistics.median(s.pause_s for s in steps), publish_s)},
        "lengths": {"kind": "recorded"},
        "experience_s": statistics.median(s.experience_s for s in steps),
        "checks_s": statistics.fmean(s.checks_s for s in steps),
        "other_s": max(statistics.median(others), 0.0) if others else 0.0,
    }


def nonnegative_fit(a: Sequence[float], b: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The x, z >= 0 for which a x + b z is nearest to y in the sense of least squares."""
    columns, target = np.array([a, b], np.float64).T, np.array(y, np.float64)
    if np.linalg.matrix_rank(columns) == 2:
        x, z = (float(v) for v in np.linalg.lstsq(columns, target)[0])
        if x >= 0 and z >= 0:
            return x, z
    alone = [max(float(c @ target / (c @ c)), 0.0) if c @ c else 0.0 for c in columns.T]
    errors = [float(((c * v - target) ** 2).sum()) for c, v in zip(columns.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        lines = read_text(path, METRICS_BYTES).splitlines()
    except OSError as e:
        raise ValueError(f"{path} cannot be read ({e.strerror}): pass the directory of a run as --from") from None
    return [parse_json(line) for line in lines]


def _step(run_dir: Path, row: Mapping[str, Any], before: Mapping[str, Any]) -> MeasuredStep:
    number = int(row["step"])
    path = run_dir / "rollouts" / f"step_{number}.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing: use a run with samples as --from")
    between = row.get("wall_s"), before.get("wall_s")
    whole = not any(key.startswith("eval/") for key in row) and int(before["step"]) == number - 1
    known = whole and between[0] is not None and between[1] is not None
    return MeasuredStep(
        rollout_s=float(row["perf/rollout_s"]),
        experience_s=float(row.get("perf/experience_s", 0.0)),
        train_s=float(row["perf/train_s"]),
        publish_s=float(row["perf/publish_s"]),
        pause_s=float(row.get("perf/pause_s", 0.0)),
        checks_s=float(row.get("perf/checks_s", 0.0)),
        between_s=float(between[0]) - float(between[1]) if known else None,  # type: ignore[arg-type]
        groups=tuple(_groups(path)),
    )


def _groups(path: Path) -> Iterator[Answers]:
    """The groups of one file of samples, which are in order of group and sample."""
    name, last, prompt, lengths = None, -1, 0, list[int]()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                sample = json.loads(line)
                prompt_id, index, mask = str(sample["prompt_id"]), int(sample["index"]), list(sample["loss_mask"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number} is not a sample with prompt_id, index and loss_mask: use samples as "
                    "runs write them"
                ) from None
            if sample.get("row"):
                continue  # of the episode before it
            if (prompt_id != name or index <= last) and lengths:
                yield Answers(prompt, tuple(lengths))
                lengths = []
            name, last = prompt_id, index
            prompt = mask.index(1) if 1 in mask else len(mask)
            lengths.append(len(mask) - prompt)
    if lengths:
        yield Answers(prompt, tuple(lengths))

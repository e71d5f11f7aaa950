"""`incidents/N.md` of a run directory: what an alert that changed the run has seen, and what was done."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_like.alerts.machine import Event
from miles_like.limits.regular_files import json_lines, parse_json, read_regular, replace_bytes
from miles_like.protocols import Fencing
from miles_like.report.paired.scores import eval_file, read_answers, scores_of

INCIDENTS = "incidents"
SHOWN = 5  # samples
_LENGTH = 2000  # characters of a text that are shown
_ROLLOUTS_BYTES = 1 << 30
_FIGURES = (  # keys that begin so, in this order
    *("eval/", "rollout/reward/mean", "rollout/accuracy", "rollout/len/mean", "rollout/truncated_frac"),
    *("rollout/zero_std_group_frac", "train/entropy", "train/kl_ref", "train/kl_old", "train/grad_norm", "train/lr"),
    *("mismatch/kl", "mismatch/extreme_frac", "async/staleness/mean", "perf/step_s", "perf/reward/p99_s"),
)
Rows = Sequence[Mapping[str, float]]


def write_incident(
    run_dir: Path, event: Event, rows: Rows, *, best: int | None, done: str, fence: Fencing | None = None
) -> Path:
    """The path of the page, whose number is the next one; that of an incident of the same alert and step, as where a
    run was killed and has come there again, is kept. best: step of the best checkpoint. done: a sentence. Raises as
    `Fencing.check`, and has written nothing then."""
    if fence is not None:
        fence.check()
    folder = run_dir / INCIDENTS
    folder.mkdir(exist_ok=True)
    title = f"{event.alert} at step {event.step}"
    path = _numbered(folder, title)
    before = _step_before(event, rows, best)
    lines = [
        f"# Incident {path.stem}: {title}",
        "",
        event.sentence[0].upper() + event.sentence[1:] + ".",
        "",
        f"- reading {event.reading:.4g}, threshold {event.threshold:g}, action `{event.action}`",
        f"- since step {event.since}; the steps before are compared by step {before}",
        f"- best checkpoint: {'none yet' if best is None else f'step {best}'}",
        "",
        "## What was done",
        "",
        done[0].upper() + done[1:] + ".",
        "",
        "## Figures",
        "",
        *_figures(rows, sorted({before, event.since, event.step})),
        "",
        "## Samples before and after",
        "",
        *_samples(run_dir, before, event.step),
    ]
    replace_bytes(path, "\n".join([*lines, ""]).encode("utf-8", "backslashreplace"))
    return path


def _numbered(folder: Path, title: str) -> Path:
    for number in itertools.count(1):
        path = folder / f"{number}.md"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith(
            f"# Incident {number}: {title}\n"
        ):
            return path
    raise AssertionError("numbers do not end")


def _step_before(event: Event, rows: Rows, best: int | None) -> int:
    """With which the incident is compared: the best checkpoint, or else the last step before it began."""
    earlier = [int(row["step"]) for row in rows if row["step"] < event.since]
    return best if best is not None and best < event.step else max(earlier, default=0)


def _figures(rows: Rows, steps: Sequence[int]) -> Iterator[str]:
    found = {step: next((row for row in reversed(rows) if row["step"] == step), {}) for step in steps}
    keys = dict.fromkeys(key for begin in _FIGURES for row in found.values() for key in row if key.startswith(begin))
    yield "| metric | " + " | ".join(f"step {step}" for step in steps) + " |"
    yield "|---|" + "---|" * len(steps)
    for key in keys:
        values = (found[step].get(key, math.nan) for step in steps)
        yield f"| `{key}` | " + " | ".join("" if math.isnan(value) else f"{value:.4g}" for value in values) + " |"


def _samples(run_dir: Path, before: int, after: int) -> Iterator[str]:
    """Answers to the problems of an evaluation that have lost most; else samples of training."""
    one, other = eval_file(run_dir, before), eval_file(run_dir, after)
    if one.exists() and other.exists():
        yield from _fallen(one, other, before, after)
        return
    for step, best_first in ((before, True), (after, False)):
        path = run_dir / "rollouts" / f"step_{step}.jsonl"
        if not path.exists():
            yield f"There are no samples of step {step}."
            continue
        text = read_regular(path, _ROLLOUTS_BYTES).decode("utf-8", "replace")
        rows = [parse_json(line) for line in json_lines(text)]
        rows.sort(key=lambda s: s["reward"] if isinstance(s["reward"], int | float) else 0.0, reverse=best_first)
        yield f"### Step {step}, the {SHOWN} of {'highest' if best_first else 'lowest'} reward"
        yield ""
        for sample in rows[:SHOWN]:
            yield from _sample(sample, f"reward {sample['reward']}")


def _fallen(one: Path, other: Path, before: int, after: int) -> Iterator[str]:
    lines = {step: list(read_answers(path)) for step, path in ((before, one), (after, other))}
    was, now = scores_of(lines[before]), scores_of(lines[after])
    falls = [
        (now[name][problem] - score, name, problem)
        for name, of in was.items()
        for problem, score in of.items()
        if problem in now.get(name, {})
    ]
    yield f"The problems of evaluations whose mean reward has fallen most from step {before} to step {after}."
    yield ""
    for change, name, problem in sorted(falls)[:SHOWN]:
        yield f"### {_inline(name)}, {_inline(problem)}: {was[name][problem]:.3g}, then {now[name][problem]:.3g}"
        yield ""
        if change >= 0:
            yield "Not lower."
            yield ""
        for step in (before, after):
            found = _first(lines[step], lambda line: (line["set"], line["prompt_id"]) == (name, problem))  # noqa: B023
            yield from _sample(found, f"step {step}, reward {found.get('reward')}", prompt=step == before)


def _first(lines: Iterable[Mapping[str, Any]], wanted: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    return next((line for line in lines if wanted(line)), {})


def _sample(sample: Mapping[str, Any], title: str, prompt: bool = True) -> Iterator[str]:
    if prompt:
        yield "Prompt, and the answer that is right:"
        yield from _text(sample.get("prompt"))
        yield from _text(sample.get("answer"))
    yield f"Response, {title}:"
    yield from _text(sample.get("response"))


def _text(text: object) -> Iterator[str]:
    """A text that may hold anything, as a block that it cannot end."""
    shown = "" if text is None else str(text)[:_LENGTH]
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    yield from ("", fence + "text", shown, fence, "")


def _inline(text: str) -> str:
    return re.sub(r"[^\w ./:@+-]", "?", text)[:80]

"""Answers of evaluations on disk, and the scores of their problems.

RUN_DIR/evals/step_40.jsonl    a line for each answer, as `miles-like eval --answers` writes them
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miles_like.limits.regular_files import MIB, json_lines, parse_json, read_regular, replace_bytes

EVALS = "evals"
EVALS_BYTES = 4096 * MIB  # largest file that is read

Scores = Mapping[str, Mapping[str, float]]  # set -> id of a problem -> mean reward of its answers
Line = Mapping[str, Any]


class Evaluated(NamedTuple):
    """An evaluation that is compared with another."""

    name: str  # as the user gave it, with the step
    path: Path
    scores: Scores


def eval_file(run_dir: Path, step: int) -> Path:
    return run_dir / EVALS / f"step_{step}.jsonl"


def write_answers(path: Path, lines: Iterable[Line]) -> None:
    """Writes one JSON object for each answer; replaces the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(errors="replace"))


def read_answers(path: Path) -> Iterator[Line]:
    """Raises ValueError naming a line that is no answer."""
    lines = json_lines(read_regular(path, EVALS_BYTES).decode("utf-8", "replace"))
    for number, text in enumerate(lines, 1):
        try:
            line = parse_json(text)
        except ValueError as e:
            raise ValueError(f"{path} line {number} is damaged ({e}): evaluate again") from None
        wrong = not isinstance(line, dict) or [
            k for k in ("set", "mode", "prompt_id") if not isinstance(line.get(k), str)
        ]
        if wrong or not isinstance(line.get("reward"), int | float | None):
            raise ValueError(
                f"{path} line {number} is no answer of an evaluation: pass a run directory, a checkpoint in it, or a "
                "file of `miles-like eval --answers`"
            )
        yield line


def scores_of(lines: Iterable[Line]) -> Scores:
    """Of the sampled answers of each set, or of the greedy ones where there are no others. Answers without a reward
    count in none, and an episode of several rows once."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for line in lines:
        if line.get("reward") is not None and not line.get("row"):
            of_mode = found.setdefault(line["set"], {}).setdefault(line["mode"], {})
            of_mode.setdefault(line["prompt_id"], []).append(float(line["reward"]))
    return {
        name: {
            problem: statistics.fmean(rewards)
            for problem, rewards in modes.get("sampled", modes.get("greedy", {})).items()
        }
        for name, modes in found.items()
    }


def evaluated(path: Path) -> Evaluated:
    """path: a run directory (its last evaluation), a checkpoint in it, or a file of answers. Raises ValueError where
    there is no evaluation."""
    if path.is_file():
        return Evaluated(str(path), path, scores_of(read_answers(path)))
    if (found := re.fullmatch(r"step_(\d+)", path.name)) and path.parent.name == "checkpoints":
        run_dir, steps = path.parent.parent, [int(found[1])]
    else:
        run_dir = path
        steps = sorted(
            int(m[1]) for p in (path / EVALS).glob("step_*.jsonl") if (m := re.fullmatch(r"step_(\d+)", p.stem))
        )
    if not steps or not (file := eval_file(run_dir, steps[-1])).exists():
        what = f"{eval_file(run_dir, steps[-1])} does not exist" if steps else f"{path} has no {EVALS}/step_N.jsonl"
        raise ValueError(
            f"{what}: pass a run with an eval set, a checkpoint whose step was evaluated (eval.every), or a file of "
            "`miles-like eval --answers`"
        )
    return Evaluated(f"{run_dir} step {steps[-1]}", file, scores_of(read_answers(file)))

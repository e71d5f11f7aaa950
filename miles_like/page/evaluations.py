"""Standard errors of a run's evaluations, from evals/step_N.jsonl: every answer with its problem and reward."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import MIB, parse_json
from miles_like.page.curves import short
from miles_like.page.samples import check_own, is_number, own_text, step_files

FILES = 200  # evaluations that are read, evenly spaced
FILE_BYTES = 256 * MIB


def standard_errors(run_dir: Path) -> dict[str, dict[int, float]]:
    """Metric -> step -> standard error of its mean over problems. Metrics are those of evaluations: of sampled answers
    `avg@k`, `sampled` where k is 1; of greedy ones `avg@1`, `greedy` beside sampled ones."""
    folder = run_dir / "evals"
    if not check_own(folder, run_dir):
        return {}
    files = step_files(folder)
    steps = sorted(files)
    if len(steps) > FILES:
        steps = [steps[(len(steps) - 1) * i // (FILES - 1)] for i in range(FILES)]
    out: dict[str, dict[int, float]] = {}
    for step in steps:
        for key, error in errors_of(_rows(files[step], run_dir)).items():
            out.setdefault(key, {})[step] = short(error)
    return out


def errors_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Metric -> standard error, of the answers of one evaluation; of sets with at least two problems."""
    rewards: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if is_number(row.get("reward")) and not row.get("row"):  # an episode counts once
            rewards[str(row.get("set")), str(row.get("mode"))][str(row.get("prompt_id"))].append(float(row["reward"]))
    out = {}
    for (name, mode), of in rewards.items():
        if len(of) < 2:
            continue
        k = max(map(len, of.values()))
        greedy = "greedy" if (name, "sampled") in rewards else "avg@1"
        figure = greedy if mode == "greedy" else "sampled" if k == 1 else f"avg@{k}"
        means = [statistics.fmean(values) for values in of.values()]
        out[f"eval/{name}/{figure}"] = statistics.stdev(means) / math.sqrt(len(means))
    return out


def _rows(path: Path, run_dir: Path) -> list[Mapping[str, Any]]:
    """Lines that are no objects, as one that is being written, are left out."""
    found: list[Mapping[str, Any]] = []
    for line in own_text(path, run_dir, FILE_BYTES).split("\n"):
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found

"""Rows of metrics.jsonl as tests/data keeps them: what alerts read, with six digits.

python -m tests.support.recorded RUN_DIR tests/data/healthy_runs/NAME.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles_like.alerts.rows import ROLLBACK
from miles_like.alerts.signals import KLS, PHASES
from miles_like.report.rows import read_metrics

KEYS = (
    *("step", ROLLBACK, *KLS, *(f"perf/{phase}_s" for phase in PHASES), "train/entropy", "perf/reward/p99_s"),
    *("rollout/reward/mean", "rollout/reward/std", "rollout/len/mean", "rollout/zero_std_group_frac"),
    *("rollout/filtered_frac", "async/staleness/mean"),
)


def recorded(run_dir: Path) -> str:
    rows = read_metrics(run_dir / "metrics.jsonl")
    kept = [{k: float(f"{v:.6g}") for k, v in row.items() if k in KEYS or k.startswith("eval/")} for row in rows]
    return "".join(json.dumps({**row, "step": int(row["step"])}) + "\n" for row in kept)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(recorded(Path(sys.argv[1])), encoding="utf-8")

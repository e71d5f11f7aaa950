"""`make demo`, timed, and its figures in the README: its first and last step, its accuracy.

    python benchmarks/demo.py [--write]                         # runs it into a temporary directory first
    python benchmarks/demo.py --run-dir RUN --commit C [--write]  # of a run that was made at commit C

Figures come from the run's metrics.jsonl; seconds are by the clock of the training loop, and of the whole command where
this script ran it. Goal: a whole command of at most 10 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import ROOT, write_block

from miles_like.report.console import step_line

README = ROOT / "README.md"
GOALS = {"command_s_max": 600}
COMMAND = (sys.executable, "scripts/run_deepseek.py", "--config", "configs/tiny.toml", "--run-dir")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="of a finished run; without it one is made")
    parser.add_argument("--commit", help="that the run of --run-dir was made at")
    parser.add_argument("--write", action="store_true", help="put the figures into README.md")
    given = parser.parse_args()
    if (given.run_dir is None) != (given.commit is None):
        parser.error("--run-dir and --commit go together")
    if given.run_dir is not None:
        lines, figures = read(given.run_dir)
    else:
        with tempfile.TemporaryDirectory() as home:
            began = time.monotonic()
            subprocess.run([*COMMAND, f"{home}/demo"], cwd=ROOT, check=True)
            lines, figures = read(Path(home) / "demo")
            figures["command_s"] = round(time.monotonic() - began)
    print("\n".join(lines))
    holds = figures.get("command_s", 0) <= GOALS["command_s_max"]
    print(json.dumps({"name": "demo", "figures": figures, "goals": GOALS, "holds": holds}))
    if given.write:
        write_block(README, "benchmarks/demo.py", [*lines, "", sentence(figures)], made_at=given.commit)
    return 0 if holds else 1


def read(run: Path) -> tuple[list[str], dict[str, Any]]:
    """-> (the console's lines of the first and last steps, figures)."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, first, last = rows[0], rows[1], rows[-1]
    accuracy = "eval/heldout/avg@1"
    shown = (rows[:1], rows[:2], rows)
    lines = ["```", *("".join(step_line(some, steps=last["step"], verbose=False)) for some in shown), "```"]
    reward = "rollout/reward/mean"
    return lines, {
        "accuracy_before": round(before[accuracy], 3),
        "accuracy_after": round(last[accuracy], 3),
        "reward_first": round(first[reward], 3),
        "reward_last": round(last[reward], 3),
        "train_s": round(sum(row.get("perf/step_s", 0.0) for row in rows)),
    }


def sentence(figures: dict[str, Any]) -> str:
    whole = f", the whole command {figures['command_s']} s" if "command_s" in figures else ""
    return (
        f"Greedy held-out accuracy goes from {figures['accuracy_before']} to {figures['accuracy_after']}, the mean "
        f"reward of a step from {figures['reward_first']} to {figures['reward_last']}. The training steps took "
        f"{figures['train_s']} s{whole}."
    )


if __name__ == "__main__":
    sys.exit(main())

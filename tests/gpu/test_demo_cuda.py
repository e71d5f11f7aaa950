"""`miles-like demo --device cuda`, shortened: the trainer and the embedded engine take turns on one GPU, and what the
engine says of its tokens is what the trainer says. Prints the metrics of each step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SHORT = {
    "train.steps": 2,
    "model.make.max_steps": 50,
    "train.groups_per_step": 8,
    "train.samples_per_group": 4,
    "eval.max_prompts": 16,
    "eval.every": 2,
}
SHOWN = ("mismatch/kl", "mismatch/logprob_abs_diff", "routing/replay_coverage", "train/loss", "reward/mean")
KL = 5e-3  # of both sides in BF16, which round differently


def test_the_demo_runs_on_one_gpu(tmp_path: Path) -> None:
    settings = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "miles_like.cli", "demo", "--device", "cuda", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=500)
    logs = "\n".join(
        f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in (tmp_path / "run").rglob("*.log")
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:] + logs[-12000:]
    print(done.stdout[-3000:])
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        print({key: value for key, value in step.items() if key in SHOWN or key.startswith(("perf/", "mismatch/"))})
    kl = [step["mismatch/kl"] for step in steps if "mismatch/kl" in step]
    assert len(kl) == 2 and all(abs(value) < KL for value in kl)

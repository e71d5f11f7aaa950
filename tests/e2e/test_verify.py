"""`miles-like verify` on a real job: servers, ranks over Ray, the table, the pictures, the status; and on kept samples.

Not covered: each kind of fault (tests/laws/test_verify_names_faults.py), stock SGLang, several nodes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, SMALL, Run, environment

REWARD = "tests.e2e.test_families:parity"  # that an untrained model gets half of the time, so that weights change
TINY = str(ROOT / "configs" / "tiny.toml")


def verify(home: Path, name: str, *more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = home / f"{name}.json"
    command = [sys.executable, "-m", "miles_like.cli", "verify", "--config", TINY, "--run-dir", str(home / name)]
    done = subprocess.run(
        [*command, "--json", str(out), *SMALL, *more],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment(),
    )
    assert out.exists(), done.stderr[-3000:] + done.stdout[-3000:]
    return done, json.loads(out.read_text())


def test_a_healthy_job_has_nothing_wrong_with_it(home: Path) -> None:
    """FP8 weights with QAT on two ranks, against the embedded engine: kernels and bf16 alone differ."""
    done, found = verify(home, "verify")
    assert done.returncode == 0 and found["verdicts"] == found["bounds_broken"] == [], done.stdout
    assert 0 < found["mismatch/kl"] < 1e-3 and found["routing/agreement"] > 0.9
    pictures = {p.name for p in (home / "verify" / "verify").glob("*.png")}
    assert pictures == {"verify_steps.png", "verify_positions.png", "verify_layers.png"}
    assert not (home / "verify" / "verify" / "weights").exists()


@pytest.fixture(scope="module")
def kept(run: Run, home: Path) -> Path:
    """Samples of the first step of a deterministic run of two."""
    settings = ("train.steps=2", "eval.max_prompts=1", "alignment.deterministic=true", f"reward.name={REWARD}")
    sets = (x for one in settings for x in ("--set", one))
    done = run("--run-dir", str(home / "kept"), *SMALL, *sets, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(
        r"trainer and rollout agree on \d+ tokens: kl 0\.0e\+00, largest difference 0\.0e\+00 nats", done.stdout
    )
    return home / "kept" / "rollouts" / "step_1.jsonl"


def test_a_deterministic_run_has_no_gap_at_all(kept: Path) -> None:
    """From the configuration to metrics.jsonl: two ranks that share out the experts, a server told to be exact, their
    fingerprints compared, the samples before the first step, and both steps. The weights of the second are others."""
    rows = [json.loads(line) for line in (kept.parents[1] / "metrics.jsonl").read_text().splitlines()][1:]
    names = ("mismatch/logprob_abs_diff_max", "mismatch/kl", "mismatch/extreme_frac", "mismatch/ess")
    assert [[row[name] for name in (*names, "routing/agreement")] for row in rows] == [[0.0, 0.0, 0.0, 1.0, 1.0]] * 2
    assert all(row["train/grad_norm"] > 0 for row in rows)


def test_kept_samples_are_compared_without_a_server(kept: Path, home: Path, tmp_path: Path) -> None:
    """A fault in the file, each log-probability beside its neighbour's token, is what is found."""
    done, found = verify(home, "whole", "--rollouts", str(kept))
    assert done.returncode == 0 and found["mismatch/tokens"] > 24, done.stderr
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    for row in rows:
        row["logprobs"] = row["logprobs"][1:] + row["logprobs"][:1]
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, found = verify(home, "moved", "--rollouts", str(moved))
    assert done.returncode == 1 and [v["cause"] for v in found["verdicts"]] == ["shifted tokens"], done.stderr
    assert found["verify/tokens/kl_explained"] > 0.9 * found["verify/tokens/kl_before"]

"""Processor seconds of `miles-like train CONFIG --dry-run`, a process each: median, least and most of several.

python benchmarks/dry_run.py [--runs 5] [--write]

Processor time (user and system, of the process and its children) hardly depends on what else the machine does. The
figures of a smallest and a largest configuration are to stay below 3 s and 5 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import add_write, finish

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"tiny": 3.0, "kimi_k2_int4_qat": 5.0}  # seconds


def cpu_seconds(config: Path, run_dir: Path) -> float:
    """Of one dry run. Raises RuntimeError with its last line when it refuses the configuration."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as after an installation
    command = [sys.executable, "-m", "miles_like.cli", "train", str(config), "--run-dir", str(run_dir), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{config.name}: {done.stderr.strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    add_write(parser)
    runs = parser.parse_args().runs
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        for name in LIMITS:
            taken = [cpu_seconds(ROOT / "configs" / f"{name}.toml", Path(home) / "run") for _ in range(runs)]
            figures |= {f"{name}_cpu_s": statistics.median(taken), f"{name}_cpu_s_most": max(taken)}
    goals = {f"{name}_cpu_s_max": limit for name, limit in LIMITS.items()}
    finish("dry_run", figures, goals, all(figures[f"{name}_cpu_s"] <= limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()

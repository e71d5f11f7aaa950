"""What the end-to-end tests share: one home for all runs, so that the checkpoint is made once; how a run is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--set", "model.make.max_steps=20"),
    *("--set", "model.make.check_every=10"),
    *("--set", "train.groups_per_step=6"),
    *("--set", "train.samples_per_group=4"),
    *("--set", "eval.max_prompts=12"),
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "run_deepseek.py"), *arguments]


@pytest.fixture(scope="session")
def run() -> Run:
    """The command, to its end, within four minutes. Keyword arguments are environment variables."""

    def started(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment(**more)
        )

    return started


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parent of the run directories; its `cache` holds the stages before training."""
    return tmp_path_factory.mktemp("runs")

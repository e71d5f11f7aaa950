"""What the end-to-end tests share: one home for all runs, so that the checkpoint is made once; how a run is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.support.command import ROOT, SCRIPT, Commands
from tests.support.installed import MadeOnce
from tests.support.own_ray import own_ray

FEW = (
    *("--set", "train.groups_per_step=6"),
    *("--set", "train.samples_per_group=4"),
    *("--set", "eval.max_prompts=12"),
)
SMALL = ("--set", "model.make.max_steps=4", "--set", "model.make.check_every=2", *FEW)
BEFORE_TRAINING = "fetch,dequantize,convert,stage"
ONE_RANK = ("--set", "parallel.dp=1", "--set", "parallel.ep=1")
LIMIT_S = 600.0  # five times what the longest takes on two idle cores

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *arguments]


@pytest.fixture(scope="session")
def shell() -> Run:
    """The command as a shell starts it, to its end, within ten minutes. Keywords are environment variables."""

    def started(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=environment(**more)
        )

    return started


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands")) as forks:
        yield forks


@pytest.fixture(scope="session")
def ray() -> Iterator[Mapping[str, str]]:
    """The variables of the Ray that `run` and `miles_like` join."""
    with own_ray() as variables:
        yield variables


@pytest.fixture(scope="session")
def run(commands: Commands, ray: Mapping[str, str]) -> Run:
    """As `shell`, without the five seconds of a fresh process's imports, and without those of a Ray's start."""

    def started(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return commands.run(str(SCRIPT), arguments, environment(**ray, **more), LIMIT_S)

    return started


@pytest.fixture(scope="session")
def alone(commands: Commands) -> Run:
    """As `run`, without a Ray to join: a command that needs one starts it."""

    def started(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return commands.run(str(SCRIPT), arguments, environment(**more), LIMIT_S)

    return started


@pytest.fixture(scope="session")
def miles_like(commands: Commands, ray: Mapping[str, str]) -> Run:
    """`miles-like`, likewise."""

    def started(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return commands.run("", arguments, environment(**ray, **more), LIMIT_S)

    return started


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, alone: Run, made_once: MadeOnce) -> Path:
    """Parent of the run directories; its `cache` holds the stages before training, which one worker makes for all: with
    the run of test_pipeline.py, or here where that file is not run."""
    home = tmp_path_factory.mktemp("runs")
    with made_once() as cache:
        if cache is not None and not cache.exists():
            new = tmp_path_factory.mktemp("made")
            done = alone("--run-dir", str(new / "first"), *SMALL, "--stages", BEFORE_TRAINING)
            assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
            (new / "cache").rename(cache)
    if cache is not None:
        shutil.copytree(cache, home / "cache")
    return home


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes of this machine."""
    with pytest.MonkeyPatch.context() as patch:  # commands that join read it, later files must not
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        yield cluster.address
        cluster.shutdown()

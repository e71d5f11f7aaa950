"""What a launch starts follows from the configuration; what cannot be started is refused before anything is written.

Not covered: what the scripts do, which tests/cluster runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_like.launch.layout import check_temp_dir
from tests.support.launched import V3, planned
from tests.support.refusals import refuses


def test_a_launch_is_that_of_the_configuration() -> None:
    got = planned("checkpoint.grace_s=300.5", 'rollout.env={HF_TOKEN="", NCCL_DEBUG="INFO"}')
    assert (got.nodes, got.gpus, got.name, got.secrets) == (16, 8, "deepseek-v3-fp8", ("HF_TOKEN",))
    assert got.stop_s == 301 + 10 + 60 and not got.own_deadline
    assert got.train[:5] == ("miles-like", "train", str(V3.absolute()), "--run-dir", "/shared/run")
    assert got.train[5:7] == ("--set", "checkpoint.grace_s=300.5")


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        ({"config": Path("configs/tiny.toml")}, ("configs/tiny.toml", "cluster.nodes", "cluster.nodes=1")),
        ({"run_dir": Path("runs/v3")}, ("--run-dir", "runs/v3", "relative")),
        ({"environment": Path("venv")}, ("--environment", "venv")),
        ({"name": "V3 run"}, ("--name", "'V3 run'", 40)),
        ({"port": 80}, ("--port", 80, 1024, 65535)),
        ({"join_s": 0}, ("--join-s", 0, 86400)),
        ({"ray_options": ["num-cpus"]}, ("--ray-start", "num-cpus", "num-cpus=64")),
        ({"ray_options": ["port=7"]}, ("--ray-start", "port=7", "--port")),
    ],
)
def test_what_cannot_be_launched_is_refused(asked: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refuses(ValueError, *facts):
        planned(**asked)


@pytest.mark.parametrize("path", ["tmp", "/a" * 30])
def test_a_directory_without_room_for_sockets_is_refused(path: str) -> None:
    assert check_temp_dir(Path("/tmp")) == Path("/tmp")
    with refuses(ValueError, "--temp-dir", path, 40):
        check_temp_dir(Path(path))

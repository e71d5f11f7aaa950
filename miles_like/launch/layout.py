"""What a launch of a run starts, computed once from its configuration; each renderer writes it in another form."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_like.config.sections.cluster import ClusterConfig
from miles_like.config.sections.loop import CheckpointConfig
from miles_like.stopping import PATIENCE_S
from miles_like.variables import is_secret

RAY_PORT = 6379
JOIN_S = 600
_CLEAN_UP_S = 60  # Ray of all nodes is stopped and the job is put back into the queue
# options of `ray start` that a launch has
_RAY_OURS = ("head", "address", "port", "node-ip-address", "num-gpus", "temp-dir", "block", "include-dashboard")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_TEMP_DIR = 40  # characters: Ray's sockets below it have 107 with their names


@dataclass(frozen=True, slots=True)
class Asked:
    """Options that all launches have."""

    config: Path
    run_dir: Path
    overrides: Sequence[str] = ()
    name: str | None = None  # None: that of the configuration's file
    port: int = RAY_PORT
    join_s: int = JOIN_S
    ray_options: Sequence[str] = ()  # further ones of `ray start`, NAME=VALUE
    environment: Path | None = None  # of the virtual environment whose bin/ comes first in PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run on a cluster. Paths are absolute and the same on all nodes; node 0 has Ray's head and the driver."""

    name: str
    config: Path
    run_dir: Path
    overrides: tuple[str, ...]
    nodes: int
    gpus: int  # of each node that Ray counts
    port: int  # of Ray's head
    ray_options: Mapping[str, str]  # further ones of `ray start`
    join_s: int  # limit until all nodes are in the Ray cluster
    secrets: tuple[str, ...]  # variables of [cluster.env] and [rollout.env] that the driver's environment must have
    environment: Path | None
    stop_s: int  # seconds that a run which is asked to stop has until its nodes are taken
    own_deadline: bool  # the configuration sets checkpoint.deadline_s

    @property
    def train(self) -> tuple[str, ...]:
        """The command on node 0, without the address of Ray and what a start adds to continue the run."""
        settings = [word for setting in self.overrides for word in ("--set", setting)]
        return ("miles-like", "train", str(self.config), "--run-dir", str(self.run_dir), *settings)


def plan_launch(
    asked: Asked, cluster: ClusterConfig, checkpoint: CheckpointConfig, variables: Mapping[str, str]
) -> Launch:
    """variables: [cluster.env] and [rollout.env] together. Raises ValueError for what no renderer can write."""
    if "nodes" not in cluster.model_fields_set:
        raise ValueError(
            f"{asked.config} does not set cluster.nodes, the number of nodes that are asked for: set it there, or pass "
            "--set cluster.nodes=1 for one node"
        )
    if not asked.run_dir.is_absolute():
        raise ValueError(
            f"--run-dir {asked.run_dir} is relative, but the run starts in another directory, on another machine: "
            f"pass an absolute path that all nodes see, such as {asked.run_dir.absolute()}"
        )
    if asked.environment is not None and not asked.environment.is_absolute():
        raise ValueError(f"--environment {asked.environment} is relative: pass its absolute path on the nodes")
    name = asked.name or re.sub(r"[^a-z0-9]+", "-", asked.config.stem.lower()).strip("-")[:40].strip("-")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--name {name!r} has to be 1 to 40 of a-z, 0-9 and -, and begin and end with a letter or a digit: "
            "pass another one"
        )
    for option, value, least, most in (("--port", asked.port, 1024, 65535), ("--join-s", asked.join_s, 1, 86400)):
        if not least <= value <= most:
            raise ValueError(f"{option} {value} is not between {least} and {most}: pass another one")
    return Launch(
        name=name,
        config=asked.config.absolute(),
        run_dir=asked.run_dir,
        overrides=tuple(asked.overrides),
        nodes=cluster.nodes,
        gpus=cluster.gpus_per_node,
        port=asked.port,
        ray_options=_ray_options(asked.ray_options),
        join_s=asked.join_s,
        secrets=tuple(sorted(name for name in variables if is_secret(name))),
        environment=asked.environment,
        stop_s=math.ceil(checkpoint.grace_s + PATIENCE_S) + _CLEAN_UP_S,
        own_deadline=checkpoint.deadline_s is not None,
    )


def _ray_options(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for one in given:
        name, _, value = one.partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*[a-z]", name) or not value:
            raise ValueError(f"--ray-start {one} is not of the form NAME=VALUE: write --ray-start num-cpus=64")
        if name in _RAY_OURS:
            raise ValueError(f"--ray-start {one} would replace --{name}, which the launch sets itself: remove it")
        found[name] = value
    return found


def check_temp_dir(path: Path) -> Path:
    """The directory below which Ray keeps its session. Raises ValueError for one in which its sockets have no place."""
    if not path.is_absolute() or len(str(path)) > _TEMP_DIR:
        raise ValueError(
            f"--temp-dir {path} has to be an absolute path of at most {_TEMP_DIR} characters, because the names of "
            "Ray's sockets begin with it: pass a short directory on the node's own disk, such as /tmp"
        )
    return path

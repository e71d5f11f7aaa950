"""Texts of shell scripts: variables that are computed here, then a body from a file beside this module.

The bodies (node.sh, slurm.sh, ray.sh) read these variables alone, so that they can be checked as they are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_like.launch.layout import Launch

HERE = Path(__file__).parent
Value = str | int | Sequence[str]


def body(name: str) -> str:
    """A script beside this module, without its first line, which says which shell it is for."""
    return (HERE / name).read_text(encoding="utf-8").split("\n", 1)[1]


def assignments(values: Mapping[str, Value]) -> str:
    """One line a variable; a list becomes an array."""
    return "".join(f"{name}={_quoted(value)}\n" for name, value in values.items())


def _quoted(value: Value) -> str:
    if isinstance(value, str | int):
        return shlex.quote(str(value))
    return f"({shlex.join(value)})"


def of_nodes(launch: Launch, *, interface: str, temp_dir: Path) -> dict[str, Value]:
    """The variables of node.sh."""
    return {
        "NODES": launch.nodes,
        "GPUS": launch.gpus,
        "PORT": launch.port,
        "JOIN_S": launch.join_s,
        "RAY_OPTIONS": [f"--{name}={value}" for name, value in launch.ray_options.items()],
        "INTERFACE": interface,
        "TEMP_DIR": str(temp_dir),
        "ENVIRONMENT": "" if launch.environment is None else str(launch.environment),
        "SECRETS": launch.secrets,
        "RUN_DIR": str(launch.run_dir),
        "TRAIN": launch.train,
    }

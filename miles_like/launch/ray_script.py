"""A script that starts Ray on nodes without a scheduler, and the run on the first of them."""

from __future__ import annotations

from pathlib import Path

from miles_like.launch.layout import Launch, check_temp_dir
from miles_like.launch.shell import assignments, body, of_nodes


def render_ray(launch: Launch, origin: str, *, interface: str = "", temp_dir: Path = Path("/tmp")) -> str:
    """The script, with the commands head, node, train and stop. origin: one line on where it is from."""
    own = check_temp_dir(temp_dir) / f"ray-{launch.name}"
    values = of_nodes(launch, interface=interface, temp_dir=own)
    return f"#!/bin/bash\n# {origin}\n{assignments(values)}\n{body('node.sh')}\n{body('ray.sh')}"

"""The nodes of the Ray cluster that this process has joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray


def node_ids() -> list[str]:
    """Sorted ids of the cluster's living nodes; node k of a placement is the k-th."""
    return sorted(n["NodeID"] for n in living_nodes())


def living_nodes() -> list[Mapping[str, Any]]:
    """Ray's description of each living node."""
    return [n for n in ray.nodes() if n["Alive"]]  # type: ignore[no-untyped-call]


def gpus_of_nodes() -> list[int]:
    """GPUs that Ray assigns on each living node, in the order of `node_ids`."""
    nodes = sorted(living_nodes(), key=lambda n: str(n["NodeID"]))
    return [int(n["Resources"].get("GPU", 0)) for n in nodes]

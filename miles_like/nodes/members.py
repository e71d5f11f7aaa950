"""The nodes of the Ray cluster that this process has joined, and the choice of those that a run uses."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node

from miles_like.nodes.racks import in_fewest_racks
from miles_like.nodes.session import is_local

Say = Callable[[str], None]  # prints one line of progress

RACK = "rack"  # name of the label, with any prefix: `ray start --labels rack=r1`, `example.com/rack=r1`
SAY_EVERY_S = 60.0  # between two lines of progress of the same content
_LOOK_EVERY_S = 1.0
_LISTED = 6  # nodes that a message lists; of more it counts those that are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the cluster."""

    id: str  # of Ray
    address: str  # by which the other nodes reach it
    host: str
    gpus: int  # that Ray was started with
    cores: int
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def rack(self) -> str | None:
        return next((value for key, value in self.labels if key.rpartition("/")[2] == RACK), None)


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Neighbours in the network first: by rack, in the order of the numbers in its name, then by address as a number.

    Nodes without a rack come after the others, as one more rack. Consecutive ranks, and so pipeline and expert
    neighbours, are on consecutive nodes.
    """
    return tuple(sorted(nodes, key=lambda n: (n.rack is None, _natural(n.rack or ""), _numeric(n.address), n.id)))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Key by which "r2" sorts before "r10"."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _numeric(address: str) -> tuple[int, int, list[tuple[int, int, str]]]:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a host name
        return 9, 0, _natural(address)
    return ip.version, int(ip), []


def living_nodes() -> tuple[Node, ...]:
    """Every living node, in the order of `in_order`."""
    found = []
    for n in ray.nodes():  # type: ignore[no-untyped-call]
        if n["Alive"]:
            has = n["Resources"]
            found.append(
                Node(
                    id=str(n["NodeID"]),
                    address=str(n["NodeManagerAddress"]),
                    host=str(n["NodeManagerHostname"]),
                    gpus=int(has.get("GPU", 0)),
                    cores=int(has.get("CPU", 0)),
                    labels=tuple(sorted((n.get("Labels") or {}).items())),
                )
            )
    return in_order(found)


def free_gpus() -> Mapping[str, int]:
    """Whole GPUs of each node, by its id, that no job of the cluster has. Ray reports them with a delay of a second."""
    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: int(has.get("GPU", 0)) for node, has in free.items()}


def suitable_nodes(
    count: int, gpus_per_node: int, *, timeout_s: float, say: Say, began: float | None = None
) -> tuple[Node, ...]:
    """All nodes with at least `gpus_per_node` GPUs, `count` or more, busy or not. A CPU-only head is none of them where
    the run has GPUs.

    Nodes that have not joined the cluster yet are waited for, with a line of progress whenever their number changes.
    began: when the limit began, by the monotonic clock; None: now. Raises ValueError that names what every node has
    when they have not come within `timeout_s` seconds, and at once in a Ray that this process started, which no node
    can join.
    """
    began = time.monotonic() if began is None else began
    before, silent_since = -1, 0.0
    while True:
        nodes = living_nodes()
        found = tuple(n for n in nodes if n.gpus >= gpus_per_node)
        waited = time.monotonic() - began
        if len(found) >= count:
            return found
        if is_local() or waited >= timeout_s:
            raise ValueError(_too_few(nodes, count, gpus_per_node, 0.0 if is_local() else timeout_s))
        if len(found) != before or waited - silent_since >= SAY_EVERY_S:
            say(
                f"Waiting for nodes: {len(found)} of {format_nodes(count, gpus_per_node)} are in the Ray cluster after "
                f"{waited:.0f} s, up to {timeout_s:g} s (cluster.timeout_s)"
            )
            before, silent_since = len(found), waited
        time.sleep(min(_LOOK_EVERY_S, max(0.05, timeout_s - waited)))


def choose_nodes(nodes: Sequence[Node], count: int) -> tuple[Node, ...]:
    """`count` of the nodes, which are in the order of `in_order`, in as few racks as possible; in that order."""
    return tuple(nodes[i] for i in in_fewest_racks([n.rack for n in nodes], count))


def format_nodes(count: int, gpus_per_node: int) -> str:
    """`2 nodes with 8 GPUs each`."""
    return f"{count} nodes" + (f" with {gpus_per_node} GPUs each" if gpus_per_node else "")


def _too_few(nodes: Sequence[Node], count: int, gpus_per_node: int, waited_s: float) -> str:
    keys = "cluster.nodes, cluster.gpus_per_node" if gpus_per_node else "cluster.nodes"
    have = ", ".join(f"{n.address} with {n.gpus} GPUs" for n in nodes[:_LISTED])
    more = f" and {len(nodes) - _LISTED} more" if len(nodes) > _LISTED else ""
    if is_local():
        remedy = "join a cluster of such nodes with --ray-address"
    else:
        remedy = "start Ray on the missing ones with `ray start --address ...`"
    return (
        f"the run needs {format_nodes(count, gpus_per_node)} ({keys}), but "
        + (f"after {waited_s:g} s (cluster.timeout_s) " if waited_s else "")
        + f"the Ray cluster has {len(nodes)} nodes: {have}{more}; {remedy}, or lower cluster.nodes"
        + (" or cluster.gpus_per_node" if gpus_per_node else "")
    )


def cluster_gist() -> str:
    """What the cluster has, in one clause for the message of a call that exceeded its time limit."""
    nodes, free = living_nodes(), free_gpus()
    if len(nodes) <= _LISTED:
        have = [f"{n.address} {free.get(n.id, 0)} of {n.gpus} GPUs free, {n.cores} cores" for n in nodes]
    else:
        groups: dict[tuple[int, int], int] = {}
        for n in nodes:
            groups[n.gpus, free.get(n.id, 0)] = groups.get((n.gpus, free.get(n.id, 0)), 0) + 1
        have = [f"{count} with {idle} of {gpus} GPUs free" for (gpus, idle), count in groups.items()]
    return f"the Ray cluster has {len(nodes)} nodes ({'; '.join(have)})"

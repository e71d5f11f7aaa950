"""Whole GPUs that Ray keeps for one run, and what each of its nodes reports.

A run on GPUs holds one Ray placement group with a bundle of all its GPUs on each chosen node. Ray creates all bundles
or none, and gives their GPUs to no other job until the group is removed, at the latest when the run's driver ends in
any way. An actor in each bundle takes its GPUs, so that Ray names them. Ranks and servers ask Ray for no GPU: each is
started on its node with the CUDA_VISIBLE_DEVICES of its slot, so two of them can share a device.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_like.nodes.facts import Device, NodeFacts
from miles_like.nodes.members import (
    SAY_EVERY_S,
    Node,
    Say,
    choose_nodes,
    cluster_gist,
    format_nodes,
    free_gpus,
    living_nodes,
    suitable_nodes,
)
from miles_like.nodes.scratch import scratch_directory
from miles_like.nodes.waits import error_message, on_node

WhenBusy = Literal["refuse", "queue"]

_NAME = "miles-like run "  # begins the name of a run's placement group
_SETTLES_S = 10.0  # for the GPUs of a run that has just ended to be reported as free
_GROUP_S = 30.0  # for Ray to create a placement group on GPUs that are free
_FACTS_S = 300.0  # for Ray to start a process on each node


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The nodes of a run, in the order of its placement, and what each reported; the result of `reserve`."""

    nodes: tuple[Node, ...]
    facts: tuple[NodeFacts, ...]
    group: PlacementGroup | None = None  # None: a run on CPU, which reserves nothing
    spares: tuple[Reservation, ...] = ()  # of nodes that took the place of lost ones
    holders: tuple[Any, ...] = field(default=(), repr=False)

    def with_spare(self, number: int, spare: Reservation) -> Reservation:
        """With the node of `spare` as node `number`."""
        nodes, facts = list(self.nodes), list(self.facts)
        (nodes[number],), (facts[number],) = spare.nodes, spare.facts
        return replace(self, nodes=tuple(nodes), facts=tuple(facts), spares=(*self.spares, spare))

    def release(self) -> None:
        """Gives the GPUs back. Ray does so by itself when the driver ends."""
        for spare in self.spares:
            spare.release()
        for holder in self.holders:
            ray.kill(holder)
        if self.group is not None:
            remove_placement_group(self.group)


def reserve(
    count: int, gpus_per_node: int, *, run: str, when_busy: WhenBusy, timeout_s: float, say: Say
) -> Reservation:
    """Choose `count` nodes, in as few racks as possible, and reserve `gpus_per_node` GPUs on each; with 0 nothing is
    reserved.

    run: the name of this run in messages of others. when_busy: what happens while other jobs have the GPUs: "refuse"
    raises ValueError, "queue" waits without limit and reports every minute which jobs have them. timeout_s: for all
    other waits together. Raises ValueError as `suitable_nodes`; RuntimeError when a node does not report its facts in
    time.
    """
    limit = _Limit(timeout_s)
    if not gpus_per_node:
        nodes = choose_nodes(suitable_nodes(count, 0, timeout_s=timeout_s, say=say, began=limit.began), count)
        return Reservation(nodes=nodes, facts=_facts_on_cpu(nodes, limit))
    name = f"{_NAME}{run!r} of process {os.getpid()} on {socket.gethostname()}"
    first: float | None = None  # when enough nodes were there
    silent_since = 0.0
    while True:
        nodes = suitable_nodes(count, gpus_per_node, timeout_s=timeout_s, say=say, began=limit.began)
        found, free = time.monotonic(), free_gpus()
        first = found if first is None else first
        idle = choose_nodes([n for n in nodes if free.get(n.id, 0) >= gpus_per_node], count)
        if len(idle) == count and (group := _create(idle, gpus_per_node, name, limit)) is not None:
            return _held(idle, group, gpus_per_node, limit)
        waited = time.monotonic() - first
        busy = _busy(nodes, count, gpus_per_node)
        if when_busy == "refuse" and (waited >= _SETTLES_S or not limit.left()):
            raise ValueError(
                f"{busy} ({waited:.0f} s after the nodes were found, cluster.timeout_s = {timeout_s:g} s): wait until "
                "they are free, or set cluster.when_busy = 'queue' to wait for them"
            )
        if when_busy == "queue" and (not silent_since or waited - silent_since >= SAY_EVERY_S):
            say(f"Queued for {waited:.0f} s: {busy}")
            silent_since = max(waited, 1e-9)
        time.sleep(min(1.0, limit.left()) if when_busy == "refuse" else 1.0)
        if when_busy == "queue":
            limit.began += time.monotonic() - found


def spare_node(
    held: Sequence[Node], gpus_per_node: int, *, run: str, sees: Path, timeout_s: float
) -> Reservation | None:
    """A node of the cluster beside `held` with as many GPUs free, which are reserved, and that sees the directory
    `sees`; None: there is none. run, timeout_s: as of `reserve`. Raises RuntimeError as `reserve`."""
    limit, taken, free = _Limit(timeout_s), {node.id for node in held}, free_gpus()
    name = f"{_NAME}{run!r} of process {os.getpid()} on {socket.gethostname()}"
    task: Any = ray.remote(num_cpus=0, max_retries=0)(os.path.isdir)
    for node in living_nodes():
        if node.id in taken or free.get(node.id, 0) < gpus_per_node:
            continue
        try:
            seen = ray.get(task.options(scheduling_strategy=on_node(node.id)).remote(str(sees)), timeout=_GROUP_S)
        except RayError:
            continue
        if not seen:
            continue
        if not gpus_per_node:
            return Reservation(nodes=(node,), facts=_facts_on_cpu([node], limit))
        if (group := _create([node], gpus_per_node, name, limit)) is not None:
            return _held([node], group, gpus_per_node, limit)
    return None


class _Limit:
    """`cluster.timeout_s` for several waits together. began: by the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.began = timeout_s, time.monotonic()

    def left(self, most: float = math.inf) -> float:
        """Seconds that are left, at most `most`."""
        return min(most, max(0.0, self.began + self.timeout_s - time.monotonic()))


def _create(nodes: Sequence[Node], gpus: int, name: str, limit: _Limit) -> PlacementGroup | None:
    """None when another job was faster: Ray then holds no part of the group."""
    group: PlacementGroup = placement_group(
        [{"GPU": gpus}] * len(nodes),
        strategy="STRICT_SPREAD",
        name=name,
        bundle_label_selector=[{"ray.io/node-id": n.id} for n in nodes],
    )
    if group.wait(limit.left(_GROUP_S)):
        return group
    remove_placement_group(group)
    return None


def _held(nodes: Sequence[Node], group: PlacementGroup, gpus: int, limit: _Limit) -> Reservation:
    holder: Any = ray.remote(_Holder)
    holders = tuple(
        holder.options(
            num_cpus=0,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
        ).remote()
        for i in range(len(nodes))
    )
    try:
        facts = _answers([h.facts.remote(n.address, n.id) for h, n in zip(holders, nodes, strict=True)], nodes, limit)
    except BaseException:
        remove_placement_group(group)
        raise
    return Reservation(nodes=tuple(nodes), facts=facts, group=group, holders=holders)


def _facts_on_cpu(nodes: Sequence[Node], limit: _Limit) -> tuple[NodeFacts, ...]:
    """Facts of nodes without devices. Those of this process's node are taken here, without a process."""
    here = ray.get_runtime_context().get_node_id()
    task: Any = ray.remote(num_cpus=0, max_retries=0)(node_facts)
    others = [n for n in nodes if n.id != here]
    refs = [task.options(scheduling_strategy=on_node(n.id)).remote(n.address, ()) for n in others]
    found = dict(zip((n.id for n in others), _answers(refs, others, limit), strict=True))
    return tuple(found[n.id] if n.id in found else node_facts(n.address, ()) for n in nodes)


def _answers(refs: Sequence[Any], nodes: Sequence[Node], limit: _Limit) -> tuple[NodeFacts, ...]:
    most = limit.left(_FACTS_S)
    deadline = time.monotonic() + most
    found: list[NodeFacts] = []
    for ref, node in zip(refs, nodes, strict=True):
        try:
            found.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise RuntimeError(
                f"node {node.address} did not start a process within {most:.3g} s"
                + ("" if most == _FACTS_S else f", the rest of cluster.timeout_s = {limit.timeout_s:g} s")
                + f"; {cluster_gist()}: see `ray status` and Ray's logs on that node, then run again"
            ) from None
        except RayError as e:
            raise RuntimeError(f"node {node.address}: {error_message(e)}") from None
    return tuple(found)


def _busy(nodes: Sequence[Node], count: int, gpus: int) -> str:
    """Which nodes are busy with what, without a remedy."""
    free, holders = free_gpus(), _other_runs()
    idle = sum(free.get(n.id, 0) >= gpus for n in nodes)
    taken = []
    for n in nodes:
        if (left := free.get(n.id, 0)) < gpus:
            by = f"reserved by {holders[n.id]}" if n.id in holders else "the others are used by another Ray job"
            taken.append(f"{n.address} has {left} of {n.gpus} GPUs free, {by}")
    return (
        f"the run needs {format_nodes(count, gpus)} (cluster.nodes, cluster.gpus_per_node), but {idle} of "
        f"{len(nodes)} are free: {'; '.join(taken) or 'another job was faster'}"
    )


def _other_runs() -> Mapping[str, str]:
    """Node id -> the run that has reserved GPUs on it."""
    table: Mapping[str, Any] = placement_group_table()
    return {
        str(node): str(group["name"]).removeprefix("miles-like ")
        for group in table.values()
        if group["state"] == "CREATED" and str(group["name"]).startswith(_NAME)
        for node in group["bundles_to_node_id"].values()
    }


class _Holder:
    """Actor that has all GPUs of one bundle."""

    def facts(self, address: str, node: str) -> NodeFacts:
        """address, node: address and Ray's id of the node."""
        return node_facts(address, devices_of(ray.get_gpu_ids(), node))


def node_facts(address: str, devices: Sequence[Device]) -> NodeFacts:
    """The facts of the node that this runs on."""
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        devices=tuple(devices),
        scratch=scratch_directory() if devices else None,
    )


def interface_of(address: str) -> str | None:
    """The network interface of this machine with the address; None: no interface has it. All of 127.0.0.0/8 is the
    loopback's, which lists one address of it."""
    wanted = "127.0.0.1" if address.startswith("127.") else address
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(a.address.partition("%")[0] == wanted for a in addresses):
            return str(name)
    return None


def devices_of(ids: Sequence[int | str], node: str) -> tuple[Device, ...]:
    """The devices that Ray names, in the order of their indices.

    ids: indices or UUIDs, as CUDA_VISIBLE_DEVICES of Ray's own process has them. UUIDs are those of `nvidia-smi -L`.
    Where there is no such program, as on a machine whose GPUs are pretended to Ray, a UUID is derived from `node`,
    Ray's id of the node, and the index. Raises RuntimeError for a UUID that the machine does not have.
    """
    known = _nvidia_uuids()
    found = []
    for one in ids:
        if str(one).isdecimal():
            index = int(one)
        else:
            same = [i for i, of in known.items() if of.startswith(str(one))]
            if len(same) != 1:
                raise RuntimeError(
                    f"Ray reports the GPU {one} on {socket.gethostname()}, but nvidia-smi -L lists no whole GPU "
                    "with this name: start Ray with indices of whole GPUs in CUDA_VISIBLE_DEVICES"
                )
            (index,) = same
        derived = f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{node}/{index}')}"
        found.append(Device(index=index, uuid=known.get(index, derived)))
    return tuple(sorted(found, key=lambda d: d.index))


def _nvidia_uuids() -> Mapping[int, str]:
    """Index -> UUID of this machine's NVIDIA GPUs; empty without nvidia-smi."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
        return {int(i): of for i, of in re.findall(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", listed, re.MULTILINE)}
    return {}

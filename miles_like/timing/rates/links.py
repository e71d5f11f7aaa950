"""Seconds of collectives: latency plus bytes over the slowest link that they pass, with NCCL's ring algorithms.

Sources: "NCCL tests", doc/PERFORMANCE.md (bus bandwidth: an all-gather of B bytes moves B (n - 1) / n through every
rank's link, an all-reduce twice that); rank order tp-cp-ep-dp-pp of megatron-core 0.16.1, parallel_state.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_like.device_table import Device
from miles_like.timing.rates.calibration import LATENCY, LATENCY_OF_DOMAINS, NETWORK, NVLINK


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks, of which `local` consecutive ones are in one NVLink domain."""

    size: int
    local: int

    @property
    def domains(self) -> int:
        return -(-self.size // self.local)


def group_of(size: int, stride: int, device: Device) -> Group:
    """A group of every `stride`-th rank. Raises ValueError for a size or stride below 1."""
    if size < 1 or stride < 1:
        raise ValueError(f"a group of {size} ranks with stride {stride}: expected at least 1")
    return Group(size, max(1, min(size, device.domain // stride)))


def link(device: Device, *, near: bool) -> float:
    """Bytes/s of one rank's link, within its domain or out of it."""
    return NVLINK * device.intra if near else NETWORK * device.inter


def ring_rate(group: Group, device: Device) -> float:
    """Bytes/s through every rank. Between domains the rings use the network links of all `local` ranks."""
    within = NVLINK * device.intra
    return within if group.domains == 1 else min(within, group.local * NETWORK * device.inter)


def latency(group: Group) -> float:
    """Seconds of a collective of no bytes."""
    if group.size == 1:
        return 0.0
    return LATENCY + LATENCY_OF_DOMAINS * math.ceil(math.log2(group.domains))


def all_gather(nbytes: float, group: Group, device: Device) -> float:
    """Seconds of an all-gather. nbytes: of the gathered tensor."""
    if group.size == 1:
        return 0.0
    return latency(group) + nbytes * (group.size - 1) / group.size / ring_rate(group, device)


def reduce_scatter(nbytes: float, group: Group, device: Device) -> float:
    """Seconds of a reduce-scatter. nbytes: of the tensor before it is scattered."""
    return all_gather(nbytes, group, device)


def all_reduce(nbytes: float, group: Group, device: Device) -> float:
    """Seconds of an all-reduce. nbytes: of the tensor on each rank."""
    if group.size == 1:
        return 0.0
    return latency(group) + 2 * nbytes * (group.size - 1) / group.size / ring_rate(group, device)


def all_to_all(nbytes: float, group: Group, device: Device) -> float:
    """Seconds of an all-to-all. nbytes: that a rank sends, evenly to all ranks, itself included. Both links work at
    once."""
    if group.size == 1:
        return 0.0
    near = nbytes * (group.local - 1) / group.size / (NVLINK * device.intra)
    far = nbytes * (group.size - group.local) / group.size / (NETWORK * device.inter)
    return latency(group) + max(near, far)


def send(nbytes: float, device: Device, *, near: bool) -> float:
    """Seconds of a message of `nbytes` from one rank to another. near: in the same NVLink domain."""
    return LATENCY + nbytes / link(device, near=near)


def broadcast(nbytes: float, group: Group, device: Device) -> float:
    """Seconds of a broadcast from one rank, through its own link, to the others. nbytes: of the tensor."""
    if group.size == 1:
        return 0.0
    return latency(group) + nbytes / link(device, near=group.domains == 1)

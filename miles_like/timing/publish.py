"""Seconds of a publication by path. The bytes of the model are those of the served format; gathers are of BF16.

Paths of rollout/publish:
    tensor        one rank gathers and packs the encoded tensors into memory that servers on its host open: of its GPU
                  where the one server has that GPU, else of the host. To servers elsewhere it sends base64 in JSON,
                  once for each of a server's ranks
    disk          all ranks gather, each quantizes and writes its part of one directory, which every server reads
    distributed   each pipeline stage gathers its tensors, at once with the others; `sources` ranks (in rollout/publish
                  one at a time) broadcast whole tensors to all ranks of all servers
Paths whose formulas are stated here ahead of their code:
    ipc           each rank gathers whole tensors and hands them to the server rank on its device by a CUDA IPC handle
    delta         as distributed, of what has changed: each rank compares its share with the last version and compresses
                  the difference on its host; each rank of a server expands a share
    reshard       every rank sends the slices that a server rank holds to that rank alone
`miles_like/timing/weight_sync` simulates these paths bucket by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_like.device_table import Device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.phase import Phase
from miles_like.timing.rates.calibration import (
    COMPRESSOR,
    DELTA_WIRE,
    HOST,
    HOST_MEMORY,
    ONE_ENCODER,
    ONE_WRITER,
    TENSOR,
)
from miles_like.timing.rates.links import Group, broadcast, group_of, link, ring_rate
from miles_like.timing.rates.roofline import moved
from miles_like.timing.shape import ModelShape

READING = "reading"  # the servers' term of "disk", which needs no trainer
Path = Literal["tensor", "disk", "ipc", "distributed", "delta", "reshard"]
BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSetup:
    path: Path
    device: Device
    ranks: int
    """Of the trainer."""
    engine: EngineSetup
    sources: int = 1
    """Ranks that send at once ("distributed")."""
    stages: int = 1
    """Pipeline stages of the trainer, each of which gathers its own tensors ("distributed")."""
    disk: float | None = None
    """Bytes/s of the directory's file system; None: a node's local NVMe."""
    changed: float = 1.0
    """Share of the published bytes that differ from the last version ("delta")."""
    colocated: bool = False
    """Servers are on the trainer's GPUs."""

    @property
    def on_one_host(self) -> bool:
        """Trainer and servers fit on a node, so that all are on that of the trainer's first rank."""
        gpus = max(self.ranks, self.engine.gpus) if self.colocated else self.ranks + self.engine.gpus
        return gpus <= self.device.node_gpus


def served_bytes(shape: ModelShape, engine: EngineSetup) -> float:
    """Bytes of the model as it is published: experts, other linears, and embedding and head in BF16."""
    linears = shape.others - shape.embeddings
    return engine.expert_bytes * shape.routed + engine.weight_bytes * linears + BF16 * shape.embeddings


def tensors(shape: ModelShape) -> float:
    """Approximate number of tensors of a checkpoint: three per expert, and ten per layer otherwise."""
    return 3.0 * shape.sparse * shape.experts + 10.0 * shape.layers


def publish_time(shape: ModelShape, setup: PublishSetup) -> Phase:
    """Seconds of one publication to all servers, by term."""
    encoded, full = served_bytes(shape, setup.engine), BF16 * shape.parameters
    everyone = group_of(setup.ranks, 1, setup.device)
    gather = full / ring_rate(everyone, setup.device) if setup.ranks > 1 else 0.0
    gather = max(gather, TENSOR * tensors(shape))
    if setup.path == "tensor" and setup.on_one_host:
        return Phase(_by_handles(gather, encoded, setup))
    if setup.path == "tensor":
        return Phase({"gather": gather} | _by_requests(encoded, setup))
    if setup.path == "disk":
        write = encoded / writing_rate(setup)
        # gathered in pieces while they are written
        return Phase({"gather and writing": max(gather, write), READING: encoded / reading_rate(setup)})
    if setup.path == "ipc":
        return Phase({"gather": gather, "loading": _loading(encoded, setup)})
    if setup.path == "distributed":
        sent = broadcast(encoded / setup.sources, receivers(setup), setup.device)
        # tensors are whole before they are sent, piece by piece: the slower of the two
        return Phase({"gather and broadcast": max(gather / setup.stages, sent), "loading": _loading(encoded, setup)})
    if setup.path == "delta":
        sent = broadcast(wire_bytes(encoded, setup) / setup.sources, receivers(setup), setup.device)
        compared = moved(3 * encoded / setup.ranks, setup.device)
        packed, unpacked = (difference_bytes(encoded, setup) / n / COMPRESSOR for n in (setup.ranks, setup.engine.tp))
        loading = unpacked + _loading(encoded, setup)
        return Phase({"difference": compared + packed, "broadcast": sent, "loading": loading})
    return Phase({"slices": _slices(encoded, setup), "loading": _loading(encoded / setup.engine.tp, setup)})


def receivers(setup: PublishSetup) -> Group:
    """One source and all ranks of all servers, in one NVLink domain where trainer and servers fit into it together."""
    apart = setup.ranks + setup.engine.gpus > setup.device.domain
    return Group(setup.engine.gpus + 1, 1 if apart else group_of(setup.ranks, 1, setup.device).local)


def difference_bytes(encoded: float, setup: PublishSetup) -> float:
    """Bytes of a difference before its compression: the changed bytes and as many for their places."""
    return 2 * setup.changed * encoded


def wire_bytes(encoded: float, setup: PublishSetup) -> float:
    """Bytes of a compressed difference; what is larger than the weights is sent as these."""
    return encoded * min(1.0, DELTA_WIRE * setup.changed)


def writing_rate(setup: PublishSetup) -> float:
    """Bytes/s at which all trainer ranks write their parts of one directory together."""
    nodes = -(-setup.ranks // setup.device.node_gpus)
    return min(setup.ranks * ONE_WRITER, setup.disk or nodes * setup.device.disk)


def reading_rate(setup: PublishSetup) -> float:
    """Bytes/s of each server while all read the directory once; a shared file system divides its rate among them."""
    return setup.device.disk if setup.disk is None else setup.disk / setup.engine.servers


def _by_handles(gather: float, encoded: float, setup: PublishSetup) -> dict[str, float]:
    """A bucket is packed while servers load the one before: the slower of the two. Every server rank copies every
    bucket whole, without a copy made for it: over the links of the sender's GPU, or out of the host's memory."""
    device, engine = setup.device, setup.engine
    pcie = HOST * device.host
    if setup.colocated and engine.servers == 1:
        packed = moved(2 * encoded, device)
        opened = encoded * (engine.gpus - 1) / link(device, near=True)
    else:
        packed = encoded / pcie
        opened = encoded * max(1 / pcie, engine.gpus / HOST_MEMORY)
    return {"gather, packing and opening": max(gather, packed, opened), "loading": _loading(encoded, setup)}


def _by_requests(encoded: float, setup: PublishSetup) -> dict[str, float]:
    """4/3 bytes of base64 a byte, for each of a server's ranks; the requests to all servers leave by one node."""
    body = encoded * 4 / 3 * setup.engine.tp
    return {"encoding": body / ONE_ENCODER, "requests": body * setup.engine.servers / link(setup.device, near=False)}


def _loading(encoded: float, setup: PublishSetup) -> float:
    """Every server rank reads the whole tensors on its device and writes its slice."""
    return moved(encoded * (1 + 1 / setup.engine.tp), setup.device)


def _slices(encoded: float, setup: PublishSetup) -> float:
    """Each server takes the model once, in slices that all its ranks receive, and all trainer ranks send, at once."""
    received = encoded / setup.engine.tp
    sent = encoded * setup.engine.servers / setup.ranks
    return max(received, sent) / link(setup.device, near=False)

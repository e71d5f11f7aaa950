"""A publication by each path as chains of stages, with the seconds of each bucket.

Stages of the trainer are those of all ranks at once ("ipc", "disk"), or of each pipeline stage apart, whose sources
send in turn ("distributed", "delta") or at once ("reshard"). A resource is the narrowest device of its kind, so that
the seconds of a stage are bytes over its rate and the time of a bucket's tensors on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import MIB
from miles_like.timing.publish import (
    Path,
    PublishSetup,
    difference_bytes,
    reading_rate,
    receivers,
    wire_bytes,
    writing_rate,
)
from miles_like.timing.rates.calibration import COMPRESSOR, CONTROL, ENCODER, TENSOR_PASSED, TENSOR_SIDE
from miles_like.timing.rates.links import Group, all_gather, broadcast, group_of, send
from miles_like.timing.rates.roofline import moved
from miles_like.timing.weight_sync.pipeline import Chain, Stage, Timeline, one_after_the_other, simulate
from miles_like.timing.weight_sync.stream import Bucket, Slot, buckets
from quant.spec import QuantSpec

HOST, CODEC, NVLINK, NETWORK = "trainer's host", "trainer's encoder", "trainer's NVLink", "trainer's network"
SERVER_HOST, SERVER_MEMORY = "servers' host", "servers' memory"
SERVER_NVLINK, SERVER_NETWORK = "servers' NVLink", "servers' network"
DISK = "disk"
OF_STAGE = "#"  # between a resource's name and the pipeline stage that has it


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSetup:
    """A publication's path, devices and layouts."""

    publish: PublishSetup
    parallel: ParallelConfig
    """Of the trainer; its world size is `publish.ranks`."""
    spec: QuantSpec | None = None
    """Of the published weights; None: BF16."""
    encoded_first: bool = True
    """Each rank encodes its shard before it is gathered; otherwise whole tensors are gathered in BF16, and the ranks
    that pass them on encode them."""
    bucket_bytes: float = 256 * MIB
    """Of BF16."""
    buffers: int = 2
    one_sender: bool = False
    """One rank of the trainer, which has all tensors whole, encodes and broadcasts them ("distributed"); otherwise the
    sources of each pipeline stage do, as in rollout/publish."""
    load_in_turn: bool = False
    """Servers load a bucket before the next one is sent ("distributed"), as in rollout/publish."""
    once_a_node: bool = False
    """A tensor that all ranks of a node need whole reaches it once, in parts over their links, and goes on by NVLink
    ("reshard": what every rank of a server keeps; "ipc", "disk": what goes to the other pipeline stages)."""

    def __post_init__(self) -> None:
        if self.parallel.world_size != self.publish.ranks:
            raise ValueError(
                f"a layout of {self.parallel.world_size} ranks but publish.ranks = {self.publish.ranks}: use "
                "the same number"
            )


Work = tuple[str, str, float]  # stage, resource, seconds


def synchronize(slots: Sequence[Slot], setup: SyncSetup) -> Timeline:
    """Simulates one publication to all servers; `busy` is of the busiest device of each kind. slots: of `publication`
    with the setup's layouts and format. Raises ValueError for a path that is not simulated."""
    path, p = setup.publish.path, setup.parallel
    if path not in _PHASES:
        raise ValueError(f"path {path!r} is not simulated: choose one of {', '.join(_PHASES)}")
    found = list(buckets(slots, setup.bucket_bytes))
    apart = path in _STAGES_APART and not setup.one_sender
    stages = [[b for b in found if b.key.stage == s] for s in range(p.pp)] if apart else [found]
    return with_control(
        one_after_the_other(
            simulate([chain([works(setup, b) for b in own], setup.buffers) for own in stages])
            for works in _PHASES[path]
        )
    )


def with_control(timeline: Timeline) -> Timeline:
    """The time of all requests and transfers, and the busiest device of each kind."""
    busy: dict[str, float] = {}
    for name, seconds in timeline.busy.items():
        kind = name.partition(OF_STAGE)[0]
        busy[kind] = max(busy.get(kind, 0.0), seconds)
    return Timeline(timeline.seconds + CONTROL, busy | {"requests": CONTROL})


def chain(rows: Sequence[Sequence[Work]], buffers: int) -> Chain:
    """Buckets, each with its works, that pass the same stages. Raises ValueError without a bucket."""
    if not rows:
        raise ValueError("a chain without a bucket: a pipeline stage without tensors has none to publish")
    stages = tuple(Stage(name=name, resource=resource, buffers=buffers) for name, resource, _ in rows[0])
    return Chain(stages=stages, seconds=[[seconds for _, _, seconds in row] for row in rows])


def _holders(setup: SyncSetup, bucket: Bucket) -> Group:
    """Ranks that hold different parts of a bucket's tensors."""
    p, device = setup.parallel, setup.publish.device
    if bucket.key.per_expert:
        return group_of(p.ep * p.etp, 1, device)
    return group_of(1 if bucket.key.replicated else p.tp, 1, device)


def _stage_ranks(setup: SyncSetup) -> int:
    return setup.parallel.world_size // setup.parallel.pp


def _encode(setup: SyncSetup, nbytes: float) -> float:
    return nbytes / ENCODER[setup.spec.format.value] if setup.spec is not None else 0.0


def _of_stage(resource: str, bucket: Bucket) -> str:
    return f"{resource}{OF_STAGE}{bucket.key.stage}"


def _gathered(setup: SyncSetup, bucket: Bucket, *, apart: bool) -> list[Work]:
    """Whole tensors on the ranks of their pipeline stage. apart: the stages gather at once."""
    group, device = _holders(setup, bucket), setup.publish.device
    nbytes = bucket.encoded if setup.encoded_first else bucket.full
    seconds = all_gather(nbytes, group, device)
    near = group.domains == 1
    first = _encode(setup, bucket.full / group.size) if setup.encoded_first else 0.0
    host, codec, nvlink, network = (
        _of_stage(name, bucket) if apart else name for name in (HOST, CODEC, NVLINK, NETWORK)
    )
    return [
        ("tensors", host, TENSOR_SIDE * bucket.tensors),
        ("encode shards", codec, first),
        ("gather in a node", nvlink, seconds if near else 0.0),
        ("gather over nodes", network, 0.0 if near else seconds),
    ]


def _whole(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Whole tensors on every rank: gathered in their stage, then broadcast to the other stages."""
    p, device = setup.parallel, setup.publish.device
    group = group_of(p.pp, _stage_ranks(setup), device)
    nbytes = bucket.encoded if setup.encoded_first else bucket.full
    node = _node(setup, _stage_ranks(setup)) if group.domains > 1 else Group(1, 1)
    return [
        *_gathered(setup, bucket, apart=False),
        (
            "broadcast to stages",
            NVLINK if group.domains == 1 else NETWORK,
            broadcast(nbytes / node.size, group, device),
        ),
        ("pass on", NVLINK, all_gather(nbytes, node, device)),
    ]


def _node(setup: SyncSetup, ranks: int) -> Group:
    """Of `ranks` consecutive ranks, those that receive a tensor of all of them together."""
    size = min(ranks, setup.publish.device.domain) if setup.once_a_node else 1
    return Group(size, size)


def _handles(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Every rank has all tensors whole, encoded, for the server's rank on its device."""
    later = 0.0 if setup.encoded_first else _encode(setup, bucket.full)
    return [*_whole(setup, bucket), ("encode", CODEC, later), *_load(setup, bucket)]


def _written(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Every rank writes its share of the tensors."""
    later = 0.0 if setup.encoded_first else _encode(setup, bucket.full / setup.publish.ranks)
    write = ("write", DISK, bucket.encoded / writing_rate(setup.publish))
    return [*_whole(setup, bucket), ("encode", CODEC, later), write]


def _read(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    return [("read", DISK, bucket.encoded / reading_rate(setup.publish)), *_load(setup, bucket)]


def _load(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Each rank of a server goes through all tensors on its device and copies its slices."""
    host = TENSOR_SIDE * bucket.kept + TENSOR_PASSED * (bucket.tensors - bucket.kept)
    return [
        ("tensors of the servers", SERVER_HOST, host),
        ("load", SERVER_MEMORY, moved(bucket.encoded + bucket.slice, setup.publish.device)),
    ]


def _distributed(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Sources of a stage broadcast its tensors; the servers' links take one broadcast at a time."""
    p = setup.publish
    sources = min(p.sources, p.device.domain)
    later = 0.0 if setup.encoded_first else _encode(setup, bucket.full / sources)
    sent = broadcast(bucket.encoded / sources, receivers(p), p.device)
    loads = [(n, SERVER_NETWORK, s) for n, _, s in _load(setup, bucket)] if setup.load_in_turn else _load(setup, bucket)
    whole = _whole(setup, bucket) if setup.one_sender else _gathered(setup, bucket, apart=True)
    encoder = CODEC if setup.one_sender else _of_stage(CODEC, bucket)
    return [*whole, ("encode", encoder, later), ("broadcast", SERVER_NETWORK, sent), *loads]


def _delta(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Each rank compares its shard with the last version; what has changed goes as with "distributed"."""
    p, holders = setup.publish, _holders(setup, bucket)
    sources = min(p.sources, p.device.domain)
    changed = difference_bytes(bucket.encoded, p)
    wire = wire_bytes(bucket.encoded, p)
    own = moved(3 * bucket.encoded / holders.size, p.device)
    unpack = changed / p.engine.tp / COMPRESSOR
    return [
        ("tensors", _of_stage(HOST, bucket), TENSOR_SIDE * bucket.tensors / holders.size),
        ("encode shards", _of_stage(CODEC, bucket), _encode(setup, bucket.full / holders.size)),
        ("compare", _of_stage(CODEC, bucket), own),
        ("compress", _of_stage(HOST, bucket), changed / holders.size / COMPRESSOR),
        ("gather", _of_stage(NETWORK, bucket), all_gather(wire, holders, p.device)),
        ("broadcast", SERVER_NETWORK, broadcast(wire / sources, receivers(p), p.device)),
        ("expand", SERVER_HOST, unpack),
        *_load(setup, bucket),
    ]


def _reshard(setup: SyncSetup, bucket: Bucket) -> list[Work]:
    """Every rank of a stage sends an equal part of the slices that the servers' ranks keep, to these alone."""
    p, holders, ranks = setup.publish, _holders(setup, bucket), _stage_ranks(setup)
    node = _node(setup, p.engine.tp)
    received = bucket.slice - bucket.whole * (1 - 1 / node.size)
    messages = bucket.kept * p.engine.gpus / ranks
    sent = received * p.engine.gpus / ranks
    own = bucket.tensors / holders.size if bucket.key.per_expert else bucket.tensors
    near = receivers(p).domains == 1
    return [
        ("tensors", _of_stage(HOST, bucket), TENSOR_SIDE * own + TENSOR_PASSED * messages),
        ("encode shards", _of_stage(CODEC, bucket), _encode(setup, bucket.full / holders.size)),
        ("send", _of_stage(NETWORK, bucket), send(sent, p.device, near=near)),
        ("receive", SERVER_NETWORK, send(received, p.device, near=near)),
        ("pass on", SERVER_NVLINK, all_gather(bucket.whole, node, p.device) if bucket.whole else 0.0),
        ("tensors of the servers", SERVER_HOST, TENSOR_SIDE * bucket.kept),
        ("load", SERVER_MEMORY, moved(2 * bucket.slice, p.device)),
    ]


_PHASES: Mapping[Path, tuple[Callable[[SyncSetup, Bucket], list[Work]], ...]] = {
    "ipc": (_handles,),
    "distributed": (_distributed,),
    "disk": (_written, _read),
    "delta": (_delta,),
    "reshard": (_reshard,),
}
_STAGES_APART: frozenset[Path] = frozenset(("distributed", "delta", "reshard"))

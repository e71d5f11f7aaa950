"""Published publications of weights as setups of the simulation, with the seconds that they took.

NeMo-RL, docs/design-docs/nccl-reshard-refit.md: slices of the FFN weights first, pipeline stages divided over two
streams (NRL_REFIT_NUM_STREAMS), of which each moves one matrix of a layer at a time (its experts as one): once to all
replicas of the servers together, each receiving a part, then from these parts to the others. Then all other tensors, by
a packed broadcast from one rank. The middle of the published range counts.

NeMo-RL, docs/guides/checkpoint-engine-refit.md: 32 policy nodes of TP1 PP16 EP16, four nodes of vLLM with TP32, two
buffers of 4 GiB. Each of 32 policy ranks sends to one server rank: whole tensors, or of experts the slices alone
(`shard_expert_weights`; 45,395 tensors, 69.95 GiB a rank).

miles, docs/advanced/p2p-weight-transfer.md, column NCCL: a source of each pipeline stage broadcasts buckets of 1 GB to
all ranks of all servers, and holds a lock until these have loaded the bucket (`rollout_engine_lock`). GLM-5 is left
out, whose configuration is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import HFConfig
from miles_like.device_table import GB, MIB, device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.publish import PublishSetup
from miles_like.timing.published.models import Row
from miles_like.timing.rates.calibration import CONTROL, TENSOR_SIDE
from miles_like.timing.rates.links import broadcast, group_of, send
from miles_like.timing.rates.roofline import moved
from miles_like.timing.weight_sync.paths import (
    HOST,
    NETWORK,
    OF_STAGE,
    SERVER_HOST,
    SERVER_MEMORY,
    SERVER_NETWORK,
    SyncSetup,
    Work,
    chain,
    synchronize,
    with_control,
)
from miles_like.timing.weight_sync.pipeline import Timeline, one_after_the_other, simulate
from miles_like.timing.weight_sync.stream import Slot, bucket_of, buckets, publication
from quant.spec import QuantFormat, QuantSpec

H100 = device("H100")
STREAMS = 2
_PACKED = 256 * MIB  # of the broadcast (assumption)
_BATCH = 4096 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published figure. parallel: of the trainer; tp, ep: of the servers, `servers` of them."""

    source: str
    model: str
    seen: float
    parallel: ParallelConfig
    servers: int
    tp: int
    ep: int = 1
    spec: QuantSpec | None = None
    slices: bool = True
    """Of experts only the slices are sent (checkpoint-engine)."""

    @property
    def engine(self) -> EngineSetup:
        return EngineSetup(device=H100, servers=self.servers, tp=self.tp, ep=self.ep)

    @property
    def name(self) -> str:
        how = "" if self.slices else ", whole experts"
        return f"{self.model}, {self.parallel.world_size} + {self.servers * self.tp} H100{how}"


def _layout(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**sizes)


_DEEP = ParallelConfig(pp=16, ep=16, dp=16, first_stage_layers=3, last_stage_layers=2)
RESHARD, ENGINE, NCCL = "NeMo-RL, NCCL reshard", "NeMo-RL, NIXL", "miles, NCCL"
HELD = (
    Published(source=RESHARD, model="deepseek_v3", seen=(2.39 + 2.83) / 2, parallel=_DEEP, servers=8, tp=32),
    Published(source=ENGINE, model="deepseek_v3", seen=10.92, parallel=_DEEP, servers=1, tp=32),
    Published(source=ENGINE, model="deepseek_v3", seen=36.81, parallel=_DEEP, servers=1, tp=32, slices=False),
    Published(
        source=NCCL,
        model="qwen3_235b_a22b",
        seen=10.75,
        parallel=_layout(tp=4, pp=4, cp=2, ep=16, dp=2, first_stage_layers=23, last_stage_layers=23),
        servers=2,
        tp=32,
        ep=32,
    ),
)
FURTHER = (
    Published(
        source=RESHARD,
        model="qwen3_30b_a3b",
        seen=(0.74 + 1.00) / 2,
        parallel=_layout(pp=2, ep=8, dp=8),
        servers=2,
        tp=8,
    ),
    Published(
        source=NCCL,
        model="glm45_air",
        seen=5.00,
        parallel=_layout(pp=4, ep=8, dp=8, first_stage_layers=11, last_stage_layers=11),
        servers=4,
        tp=8,
        ep=8,
    ),
    Published(source=NCCL, model="qwen3_30b_a3b", seen=2.67, parallel=_layout(tp=4, ep=8, dp=4), servers=2, tp=8, ep=8),
    Published(
        source=NCCL,
        model="kimi_k2",
        seen=53.28,
        parallel=_layout(tp=8, pp=8, cp=4, ep=32, first_stage_layers=7, last_stage_layers=6),
        servers=8,
        tp=32,
        ep=32,
        spec=QuantSpec(format=QuantFormat.FP8, block=(64, 64)),
    ),
)
SMALL = Published(
    source=RESHARD, model="qwen3_4b", seen=(0.21 + 0.34) / 2, parallel=_layout(dp=8), servers=1, tp=8
)  # gives CONTROL


def published(configs: Mapping[str, HFConfig], rows: tuple[Published, ...] = HELD) -> Iterator[Row]:
    """Seconds of a publication. configs: config.json by model."""
    for row in rows:
        found = _WAYS[row.source](configs[row.model], row)
        yield Row(
            source=row.source,
            name=row.name,
            seen=row.seen,
            predicted=found.seconds,
            unit="s",
            decides=found.bound,
        )


def control(configs: Mapping[str, HFConfig]) -> float:
    """The seconds of `SMALL` beyond its transfer."""
    return SMALL.seen - (_nccl_reshard(configs[SMALL.model], SMALL).seconds - CONTROL)


def _nccl_reshard(hf: HFConfig, row: Published) -> Timeline:
    slots = publication(hf, row.parallel, row.engine, row.spec)
    bulk, rest = ([slot for slot in slots if _is_bulk(slot) is wanted] for wanted in (True, False))
    return with_control(one_after_the_other([_bulk(bulk, row), _packed(rest, row)]))


def _is_bulk(slot: Slot) -> bool:
    name = slot.names[0]
    return ".mlp." in name and name.endswith("_proj.weight") and ".shared_experts." not in name


def _bulk(slots: list[Slot], row: Published) -> Timeline:
    """Matrices of a layer, those of a pipeline stage on one of the streams: each is sent once, then passed on between
    the servers."""
    matrices: dict[tuple[int, str, str], list[Slot]] = {}
    for slot in slots:
        layer, _, inside = slot.names[0].partition(".mlp.")
        matrices.setdefault((slot.key.stage, layer, inside.split(".")[-2]), []).append(slot)
    ranks, copies = row.parallel.world_size // row.parallel.pp, row.servers
    streams: dict[int, list[list[Work]]] = {}
    for (stage, _, name), held in matrices.items():
        bucket, stream = bucket_of(held), stage % STREAMS
        entries = 2 if name == "gate_proj" else 1  # with up_proj
        passed_on = bucket.slice * (copies - 1) / copies
        works = [
            ("matrices", f"{HOST}{OF_STAGE}{stream}", TENSOR_SIDE * entries),
            ("send", f"{NETWORK}{OF_STAGE}{stream}", send(bucket.full / ranks, H100, near=False)),
            ("pass on", SERVER_NETWORK, send(passed_on, H100, near=False) if copies > 1 else 0.0),
            ("copy", SERVER_MEMORY, moved(2 * bucket.slice, H100)),
        ]
        streams.setdefault(stream, []).append(works)
    return simulate([chain(rows, buffers=0) for rows in streams.values()])


def _packed(slots: list[Slot], row: Published) -> Timeline:
    """Whole tensors from their stages to one rank, which broadcasts them to all."""
    p = row.parallel
    stages = group_of(p.pp, p.world_size // p.pp, H100)
    everyone = group_of(p.world_size + row.servers * row.tp, 1, H100)
    rows = [
        [
            ("tensors", HOST, TENSOR_SIDE * bucket.tensors),
            ("gather", NETWORK, broadcast(bucket.full, stages, H100)),
            ("broadcast", SERVER_NETWORK, send(bucket.full, H100, near=everyone.domains == 1)),
            ("tensors of the servers", SERVER_HOST, TENSOR_SIDE * bucket.tensors),
            ("load", SERVER_MEMORY, moved(bucket.full + bucket.slice, H100)),
        ]
        for bucket in buckets(slots, _PACKED)
    ]
    return simulate([chain(rows, buffers=2)])


def _checkpoint_engine(hf: HFConfig, row: Published) -> Timeline:
    """One of the pairs of a policy rank and a server rank, all of which work alike."""
    rows = [
        [
            ("tensors", HOST, TENSOR_SIDE * tensors),
            ("send", SERVER_NETWORK, send(nbytes, H100, near=False)),
            ("tensors of the servers", SERVER_HOST, TENSOR_SIDE * tensors),
            ("load", SERVER_MEMORY, moved(2 * nbytes, H100)),
        ]
        for tensors, nbytes in batches(hf, row)
    ]
    return with_control(simulate([chain(rows, buffers=2)]))


def batches(hf: HFConfig, row: Published) -> Iterator[tuple[int, float]]:
    """(tensors, bytes) that a server rank of checkpoint-engine receives, in batches of at most 4 GiB."""
    tensors, nbytes = 0, 0.0
    for slot in publication(hf, row.parallel, row.engine, row.spec):
        own = slot.slice if slot.key.per_expert and row.slices else slot.full
        if tensors and nbytes + own > _BATCH:
            yield tensors, nbytes
            tensors, nbytes = 0, 0.0
        tensors, nbytes = tensors + len(slot.names), nbytes + own
    yield tensors, nbytes


def _nccl(hf: HFConfig, row: Published) -> Timeline:
    publish = PublishSetup(path="distributed", device=H100, ranks=row.parallel.world_size, engine=row.engine)
    return synchronize(
        publication(hf, row.parallel, row.engine, row.spec),
        SyncSetup(
            publish=publish,
            parallel=row.parallel,
            spec=row.spec,
            encoded_first=False,
            bucket_bytes=GB,
            load_in_turn=True,
        ),
    )


_WAYS: Mapping[str, Callable[[HFConfig, Published], Timeline]] = {
    RESHARD: _nccl_reshard,
    ENGINE: _checkpoint_engine,
    NCCL: _nccl,
}

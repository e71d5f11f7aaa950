"""Trainer ranks that publish from several sources, as a run's do, to servers that others have started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_like.cluster.rank import Rank
from quant.stream import quantize_stream
from rollout.publish.publication import PublishTarget
from rollout.publish.sources.publisher import SourcesPublisher
from rollout.wire.checksum import tensor_checksum
from tests.support import toy

LAYOUTS: Mapping[str, dict[str, int]] = {
    "pp2": {"pp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},  # rank 1 sends experts, and helps rank 0 to gather the rest
    "tp2_etp2": {"tp": 2, "etp": 2},
    "pp2, one layer first": {"pp": 2, "first_stage_layers": 1},
}


@contextmanager
def source_rank(rank: int, world: int, port: int, hf: Path, layout: str, dtype: str = "bfloat16") -> Iterator[Any]:
    """A rank with a Megatron trainer of random weights."""
    config = toy.config(str(hf), mode="off", dtype=dtype, **LAYOUTS[layout])
    with toy.trainer(config, rank, world, port) as t:
        found: Any = Rank()
        found.rank, found.world, found.trainer = rank, world, t
        yield found


def connect(rank: Any, target: PublishTarget, made: Callable[..., SourcesPublisher] = SourcesPublisher) -> None:
    rank.connect(lambda number, ranks: made(target, rank=number))


def exported(rank: Any, target: PublishTarget) -> tuple[dict[str, str], int]:
    """What the servers report of this trainer's weights, and the bytes of them. Collective."""
    stored = {n: x.clone() for n, x in quantize_stream(rank.trainer.export(), target.spec)}
    return {n: tensor_checksum(n, x) for n, x in stored.items()}, sum(x.nbytes for x in stored.values())

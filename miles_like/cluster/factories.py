"""Picklable factories of what runs in a worker process: a trainer rank, a publisher."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.config import TrainerConfig
from miles_like import spans
from miles_like.cluster.observed.profiling import NOTHING, Observed
from miles_like.hf.checkpoint import write_hf
from miles_like.protocols import LossFn, WeightPublisher
from miles_like.rank_protocols import RankTrainer
from miles_like.types import NamedTensor, PublishReport
from quant.spec import QuantSpec
from quant.stream import quantize_stream
from rollout.publish.directory.delta_publisher import DeltaPublisher
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget, Sent, publish_stream
from rollout.publish.publisher import TensorPublisher
from rollout.publish.reshard.member import Member
from rollout.publish.reshard.publisher import ReshardPublisher
from rollout.publish.sources.publisher import SourcesPublisher

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MegatronFactory:
    """Makes a Megatron rank with the weights of a torch_dist directory."""

    config: TrainerConfig
    weights: Path
    loss: LossFn
    # longer than the driver waits for ranks, so that their stacks show the collective in which they hang
    collective_timeout_s: float = 3600.0
    observed: Observed = NOTHING

    def __call__(self, rank: int, world: int, host: str, port: int) -> RankTrainer:
        # imported in the rank's process only: megatron's CPU shims must not patch the driver
        from megatron_bridge.trainer import MegatronTrainer

        self.observed.begin(rank)
        with spans.span("build"):
            return self._built(MegatronTrainer, rank, world, host, port)

    def _built(self, make: Any, rank: int, world: int, host: str, port: int) -> RankTrainer:
        trainer: Any = make(
            self.config,
            rank=rank,
            world_size=world,
            master_addr=host,
            master_port=port,
            loss=self.loss,
            timeout_s=self.collective_timeout_s,
        )
        trainer.load_weights(self.weights.resolve())
        built: RankTrainer = trainer
        return built


@dataclass(frozen=True, slots=True)
class PublisherRecipe:
    """Makes a rank's publisher to running servers, by `PublishConfig.path`."""

    target: PublishTarget
    shared: SharedDirectory  # for paths "disk" and "delta", and where ranks only write
    loads: bool = True  # as in `DiskPublisher`

    def __call__(self, rank: int, ranks: int) -> WeightPublisher:
        path = self.target.config.path
        if path == "delta":
            return DeltaPublisher(self.target, self.shared, rank=rank, ranks=ranks, loads=self.loads)
        if path == "disk" or not self.loads:
            return DiskPublisher(self.target, self.shared, rank=rank, ranks=ranks, loads=self.loads)
        if path == "reshard":
            return Member(self.target, rank=rank, ranks=ranks) if rank else ReshardPublisher(self.target, ranks=ranks)
        if path == "tensor" and self.target.handles is None and rank == 0:
            _log.warning(
                "publish.path = 'tensor' sends the weights within requests, %d times for each server, because not "
                "every server is known to share this host (%s): 'distributed' and 'disk' send them once",
                self.target.tp_size,
                ", ".join(self.target.urls),
            )
        if path == "distributed":
            return SourcesPublisher(self.target, rank=rank)
        return TensorPublisher(self.target, send=rank == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWriter:
    """A `WeightPublisher` that writes a Hugging Face directory. Calling it returns a copy for one rank."""

    out: Path
    hf_config: dict[str, Any]
    spec: QuantSpec | None
    copy_from: Path
    send: bool = False
    every_rank: bool = False  # as in WeightPublisher

    def __call__(self, rank: int, ranks: int) -> CheckpointWriter:
        return CheckpointWriter(
            out=self.out.resolve(),
            hf_config=self.hf_config,
            spec=self.spec,
            copy_from=self.copy_from.resolve(),
            send=rank == 0,
        )

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Every rank drains the stream; the sending rank encodes it and writes it."""
        return publish_stream(weights, version=version, send=self._write if self.send else None)

    def _write(self, stream: Iterator[NamedTensor]) -> Sent:
        # copies: the files are written from arrays, and memory of the trainer that an array shares cannot be freed
        own = (NamedTensor(name, tensor.clone()) for name, tensor in stream)
        return Sent(write_hf(self.out, quantize_stream(own, self.spec), self.hf_config, copy_from=self.copy_from))

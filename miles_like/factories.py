"""Picklable recipes for what runs inside a worker process: a trainer rank, a publisher, a rollout server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_bridge.config import TrainerConfig
from miles_like.hf_checkpoint import write_hf
from miles_like.protocols import LossFn, RankTrainer, WeightPublisher
from miles_like.types import NamedTensor, PublishReport
from quant.spec import QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig, RolloutConfig
from rollout.disk_publisher import DiskPublisher
from rollout.publisher import TensorPublisher
from rollout.server_key import ServerKey
from rollout.servers import ServerHandle, launch_embedded, launch_sglang


@dataclass(frozen=True, slots=True)
class MegatronFactory:
    """One Megatron rank with the weights of a torch_dist directory."""

    config: TrainerConfig
    weights: Path
    loss: LossFn
    # of a collective: longer than the driver waits for ranks, so that their stacks show where they hang
    collective_timeout_s: float = 3600.0

    def __call__(self, rank: int, world: int, host: str, port: int) -> RankTrainer:
        # megatron is imported where it runs: its CPU shims have no place in the driver
        from megatron_bridge.trainer import MegatronTrainer

        trainer = MegatronTrainer(
            self.config,
            rank=rank,
            world_size=world,
            master_addr=host,
            master_port=port,
            loss=self.loss,
            timeout_s=self.collective_timeout_s,
        )
        trainer.load_weights(self.weights.resolve())
        return trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherRecipe:
    """Publish to running servers."""

    urls: tuple[str, ...]
    kind: Literal["embedded", "sglang"]
    spec: QuantSpec | None
    config: PublishConfig
    fused: tuple[tuple[str, ...], ...]  # tensors that one request holds together, of the model's family
    tp_size: int
    timeout_s: float
    directory: Path  # of the disk path
    hf_config: dict[str, Any]
    copy_from: Path
    key: ServerKey | None = None

    def __call__(self, send: bool) -> WeightPublisher:
        if self.config.path == "disk":  # servers load a directory in one call, so nothing is divided
            return DiskPublisher(
                self.urls,
                directory=self.directory,
                hf_config=self.hf_config,
                copy_from=self.copy_from,
                spec=self.spec,
                config=self.config,
                send=send,
                timeout_s=self.timeout_s,
                key=self.key,
            )
        return TensorPublisher(
            self.urls,
            kind=self.kind,
            spec=self.spec,
            config=self.config,
            send=send,
            fused=self.fused,
            tp_size=self.tp_size,
            timeout_s=self.timeout_s,
            key=self.key,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWriter:
    """A `WeightPublisher` whose public is a Hugging Face directory; also the recipe for itself."""

    out: Path
    hf_config: dict[str, Any]
    spec: QuantSpec | None
    copy_from: Path
    send: bool = False

    def __call__(self, send: bool) -> CheckpointWriter:
        return CheckpointWriter(
            out=self.out.resolve(),
            hf_config=self.hf_config,
            spec=self.spec,
            copy_from=self.copy_from.resolve(),
            send=send,
        )

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Every rank drains the stream; the sending one writes it, encoded."""
        stream, nbytes = iter(weights), 0
        try:
            if self.send:
                nbytes = write_hf(
                    self.out, quantize_stream(stream, self.spec), self.hf_config, copy_from=self.copy_from
                )
        finally:
            for _ in stream:  # the other ranks wait in its collectives, even when writing has failed
                pass
        return PublishReport(version=version, bytes=nbytes, seconds=0.0, pause_seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecipe:
    """Start one rollout server (or one node's part of it) and wait until it answers."""

    model_path: Path
    config: RolloutConfig
    port: int | None
    log_dir: Path
    weight_version: int
    node_rank: int = 0
    nnodes: int = 1
    activations: str = "none"  # "fp8": the embedded engine rounds the inputs of quantized linears, as the trainer does
    exact: tuple[int, int] | None = None  # tensor- and expert-tensor-parallel ranks of a deterministic trainer
    key: ServerKey | None = None  # which it asks for
    bucket_bytes: int = PublishConfig().bucket_bytes  # of tensors that the run publishes in one request
    routed_experts: bool = True  # a model without experts has none to return, and stock SGLang then dies of the flag

    def __call__(self, host: str, dist_init_addr: str | None) -> ServerHandle:
        if self.config.engine == "embedded":
            return launch_embedded(
                self.model_path,
                self.config,
                host=host,
                port=self.port,
                log_dir=self.log_dir,
                weight_version=self.weight_version,
                activations=self.activations,
                exact=self.exact,
                return_routed_experts=self.routed_experts,
                bucket_bytes=self.bucket_bytes,
                key=self.key,
            )
        return launch_sglang(
            self.model_path,
            self.config,
            port=self.port,
            log_dir=self.log_dir,
            host=host,
            node_rank=self.node_rank,
            nnodes=self.nnodes,
            return_routed_experts=self.routed_experts,
            dist_init_addr=dist_init_addr,
            weight_version=self.weight_version,
            key=self.key,
        )

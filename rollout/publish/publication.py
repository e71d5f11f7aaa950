"""One publication of the trainer's weights as every trainer rank takes part in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from miles_like.protocols import Fencing
from miles_like.types import NamedTensor, PublishReport, ServerFault
from quant.spec import QuantSpec
from rollout.config import PublishConfig
from rollout.publish.buckets import Fused
from rollout.server_key import ServerKey

RankChecksums: TypeAlias = tuple[Mapping[str, str], ...]  # for each rank of a server: tensor name -> hash


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    """Running servers and how weights are sent to them. Raises ValueError without a server."""

    urls: tuple[str, ...]
    kind: Literal["embedded", "sglang", "vllm"]
    spec: QuantSpec | None  # quantization of the servers' checkpoint; None: the stream is published unchanged
    config: PublishConfig
    fused: Fused = ()  # tensors that one request must hold together, of the model's family (`buckets`)
    tp_size: int = 1  # tensor-parallel ranks of a stock server
    # of which memory the servers open handles: those on the host of trainer rank 0; None: tensors within requests
    handles: Literal["memory", "cuda"] | None = None
    backend: Literal["gloo", "nccl"] = "gloo"  # of the group with the servers' ranks; nccl: all have GPUs
    timeout_s: float = 600.0  # of a request
    key: ServerKey | None = None  # of the servers
    # servers that fail are left out, and the report names them; False: the publication fails with the first
    goes_on: bool = False
    joins: bool = False  # the servers join at a version that others serve
    fence: Fencing | None = None  # the epoch of the run, which each request carries; None: it has none

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("no servers to publish to: rollout.servers must be at least 1")

    def check_epoch(self) -> None:
        """Call before files are written for the servers. Raises as `Fencing.check`."""
        if self.fence is not None:
            self.fence.check()


class Sent(NamedTuple):
    """The report of the sending rank. The fields are those of PublishReport."""

    bytes: int
    pause_seconds: float = 0.0
    checksums: RankChecksums = ()
    failed: tuple[ServerFault, ...] = ()
    whole_bytes: int | None = None
    directory: Path | None = None
    decoding: float | None = None


def publish_stream(
    weights: Iterable[NamedTensor], *, version: int, send: Callable[[Iterator[NamedTensor]], Sent] | None
) -> PublishReport:
    """Call `send` with the stream on the sending rank (None on the others), then exhaust the stream, also after an
    error.

    Producing a tensor is a collective of all trainer ranks: a rank that stopped early would block the others. Raises
    what `send` raises.
    """
    began = time.perf_counter()
    stream = iter(weights)
    sent = Sent(0)
    try:
        if send is not None:
            sent = send(stream)
    finally:
        for _ in stream:
            pass
    return PublishReport(
        version=version,
        bytes=sent.bytes,
        seconds=time.perf_counter() - began,
        pause_seconds=sent.pause_seconds,
        checksums=sent.checksums,
        failed=sent.failed,
        whole_bytes=sent.whole_bytes,
        directory=sent.directory,
        decoding=sent.decoding,
    )

"""One publication of the trainer's weights as every trainer rank takes part in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from miles_like.types import NamedTensor, PublishReport

RankChecksums: TypeAlias = tuple[Mapping[str, str], ...]  # for each rank of a server: tensor name -> hash


class Sent(NamedTuple):
    """The report of the sending rank. The fields are those of PublishReport."""

    bytes: int
    pause_seconds: float = 0.0
    checksums: RankChecksums = ()


def publish_stream(
    weights: Iterable[NamedTensor], *, version: int, send: Callable[[Iterator[NamedTensor]], Sent] | None
) -> PublishReport:
    """Call `send` (None on all ranks but one) with the stream, then exhaust the stream, also after an error.

    Producing a tensor is a collective of all trainer ranks: a rank that stopped early would block the others.
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
    )

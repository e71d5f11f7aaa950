"""Publish what changed since the version that the servers hold, through a directory that trainer and servers share.

Every rank keeps the encoded tensors that it published last and writes the differences of its share. Rank 0 decides
whether there is a version to take differences against and announces it in a file, which the others read once they have
a tensor of the stream: it is there then. Otherwise the publication is that of `DiskPublisher`, whole.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor
from quant.stream import quantize_stream
from rollout.publish.directory.differences import DifferenceLoads
from rollout.publish.directory.disk_publisher import POLL_S, DiskPublisher, SharedDirectory
from rollout.publish.directory.encoded_weights import EncodedWeights
from rollout.publish.directory.shares import Shares
from rollout.publish.publication import PublishTarget, Sent
from rollout.publish.servers import states_of
from rollout.wire.deltas import DeltaConfig


class DeltaPublisher(DiskPublisher, DifferenceLoads):
    """WeightPublisher that sends differences to servers of the embedded engine.

    The servers read, apply and check them while they generate; the pause is that of replacing the weights. If one of
    them refuses, all stay at the old version, and the next publication is whole. Without `loads` differences are
    against the version that was written last, until they have as many bytes as the whole weights.
    """

    def __init__(
        self, target: PublishTarget, shared: SharedDirectory, *, rank: int = 0, ranks: int = 1, loads: bool = True
    ) -> None:
        """As `DiskPublisher`."""
        super().__init__(target, shared, rank=rank, ranks=ranks, loads=loads)
        self.base = EncodedWeights()
        # of rank 0: the version that all servers have acknowledged (without `loads`: that was written last), and their
        # states then
        self._acknowledged: int | None = None
        self._since = 0  # bytes of the differences that were written since the last whole version
        self._states: list[tuple[str, str, bool]] = []
        self._whole_bytes: int | None = None

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        self._target.check_epoch()
        if not self._rank:
            self._announce(version)
        first = next(stream, None)  # every rank has begun
        against, stream = self._announced(version), itertools.chain([] if first is None else [first], stream)
        self._acknowledged = None
        if against is None:
            self.base.clear()
            sent = super()._send(stream, version)
            self._whole_bytes, self._since = sent.bytes, 0
        else:
            sent = self._send_differences(stream, version, against)
        self.base.version = version if self.base.nbytes else None  # none: servers that join loaded what was there
        if not self._rank and not sent.failed:
            self._acknowledged = version
            self._states = states_of(self._target, version) if self._loads else []
        return sent._replace(whole_bytes=self._whole_bytes)

    # ---- the version that differences are taken against

    def _announce(self, version: int) -> None:
        """For the other ranks, before they have a tensor of the stream."""
        against = self._acknowledged
        if self._loads:
            kept = bool(self._states) and states_of(self._target) == self._states
        else:
            kept = self._whole_bytes is not None and self._since < self._whole_bytes
        against = against if kept else None
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob("*.against"):
            left.unlink(missing_ok=True)
        unfinished = self._announcement(version).with_suffix(".partial")
        unfinished.write_text(json.dumps(against))
        unfinished.replace(self._announcement(version))

    def _announced(self, version: int) -> int | None:
        """Raises RuntimeError where the announcement does not come."""
        path, limit = self._announcement(version), self._target.config.parts_timeout_s
        deadline = time.monotonic() + limit
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{path} of trainer rank 0 does not exist on this rank after {limit:g} s "
                    "(publish.parts_timeout_s): use a directory that all ranks share. Nothing was sent"
                )
            time.sleep(POLL_S)
        against: int | None = json.loads(path.read_text())
        return against

    def _announcement(self, version: int) -> Path:
        return self._directory / f"difference_{version}.against"

    # ---- whole tensors and differences

    def _encoded(self, own: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in super()._encoded(own):
            self.base.hold(name, tensor)
            yield NamedTensor(name, tensor)

    def _send_differences(self, stream: Iterator[NamedTensor], version: int, against: int) -> Sent:
        path = self._directory / f"difference_{version}"
        parts = [path.with_name(f"{path.name}.part{i}") for i in range(self._ranks)]
        for left in (parts[self._rank], *([] if self._rank else [path])):
            shutil.rmtree(left, ignore_errors=True)
        if not self._rank and self._loads:
            self.check_versions(version)  # the others have been given the version to take differences against
        shares = Shares(self._ranks, self._target.spec)
        own = shares.of(self._rank, stream)
        if self.base.version != against:  # this rank's part of an earlier publication was not acknowledged
            self.base.clear()
        self.base.version = None
        config = DeltaConfig(base=str(against), version=str(version))
        nbytes = write_hf(parts[self._rank], self._differences(own), config.to_json())
        if self._rank:
            return Sent(nbytes)
        self._wait_for(parts)
        self._check_parts(parts)
        nbytes = join_parts(parts, path)
        shares.check_names(HFCheckpoint(path))
        self._since += nbytes
        if not self._loads:
            return Sent(nbytes, directory=path)
        sent = self.load_difference(path, version, against)
        for other in self._directory.glob("difference_*"):
            if other != path and other.is_dir():
                shutil.rmtree(other)
        return sent._replace(bytes=nbytes)

    def _differences(self, own: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in quantize_stream(own, self._target.spec):
            payload = self.base.advance(name, tensor).payload
            yield NamedTensor(name, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

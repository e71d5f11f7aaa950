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
from rollout.publish.directory.disk_publisher import POLL_S, DiskPublisher, SharedDirectory
from rollout.publish.directory.encoded_weights import EncodedWeights
from rollout.publish.directory.shares import Shares
from rollout.publish.publication import PublishTarget, Sent
from rollout.publish.publisher import compare_checksums, flush_cache
from rollout.publish.servers import ServerSet, Stage, servers_of, states_of
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseRequest, UpdateFromDisk
from rollout.wire.deltas import DELTA, DeltaConfig


class DeltaPublisher(DiskPublisher):
    """WeightPublisher that sends differences to servers of the embedded engine.

    The servers read, apply and check them while they generate; the pause is that of replacing the weights. If one of
    them refuses, all stay at the old version, and the next publication is whole.
    """

    def __init__(self, target: PublishTarget, shared: SharedDirectory, *, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(target, shared, rank=rank, ranks=ranks)
        self.base = EncodedWeights()
        # of rank 0: the version that all servers have acknowledged, and their states then
        self._acknowledged: int | None = None
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
            self._whole_bytes = sent.bytes
        else:
            sent = self._send_differences(stream, version, against)
        self.base.version = version if self.base.nbytes else None  # none: servers that join loaded what was there
        if not self._rank and not sent.failed:
            self._acknowledged, self._states = version, states_of(self._target, version)
        return sent._replace(whole_bytes=self._whole_bytes)

    # ---- the version that differences are taken against

    def _announce(self, version: int) -> None:
        """For the other ranks, before they have a tensor of the stream."""
        against = self._acknowledged
        if against is not None and (not self._states or states_of(self._target) != self._states):
            against = None
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
        if not self._rank:
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
        sent = self._load_differences(path, version, against)
        self._served = None  # no directory has all tensors of what is served
        for other in self._directory.glob("difference_*"):
            if other != path and other.is_dir():
                shutil.rmtree(other)
        return sent._replace(bytes=nbytes)

    def _differences(self, own: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in quantize_stream(own, self._target.spec):
            payload = self.base.advance(name, tensor).payload
            yield NamedTensor(name, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _load_differences(self, path: Path, version: int, against: int) -> Sent:
        """Have the servers read and check the differences, and then replace their weights. Raises RuntimeError."""
        servers = servers_of(self._target)
        request = UpdateFromDisk(
            model_path=str(path),
            load_format=DELTA,
            prepare=True,
            flush_cache=False,
            weight_version=str(version),
            keep_pause=True,
        )
        self._stage = Stage.ASKED
        try:
            self._prepare(servers, request)
            began, self._stage = time.perf_counter(), Stage.PAUSED
            servers.ask(endpoints.PAUSE, PauseRequest(mode=self._mode).to_json())
            self._stage = Stage.BEGUN
            servers.change(endpoints.UPDATE_FROM_DISK, request.model_copy(update={"prepare": False}).to_json())
            self._stage = Stage.CHANGED
            flush_cache(servers, self._mode)
            checksums = compare_checksums(servers, None) if self._target.config.verify else ()
            servers.ask(endpoints.CONTINUE, {})
        except RolloutError as e:
            asked = f"All servers still serve version {against}; publish again, which sends all weights"
            state = asked if self._stage is Stage.ASKED else self._give_up(servers)
            raise RuntimeError(f"weights of version {version} were not published: {e}. {state}") from e
        finally:
            servers.close()
        return Sent(0, time.perf_counter() - began, checksums, servers.lost)

    def _prepare(self, servers: ServerSet, request: UpdateFromDisk) -> None:
        servers.change(endpoints.UPDATE_FROM_DISK, request.to_json())

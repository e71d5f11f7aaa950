"""Publish weights through a directory that trainer and servers share: written once, read by each server.

Every trainer rank encodes and writes a part of the weights. Rank 0 waits for the parts, outside of collectives, joins
them by renaming files, and lets the servers load.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import HFCheckpoint, read_config, write_hf
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.stream import quantize_stream
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.publish.publisher import compare_checksums, flush_cache
from rollout.publish.servers import (
    OLD_SERVED,
    Held,
    ServerSet,
    Stage,
    check_versions,
    held_by,
    serve_again,
    servers_of,
)
from rollout.publish.shares import Shares
from rollout.publish.vllm_reload import reload_weights
from rollout.sglang.client import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseMode, PauseRequest, UpdateFromDisk

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDirectory:
    """A directory that trainer and servers share: parent of the directories `version_N`."""

    path: Path
    hf_config: dict[str, Any]  # the model's config.json; its quantization_config is written for the target's spec
    copy_from: Path | None  # the model's directory, whose other files are copied


class DiskPublisher:
    """WeightPublisher over a directory that servers load. They generate while it is written.

    The previous version's directory is removed only when all servers have loaded the new one, because servers may read
    lazily. Servers that join load the directory that the others have loaded. Servers load the directory in one call, so
    tp_size and fused do not matter.
    """

    every_rank = True

    def __init__(self, target: PublishTarget, shared: SharedDirectory, *, rank: int = 0, ranks: int = 1) -> None:
        """rank, ranks: of the trainer; each has a publisher."""
        self._target, self._copy_from, self._rank, self._ranks = target, shared.copy_from, rank, ranks
        self._directory = shared.path.resolve()
        hf, spec = shared.hf_config, target.spec
        same = "quantization_config" in hf and spec_from_hf(hf) == spec
        self._hf_config = hf if same else quantized_config(hf, spec)
        self._mode = PauseMode(target.config.pause_mode)
        self._stage = Stage.ASKED
        self._served: tuple[Path, int] | None = None  # what all servers have loaded last, and its version
        self._before: dict[str, Held] = {}  # URL -> what a server held, where that is not known from `_served`

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError, OSError (disk full) or RuntimeError."""
        return publish_stream(weights, version=version, send=partial(self._send, version=version))

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        if not self._rank:
            self._check_versions(version)
        there = self._written(version)
        if self._target.joins and there:
            return Sent(0) if self._rank else self._load(HFCheckpoint(there[-1]), version)
        parts = [self._directory / f"version_{version}.part{i}" for i in range(self._ranks)]
        # left by a run that was killed; no rank gets a tensor of the stream, and rank 0 no part, before all are here
        shutil.rmtree(parts[self._rank], ignore_errors=True)
        shares = Shares(self._ranks, self._target.spec)
        nbytes = self._write(parts[self._rank], shares.of(self._rank, stream))
        if self._rank:
            return Sent(nbytes)
        self._wait_for(parts)
        # servers may still read what was published of this version before
        path = self._directory / f"version_{version}{f'.{_number(there[-1]) + 1}' if there else ''}"
        try:
            self._check_parts(parts)
            join_parts(parts, path)
            shares.check_whole(written := HFCheckpoint(path))
        except ValueError as e:  # a file that is not what its rank wrote
            raise RuntimeError(
                f"weights of version {version} were not published: {e}; the disk of {self._directory} has lost data. "
                "The servers still serve the version before"
            ) from e
        sent = self._load(written, version)
        for other in self._directory.glob("version_*"):
            if other != path:
                shutil.rmtree(other)
        return sent

    @staticmethod
    def _check_parts(parts: Sequence[Path]) -> None:
        """Raises RuntimeError for parts of different kinds."""
        if len({json.dumps(read_config(part), sort_keys=True) for part in parts}) > 1:
            raise RuntimeError(
                f"the parts of {len(parts)} trainer ranks in {parts[0].parent} have different configurations, which is "
                "a fault of this program. Nothing was sent"
            )

    def _check_versions(self, version: int) -> None:
        """Raises RuntimeError as `check_versions`, before a file is written."""
        servers = servers_of(self._target)
        try:
            check_versions(servers, version, kind=self._target.kind)
        except RolloutError as e:
            raise RuntimeError(f"weights of version {version} were not published: {e}. {OLD_SERVED}") from e
        finally:
            servers.close()

    def _written(self, version: int) -> list[Path]:
        """The complete directories of a version, in the order in which they were written."""
        found = [self._directory / f"version_{version}", *self._directory.glob(f"version_{version}.*")]
        return sorted((p for p in found if p.is_dir() and ".part" not in p.name), key=_number)

    def _write(self, part: Path, own: Iterator[NamedTensor]) -> int:
        """Write this rank's weights, encoded; returns their bytes."""
        encoded = self._encoded(own)
        return write_hf(part, encoded, self._hf_config, copy_from=None if self._rank else self._copy_from)

    def _encoded(self, own: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Copies: a CPU tensor whose memory numpy has seen cannot be released by a trainer that sleeps."""
        for name, tensor in quantize_stream(own, self._target.spec):
            yield NamedTensor(name, tensor.clone() if tensor.device.type == "cpu" else tensor)

    def _wait_for(self, parts: Sequence[Path]) -> None:
        """A part has its name once it is on disk. Raises RuntimeError naming the ranks whose parts are missing."""
        limit = self._target.config.parts_timeout_s
        deadline = time.monotonic() + limit
        while missing := [i for i, part in enumerate(parts) if not part.exists()]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise RuntimeError(
                    f"the weights of trainer ranks {ranks} are not in {self._directory} {limit:g} s after those of "
                    "rank 0 (publish.parts_timeout_s): every rank must see this directory, and its disk must be fast "
                    "enough. The servers still serve the version before"
                )
            time.sleep(POLL_S)

    def _load(self, written: HFCheckpoint, version: int) -> Sent:
        load = reload_weights if self._target.kind == "vllm" else _update_from_disk
        verify = self._target.config.verify
        asks = self._served is None and self._target.kind == "embedded" and not self._target.goes_on
        self._before = held_by(self._target) if asks else {}
        servers, self._stage = servers_of(self._target), Stage.PAUSED
        try:
            began = time.perf_counter()
            checksums = load(servers, written.path, version, mode=self._mode, verify=verify, reached=self._reached)
        except RolloutError as e:
            raise RuntimeError(f"weights of version {version} were not published: {e}. {self._give_up(servers)}") from e
        finally:
            servers.close()
        self._served, self._before = (written.path, version), {}
        return Sent(written.nbytes, time.perf_counter() - began, checksums, servers.lost)

    def _reached(self, stage: Stage) -> None:
        self._stage = stage

    def _give_up(self, servers: ServerSet) -> str:
        """Returns what the servers do now. An embedded server that refuses a directory has changed nothing, and those
        that have loaded it load the one before; a stock one may have read half of it."""
        same = [fault.url for fault in servers.lost if fault.answers]
        match self._stage:
            case Stage.PAUSED:
                serve_again(self._target.urls, self._target, None)
                return OLD_SERVED
            case Stage.BEGUN if self._target.kind == "embedded" and self._load_before(servers.urls):
                serve_again([*servers.urls, *same], self._target, None)
                return OLD_SERVED
        return (
            "The servers stay paused because they may hold different versions: restart them, or restart the run with "
            "--resume"
        )

    def _load_before(self, urls: Sequence[str]) -> bool:
        """Whether all of `urls`, which are paused, hold what they served before this publication. Of servers that this
        process had not published to, it was not necessarily all of the directory that they name: hashes decide."""
        if not urls:
            return True
        before = [self._before.get(url) for url in urls]
        if self._served is not None:
            bodies = [_from(*self._served)] * len(urls)
        else:
            bodies = [_from(held.path, held.version) for held in before if held is not None]
        if len(bodies) < len(urls):
            return False
        servers = ServerSet(urls, self._target.timeout_s, self._target.key)
        try:
            servers.change_each(endpoints.UPDATE_FROM_DISK, bodies)
            sums = [reply.per_engine_checksum for reply in servers.checksums()]
        except RolloutError:
            return False
        finally:
            servers.close()
        return all(held is None or held.checksum == found for held, found in zip(before, sums, strict=True))


def _update_from_disk(
    servers: ServerSet, path: Path, version: int, *, mode: PauseMode, verify: bool, reached: Callable[[Stage], None]
) -> RankChecksums:
    """Over /update_weights_from_disk of SGLang and the embedded engine; arguments as those of `reload_weights`."""
    servers.ask(endpoints.PAUSE, PauseRequest(mode=mode).to_json())
    reached(Stage.BEGUN)
    servers.change(endpoints.UPDATE_FROM_DISK, _from(path, version))
    reached(Stage.CHANGED)
    flush_cache(servers, mode)
    checksums = compare_checksums(servers, None) if verify else ()
    servers.ask(endpoints.CONTINUE, {})
    return checksums


def _from(path: Path | str, version: int | str) -> dict[str, Any]:
    return UpdateFromDisk(
        model_path=str(path), flush_cache=False, weight_version=str(version), keep_pause=True
    ).to_json()


def _number(path: Path) -> int:
    """Of the directories of one version: 0 for the first."""
    return int(path.suffix[1:] or 0)

"""Publish weights through a directory that trainer and servers share: written once, read by each server.

Every trainer rank encodes and writes a part of the weights. Rank 0 waits for the parts, outside of collectives, joins
them by renaming files, and lets the servers load.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.stream import quantize_stream
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.publish.publisher import compare_checksums, flush_cache
from rollout.publish.servers import servers_of
from rollout.publish.shares import Shares
from rollout.sglang.client import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseMode, PauseRequest, UpdateFromDisk

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDirectory:
    """A directory that trainer and servers share: parent of the directories `version_N`."""

    path: Path
    hf_config: dict[str, Any]  # the model's config.json; its quantization_config is written for the target's spec
    copy_from: Path | None  # the model's directory, whose other files are copied


class DiskPublisher:
    """WeightPublisher over /update_weights_from_disk. The servers generate while the directory is written.

    The previous version's directory is removed only when all servers have loaded the new one, because servers may read
    lazily. Servers load the directory in one call, so tp_size and fused do not matter.
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
        self._served: Path | None = None  # the directory that the servers have loaded

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError, OSError (disk full) or RuntimeError."""
        return publish_stream(weights, version=version, send=partial(self._send, version=version))

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        path = self._directory / f"version_{version}"
        if path == self._served:  # published once more: servers may still read it
            path = path.with_name(path.name + ".again")
        parts = [self._directory / f"version_{version}.part{i}" for i in range(self._ranks)]
        # left by a run that was killed; no rank gets a tensor of the stream, and rank 0 no part, before all are here
        for left in (parts[self._rank], *([] if self._rank else [path])):
            shutil.rmtree(left, ignore_errors=True)
        shares = Shares(self._ranks, self._target.spec)
        nbytes = self._write(parts[self._rank], shares.of(self._rank, stream))
        if self._rank:
            return Sent(nbytes)
        self._wait_for(parts)
        nbytes = join_parts(parts, path)
        shares.check_whole(HFCheckpoint(path).names())
        pause_seconds, checksums = self._load(path, version)
        self._served = path
        for other in self._directory.glob("version_*"):
            if other != path:
                shutil.rmtree(other)
        return Sent(nbytes, pause_seconds, checksums)

    def _write(self, part: Path, own: Iterator[NamedTensor]) -> int:
        """Write this rank's weights, encoded; returns their bytes."""
        # copies: a CPU tensor whose memory numpy has seen cannot be released by a trainer that sleeps
        encoded = (
            NamedTensor(name, x.clone() if x.device.type == "cpu" else x)
            for name, x in quantize_stream(own, self._target.spec)
        )
        return write_hf(part, encoded, self._hf_config, copy_from=None if self._rank else self._copy_from)

    def _wait_for(self, parts: Sequence[Path]) -> None:
        """A part has its name once it is on disk. Raises RuntimeError naming the ranks whose parts are missing."""
        deadline = time.monotonic() + self._target.timeout_s
        while missing := [i for i, part in enumerate(parts) if not part.exists()]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise RuntimeError(
                    f"the weights of trainer ranks {ranks} are not in {self._directory} after "
                    f"{self._target.timeout_s:g} s (rollout.request_timeout_s): every rank must see this directory, "
                    "and its disk must be fast enough. The servers still serve the version before"
                )
            time.sleep(_POLL_S)

    def _load(self, path: Path, version: int) -> tuple[float, RankChecksums]:
        checksums: RankChecksums = ()
        servers = servers_of(self._target)
        began = time.perf_counter()
        try:
            servers.ask(endpoints.PAUSE, PauseRequest(mode=self._mode).to_json())
            request = UpdateFromDisk(
                model_path=str(path), flush_cache=False, weight_version=str(version), keep_pause=True
            )
            servers.change(endpoints.UPDATE_FROM_DISK, request.to_json())
            flush_cache(servers, self._mode)
            if self._target.config.verify:
                checksums = compare_checksums(servers, None)
            servers.ask(endpoints.CONTINUE, {})
        except RolloutError as e:
            raise RuntimeError(
                f"weights of version {version} were not published: {e}. The servers stay paused because they may hold "
                "different versions: restart them, or restart the run with --resume"
            ) from e
        finally:
            servers.close()
        return time.perf_counter() - began, checksums

"""Publish weights through a directory that trainer and servers share: written once, read by each server.

Every trainer rank encodes and writes a part of the weights. Rank 0 waits for the parts, outside of collectives, joins
them by renaming files, and lets the servers load.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import HFCheckpoint, read_config, write_hf
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.stream import quantize_stream
from rollout.publish.directory.loads import DirectoryLoads, number_of
from rollout.publish.directory.shares import Shares
from rollout.publish.publication import PublishTarget, Sent, publish_stream

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDirectory:
    """A directory that trainer and servers share: parent of the directories `version_N`."""

    path: Path
    hf_config: dict[str, Any]  # the model's config.json; its quantization_config is written for the target's spec
    copy_from: Path | None  # the model's directory, whose other files are copied


class DiskPublisher(DirectoryLoads):
    """WeightPublisher over a directory that servers load. They generate while it is written.

    The previous version's directory is removed only when all servers have loaded the new one, because servers may read
    lazily. Servers that join load the directory that the others have loaded.
    """

    every_rank = True

    def __init__(
        self, target: PublishTarget, shared: SharedDirectory, *, rank: int = 0, ranks: int = 1, loads: bool = True
    ) -> None:
        """rank, ranks: of the trainer; each has a publisher. loads: whether rank 0 lets the servers load what is
        written; else its report names the directory, for `DirectoryLoads` of another process."""
        super().__init__(target, shared.path)
        self._copy_from, self._rank, self._ranks, self._loads = shared.copy_from, rank, ranks, loads
        hf, spec = shared.hf_config, target.spec
        same = "quantization_config" in hf and spec_from_hf(hf) == spec
        self._hf_config = hf if same else quantized_config(hf, spec)

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError, OSError (disk full) or RuntimeError."""
        return publish_stream(weights, version=version, send=partial(self._send, version=version))

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        self._target.check_epoch()
        if not self._rank and self._loads:
            self.check_versions(version)
        there = self._written(version)
        if self._target.joins and there:
            return Sent(0) if self._rank else self.load(there[-1], version, HFCheckpoint(there[-1]).nbytes)
        parts = [self._directory / f"version_{version}.part{i}" for i in range(self._ranks)]
        # left by a run that was killed; no rank gets a tensor of the stream, and rank 0 no part, before all are here
        shutil.rmtree(parts[self._rank], ignore_errors=True)
        shares = Shares(self._ranks, self._target.spec)
        nbytes = self._write(parts[self._rank], shares.of(self._rank, stream))
        if self._rank:
            return Sent(nbytes)
        self._wait_for(parts)
        # servers may still read what was published of this version before
        path = self._directory / f"version_{version}{f'.{number_of(there[-1]) + 1}' if there else ''}"
        nbytes = self._join(parts, path, shares, version)
        if not self._loads:
            return Sent(nbytes, directory=path)
        sent = self.load(path, version, nbytes)
        self.keep_only(path)
        return sent

    def _join(self, parts: Sequence[Path], path: Path, shares: Shares, version: int) -> int:
        """Makes `path` of the parts; returns the bytes of its tensors. Raises RuntimeError for a file that is not what
        its rank wrote."""
        self._target.check_epoch()
        try:
            self._check_parts(parts)
            join_parts(parts, path)
            shares.check_whole(written := HFCheckpoint(path))
        except ValueError as e:
            raise RuntimeError(
                f"weights of version {version} were not published: {e}; the disk of {self._directory} lost data. "
                "The servers still serve the previous version"
            ) from e
        return written.nbytes

    @staticmethod
    def _check_parts(parts: Sequence[Path]) -> None:
        """Raises RuntimeError for parts of different kinds."""
        if len({json.dumps(read_config(part), sort_keys=True) for part in parts}) > 1:
            raise RuntimeError(
                f"the parts of {len(parts)} trainer ranks in {parts[0].parent} have different configurations, "
                "which is an internal error of miles-like: please report it. Nothing was sent"
            )

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
                    f"the weights of trainer ranks {ranks} are not in {self._directory} {limit:g} s after those "
                    "of rank 0 (publish.parts_timeout_s): use a directory that all ranks share on a fast enough "
                    "disk, or raise that limit. The servers still serve the previous version"
                )
            time.sleep(POLL_S)

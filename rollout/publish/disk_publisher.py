"""Publish weights through a directory that trainer and servers share: written once, read by each server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import write_hf
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.stream import quantize_stream
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.publish.publisher import compare_checksums, flush_cache, servers_of
from rollout.sglang.client import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseMode, PauseRequest, UpdateFromDisk


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDirectory:
    """A directory that trainer and servers share: parent of the directories `version_N`."""

    path: Path
    hf_config: dict[str, Any]  # the model's config.json; its quantization_config is written for the target's spec
    copy_from: Path | None  # the model's directory, whose other files are copied


class DiskPublisher:
    """WeightPublisher over /update_weights_from_disk. The servers generate while the directory is written.

    The previous version's directory is removed only when all servers have loaded the new one, because servers may read
    lazily. send: whether this rank sends. Servers load the directory in one call, so tp_size and fused do not matter.
    """

    def __init__(self, target: PublishTarget, shared: SharedDirectory, *, send: bool) -> None:
        self._target, self._copy_from, self._is_sender = target, shared.copy_from, send
        self._directory = shared.path.resolve()
        hf, spec = shared.hf_config, target.spec
        same = "quantization_config" in hf and spec_from_hf(hf) == spec
        self._hf_config = hf if same else quantized_config(hf, spec)
        self._mode = PauseMode(target.config.pause_mode)

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError, OSError (disk full) or RuntimeError."""
        send = partial(self._send, version=version) if self._is_sender else None
        return publish_stream(weights, version=version, send=send)

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        path = self._directory / f"version_{version}"
        if path.exists():
            shutil.rmtree(path)  # left by a run that was killed after writing it
        # copies: a CPU tensor whose memory numpy has seen cannot be released by a trainer that sleeps
        encoded = (
            NamedTensor(name, x.clone() if x.device.type == "cpu" else x)
            for name, x in quantize_stream(stream, self._target.spec)
        )
        nbytes = write_hf(path, encoded, self._hf_config, copy_from=self._copy_from)
        pause_seconds, checksums = self._load(path, version)
        for other in self._directory.glob("version_*"):
            if other != path:
                shutil.rmtree(other)
        return Sent(nbytes, pause_seconds, checksums)

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

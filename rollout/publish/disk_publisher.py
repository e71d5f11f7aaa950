"""Publish weights through a directory that trainer and servers share: written once, read by each server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import write_hf
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.spec import QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.publication import RankChecksums, Sent, publish_stream
from rollout.publish.publisher import ServerSet, compare_checksums, flush_cache
from rollout.server_key import ServerKey
from rollout.sglang.client import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseMode, PauseRequest, UpdateFromDisk


class DiskPublisher:
    """WeightPublisher over /update_weights_from_disk. The servers generate while the directory is written.

    directory: parent of the directories `version_N`. The previous one is removed only when all servers have loaded the
    new one, because servers may read lazily. hf_config: the model's config.json; its quantization_config is written for
    `spec` if it differs. copy_from: the model's directory. Other arguments as in TensorPublisher.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        directory: Path,
        hf_config: dict[str, Any],
        copy_from: Path | None,
        spec: QuantSpec | None,
        config: PublishConfig,
        send: bool,
        timeout_s: float = 600.0,
        key: ServerKey | None = None,
    ) -> None:
        if not urls:
            raise ValueError("no servers to publish to: rollout.servers must be at least 1")
        self._urls = tuple(urls)
        self._directory = directory.resolve()
        same = "quantization_config" in hf_config and spec_from_hf(hf_config) == spec
        self._hf_config = hf_config if same else quantized_config(hf_config, spec)
        self._copy_from = copy_from
        self._spec = spec
        self._config = config
        self._mode = PauseMode(config.pause_mode)
        self._is_sender = send
        self._timeout_s = timeout_s
        self._key = key

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError, OSError (disk full) or RuntimeError."""
        send = partial(self._send, version=version) if self._is_sender else None
        return publish_stream(weights, version=version, send=send)

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        path = self._directory / f"version_{version}"
        if path.exists():
            shutil.rmtree(path)  # left by a run that was killed after writing it
        nbytes = write_hf(path, quantize_stream(stream, self._spec), self._hf_config, copy_from=self._copy_from)
        pause_seconds, checksums = self._load(path, version)
        for other in self._directory.glob("version_*"):
            if other != path:
                shutil.rmtree(other)
        return Sent(nbytes, pause_seconds, checksums)

    def _load(self, path: Path, version: int) -> tuple[float, RankChecksums]:
        checksums: RankChecksums = ()
        servers = ServerSet(self._urls, self._timeout_s, self._key)
        began = time.perf_counter()
        try:
            servers.ask(endpoints.PAUSE, PauseRequest(mode=self._mode).to_json())
            request = UpdateFromDisk(
                model_path=str(path), flush_cache=False, weight_version=str(version), keep_pause=True
            )
            servers.change(endpoints.UPDATE_FROM_DISK, request.to_json())
            flush_cache(servers, self._mode)
            if self._config.verify:
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

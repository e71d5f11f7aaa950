"""Publish through a directory that trainer and servers both see: written once, read by each server."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_like.hf_checkpoint import write_hf
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.spec import QuantSpec
from quant.stream import quantize_stream
from rollout import wire
from rollout.client import RolloutError
from rollout.config import PublishConfig
from rollout.publisher import Ranks, ServerSet, finish, verify
from rollout.server_key import ServerKey
from rollout.wire_control import PauseMode, UpdateFromDisk


class DiskPublisher:
    """WeightPublisher over /update_weights_from_disk. The servers generate while the directory is written.

    directory: gets `version_N`; the one before it is removed once all servers have loaded the new one, for they may
    read lazily. hf_config: the model's config.json, whose quantization_config is written as `spec` says unless it says
    so already; copy_from: its directory. Other arguments as in TensorPublisher.
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
        said = "quantization_config" in hf_config and spec_from_hf(hf_config) == spec
        self._hf_config = hf_config if said else quantized_config(hf_config, spec)
        self._copy_from = copy_from
        self._spec = spec
        self._config = config
        self._mode = PauseMode(config.pause_mode)
        self._is_sender = send
        self._timeout_s = timeout_s
        self._key = key

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError, OSError (disk full) or RuntimeError."""
        began = time.perf_counter()
        stream = iter(weights)
        nbytes, pause_s = 0, 0.0
        self._held: Ranks = ()
        try:
            if self._is_sender:
                path = self._directory / f"version_{version}"
                nbytes = self._write(stream, path)
                pause_s = self._load(path, version)
                self._remove_others(path)
        finally:
            for _ in stream:  # the other ranks wait in its collectives, even when writing has failed
                pass
        return PublishReport(
            version=version,
            bytes=nbytes,
            seconds=time.perf_counter() - began,
            pause_seconds=pause_s,
            checksums=self._held,
        )

    def _write(self, stream: Iterator[NamedTensor], path: Path) -> int:
        if path.exists():
            shutil.rmtree(path)  # of a run that was killed after writing it
        return write_hf(path, quantize_stream(stream, self._spec), self._hf_config, copy_from=self._copy_from)

    def _load(self, path: Path, version: int) -> float:
        servers = ServerSet(self._urls, self._timeout_s, self._key)
        began = time.perf_counter()
        try:
            servers.ask(wire.PAUSE, self._mode.to_json())
            request = UpdateFromDisk(
                model_path=str(path), flush_cache=False, weight_version=str(version), keep_pause=True
            )
            servers.change(wire.UPDATE_FROM_DISK, request.to_json())
            finish(servers, self._mode)
            if self._config.verify:
                self._held = verify(servers, None)
            servers.ask(wire.CONTINUE, {})
        except RolloutError as e:
            raise RuntimeError(
                f"weights of version {version} are not published: {e}. The servers are left paused, for they may hold "
                "different versions: restart them, or the run with --resume"
            ) from e
        finally:
            servers.close()
        return time.perf_counter() - began

    def _remove_others(self, path: Path) -> None:
        for other in self._directory.glob("version_*"):
            if other != path:
                shutil.rmtree(other)

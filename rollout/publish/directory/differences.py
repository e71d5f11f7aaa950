"""Let servers load a directory of differences: the part of a publication by "delta" that needs no trainer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from miles_like.hf.checkpoint import HFCheckpoint, read_config, write_hf
from miles_like.types import NamedTensor
from rollout.publish.directory.loads import DirectoryLoads
from rollout.publish.publication import Sent
from rollout.publish.publisher import compare_checksums, flush_cache
from rollout.publish.servers import ServerSet, Stage, servers_of, states_of
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseRequest, UpdateFromDisk
from rollout.wire.deltas import DELTA, Delta, DeltaConfig


class DifferenceLoads(DirectoryLoads):
    """Loads of `difference_N` directories too."""

    def load_difference(self, path: Path, version: int, against: int) -> Sent:
        """Lets the servers, which serve version `against`, read and check the differences, and then replace their
        weights. Raises RuntimeError."""
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
            servers.resume()
        except RolloutError as e:
            asked = f"All servers still serve version {against}; publish again, which sends all weights"
            state = asked if self._stage is Stage.ASKED else self._give_up(servers)
            raise RuntimeError(f"weights of version {version} were not published: {e}. {state}") from e
        finally:
            servers.close()
        self._served = None  # no directory has all tensors of what is served
        return Sent(0, time.perf_counter() - began, checksums, servers.lost, decoding=servers.decoding)

    def _prepare(self, servers: ServerSet, request: UpdateFromDisk) -> None:
        servers.change(endpoints.UPDATE_FROM_DISK, request.to_json())


class StoredDifferences(DifferenceLoads):
    """Loads of what `DeltaPublisher` has written, whole or as differences.

    Differences are kept with the whole version that they begin at, so that servers which do not serve the version
    before, as those that join, load all tensors of this one, which are then written.
    """

    def load(self, path: Path, version: int, nbytes: int) -> Sent:
        """As `DirectoryLoads.load`."""
        if not _is_difference(path):
            return super().load(path, version, nbytes)
        before = int(_config(path).base)
        if states_of(self._target, before):
            return self.load_difference(path, version, before)._replace(bytes=nbytes)
        whole = self._whole_of(version)
        if whole is None:
            whole, chain = self._directory / f"version_{version}", self._chain(path)
            write_hf(whole, _tensors(chain), read_config(chain[0]), copy_from=chain[0])
        return super().load(whole, version, HFCheckpoint(whole).nbytes)

    def keep_only(self, path: Path) -> None:
        """Removes the directories from which neither `path` nor what follows it is made."""
        whole = self._whole_of(int(_config(path).version)) if _is_difference(path) else None
        kept = self._chain(path) if whole is None else [whole, path]
        for kind in ("version_*", "difference_*"):
            for other in self._directory.glob(kind):
                if other.is_dir() and other not in kept:
                    shutil.rmtree(other)

    def _chain(self, path: Path) -> list[Path]:
        """A whole version and the differences from it to `path`, this one last."""
        chain = [path]
        while _is_difference(chain[0]):
            base = int(_config(chain[0]).base)
            chain.insert(0, self._whole_of(base) or self._directory / f"difference_{base}")
        return chain

    def _whole_of(self, version: int) -> Path | None:
        found = self._written(version)
        return found[-1] if found else None


def _is_difference(path: Path) -> bool:
    return path.name.startswith("difference_")


def _config(path: Path) -> DeltaConfig:
    return DeltaConfig.of(read_config(path), path)


def _tensors(chain: list[Path]) -> Iterator[NamedTensor]:
    """Of the last version of a chain; each is in memory with one difference."""
    whole, *differences = map(HFCheckpoint, chain)
    for name in whole.names():
        tensor = whole.read(name)
        for one in differences:
            tensor = Delta(name, one.read(name)).applied(tensor)
        yield NamedTensor(name, tensor)

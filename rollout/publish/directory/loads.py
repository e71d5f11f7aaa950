"""Let servers load a directory of weights: the part of a publication that needs no trainer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.publish.directory.vllm_reload import reload_weights
from rollout.publish.publication import PublishTarget, RankChecksums, Sent
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
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from rollout.wire.control import PauseMode, PauseRequest, UpdateFromDisk


class DirectoryLoads:
    """Loads of `version_N` directories by the servers of `target`. One thread calls at a time.

    Servers load a directory in one call, so tp_size and fused do not matter.
    """

    def __init__(self, target: PublishTarget, directory: Path) -> None:
        """directory: parent of the directories `version_N`."""
        self._target, self._directory = target, directory.resolve()
        self._mode = PauseMode(target.config.pause_mode)
        self._stage = Stage.ASKED
        self._served: tuple[Path, int] | None = None  # what all servers have loaded last, and its version
        self._before: dict[str, Held] = {}  # URL -> what a server held, where that is not known from `_served`

    def check_versions(self, version: int) -> None:
        """Raises RuntimeError as `check_versions`, before a file is written."""
        servers = servers_of(self._target)
        try:
            check_versions(servers, version, kind=self._target.kind)
        except RolloutError as e:
            raise RuntimeError(f"weights of version {version} were not published: {e}. {OLD_SERVED}") from e
        finally:
            servers.close()

    def load(self, path: Path, version: int, nbytes: int) -> Sent:
        """Lets all servers load `path`, whose tensors have `nbytes` bytes. Raises RuntimeError naming what they serve
        then."""
        load = reload_weights if self._target.kind == "vllm" else _update_from_disk
        verify = self._target.config.verify
        asks = self._served is None and self._target.kind == "embedded" and not self._target.goes_on
        self._before = held_by(self._target) if asks else {}
        servers, self._stage = servers_of(self._target), Stage.PAUSED
        try:
            began = time.perf_counter()
            checksums = load(servers, path, version, mode=self._mode, verify=verify, reached=self._reached)
        except RolloutError as e:
            raise RuntimeError(f"weights of version {version} were not published: {e}. {self._give_up(servers)}") from e
        finally:
            servers.close()
        self._served, self._before = (path, version), {}
        return Sent(nbytes, time.perf_counter() - began, checksums, servers.lost, decoding=servers.decoding)

    def keep_only(self, path: Path) -> None:
        """Removes the directories of other versions: servers may read lazily, so this waits for `load`."""
        for other in self._directory.glob("version_*"):
            if other != path:
                shutil.rmtree(other)

    def _written(self, version: int) -> list[Path]:
        """The complete directories of a version, in the order in which they were written."""
        found = [self._directory / f"version_{version}", *self._directory.glob(f"version_{version}.*")]
        return sorted((p for p in found if p.is_dir() and ".part" not in p.name), key=number_of)

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
            "The servers remain paused because they may have different versions: restart them, or restart the "
            "run with --resume"
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
        servers = ServerSet(urls, self._target.timeout_s, self._target.key, fence=self._target.fence)
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
    servers.resume()
    return checksums


def _from(path: Path | str, version: int | str) -> dict[str, Any]:
    return UpdateFromDisk(
        model_path=str(path), flush_cache=False, weight_version=str(version), keep_pause=True
    ).to_json()


def number_of(path: Path) -> int:
    """Of the directories of one version: 0 for the first."""
    return int(path.suffix[1:] or 0)

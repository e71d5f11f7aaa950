"""Saves one checkpoint: all ranks plan, copy and write their files, and rank 0 renames the directory when all are done.

Megatron plans what each rank writes and in which format; a thread does the writing. Megatron itself forks writers from
a process with many threads (gloo's, Ray's) and collects their results through a manager process. It waits forever for
a writer that dies, and since a writer inherits the sockets, peers do not notice when its rank is killed. A thread ends
with its rank, and its failure is an exception.

Every phase ends with an exchange of errors, so no rank continues after another rank's failure. A rank that waits for a
disk has no other rank in a collective: the exchange after such a phase begins when the last rank is done (`meet`), and
while files are written, ranks that are done ask the others at intervals.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.planner import SavePlan

from megatron_bridge.device.collective_errors import first_line, gather_after, gather_objects
from megatron_bridge.weights.checkpoint_sums import checksum, write_sums

BACKEND, VERSION = "torch_dist", 1
FILES_PER_RANK = 2
_POLL_S = 0.2


class CheckpointSave:
    """A save in progress. Construction and `finish` are collective; in between each rank writes its files.

    With `asynchronous` the state is copied to host memory before the constructor returns, and the weights may change
    afterwards. Without it the files are written before the constructor returns. `finish` renames the directory.
    """

    def __init__(self, path: Path, state: dict[str, Any], meet: Callable[[], None], *, asynchronous: bool) -> None:
        """meet: `StoreSignals.meet`. Raises ValueError when `path` exists or psutil is missing, RuntimeError when a
        rank fails or exits; both on every rank, without creating `path`."""
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self._first, self._meet = dist.get_rank() == 0, meet
        self._results: list[Any] = []
        self._sums: dict[str, str] = {}  # of this rank's files
        self._problem: str | None = None
        with self._whole_or_removed():
            self._on_every_rank(self._prepare)
            buckets = self._plan(state)
            if asynchronous:
                # the optimizer works in place on these very tensors
                buckets = [_with_tensors(bucket, torch.Tensor.clone) for bucket in buckets]
            self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
            self._thread.start()
            if not asynchronous:
                self._await_writers()

    def finish(self, *, wait: bool) -> bool:
        """Whether the directory has been renamed; without `wait`, False while a rank is still writing. Collective.

        Raises RuntimeError on every rank when a rank could not write or has exited.
        """
        with self._whole_or_removed():
            if wait:
                self._await_writers()
            elif any(gather_objects(self._thread.is_alive())):
                return False
            self._raise_first_problem(gather_objects(self._problem))
            results = [None] * dist.get_world_size() if self._first else None
            dist.gather_object(self._results, results, dst=0)
            sums = gather_objects(self._sums)
            self._on_every_rank(lambda: self._complete(results, sums))
        return True

    def _await_writers(self) -> None:
        """Return once every rank has written its files. A rank that is done asks the others again and again, so that it
        spends at most one such interval in a collective, however slow another rank's disk is."""
        while any(gather_objects(self._thread.is_alive())):
            self._thread.join(_POLL_S)

    def _prepare(self) -> None:
        if not filesystem_async.HAVE_PSUTIL:
            raise ValueError("saving a checkpoint needs psutil, which cannot be imported here: pip install psutil")
        if self._first:
            if self.path.exists():
                raise ValueError(f"checkpoint {self.path} exists: remove it or save under another name")
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)

    def _plan(self, state: dict[str, Any]) -> list[Any]:
        """This rank's data on the host: megatron's write buckets, one per file."""
        sharded, common = save_preprocess(state)
        self._on_every_rank(lambda: self._write_common(common))
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        # instead of the manager process that megatron starts for the results of writer processes
        filesystem_async._results_queue = queue.Queue()
        self._writer = _Writer(str(self.partial), self._meet)
        (_, self._metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(renamed, False),
            self._writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        return [_with_tensors(bucket, torch.Tensor.cpu) for bucket in self._writer.write_buckets or ()]

    def _write_common(self, common: dict[str, Any]) -> None:
        if self._first:
            with (self.partial / COMMON_STATE_FNAME).open("wb") as out:  # given a path, torch hides the OSError
                torch.save(common, out)

    def _write(self, buckets: list[Any]) -> None:
        """Write this rank's files. It makes no collective call, so it may run during training."""
        done: queue.Queue[Any] = queue.Queue()
        under_way: queue.Queue[int] = queue.Queue()
        for i, bucket in enumerate(buckets):
            under_way.put(i)
            FileSystemWriterAsync.write_preloaded_data([self._writer.transforms], i, bucket, done, under_way, True)
            _, written = done.get_nowait()
            if isinstance(written, Exception):
                self._problem = first_line(written)
                return
            self._results += written
        try:
            self._sums = {Path(file).name: checksum(Path(file)) for file, *_ in buckets}
        except OSError as e:
            self._problem = first_line(e)

    def _complete(self, results: list[Any] | None, sums: list[dict[str, str]]) -> None:
        if self._first:
            self._writer.finish(self._metadata, results)
            save_config(CheckpointingConfig(BACKEND, VERSION), str(self.partial))
            write_sums(self.partial, sums)
            self.partial.rename(self.path)

    def _on_every_rank(self, work: Callable[[], None]) -> None:
        """Run `work`, then raise on every rank if it failed on one."""
        problem: str | ValueError | None = None
        try:
            work()
        except ValueError as e:
            problem = e
        except (OSError, RuntimeError) as e:
            problem = first_line(e)
        self._raise_first_problem(gather_after(problem, self._meet))

    @staticmethod
    def _raise_first_problem(problems: Sequence[str | ValueError | None]) -> None:
        for rank, found in enumerate(problems):
            if isinstance(found, ValueError):
                raise found
            if found is not None:
                raise RuntimeError(f"rank {rank}: {found}")

    @contextmanager
    def _whole_or_removed(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # a rank failed, or exited during a collective
            if self._first:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise RuntimeError(
                f"checkpoint {self.path} was not written ({first_line(e)}); the previous one is unchanged"
            ) from e


class _Writer(FileSystemWriterAsync):  # type: ignore[misc]
    """Megatron's writer. The ranks' plans are gathered when every rank has looked at the directory."""

    def __init__(self, directory: str, meet: Callable[[], None]) -> None:
        super().__init__(directory, thread_count=FILES_PER_RANK)
        self._meet = meet

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        try:
            return super().prepare_local_plan(plan)  # type: ignore[no-any-return]
        finally:
            self._meet()


def _with_tensors(bucket: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    file, key, (objects, tensors) = bucket
    return file, key, (objects, [(item, change(tensor)) for item, tensor in tensors])

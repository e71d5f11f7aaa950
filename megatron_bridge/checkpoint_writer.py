"""One checkpoint on its way to disk: planned by all ranks, copied, written by each, named when every rank is done.

Megatron plans what each rank writes and in which format; the writing is a thread here. Megatron itself forks writers
out of a process full of threads (gloo's, Ray's) and collects their results over a manager process. A writer that dies
there is waited for without end, and as it inherits the sockets, a rank killed while it lives is not missed by its
peers. A thread dies with its rank, and its failure is an exception.

No rank goes on after another's failure: each phase ends with all ranks telling each other how it went.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Iterator
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

from megatron_bridge.agree import gather
from megatron_bridge.checkpoint_sums import checksum, write_sums

BACKEND, VERSION = "torch_dist", 1
FILES_PER_RANK = 2


class CheckpointSave:
    """A save under way: made and finished by all ranks together, written by each in between.

    With `asynchronous` the state is copied to host memory before the constructor returns, and the weights may change
    from then on. Without, it is written when the constructor returns. Either way `finish` gives the directory its name.
    """

    def __init__(self, path: Path, state: dict[str, Any], *, asynchronous: bool) -> None:
        """Raises ValueError when `path` exists or psutil is missing, RuntimeError when a rank fails or is gone; both on
        every rank, with nothing named `path` left."""
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self._first = dist.get_rank() == 0
        self._results: list[Any] = []
        self._sums: dict[str, str] = {}  # of this rank's files
        self._problem: str | None = None
        with self._whole_or_removed():
            self._together(self._prepare)
            buckets = self._plan(state)
            if asynchronous:
                # the optimizer works in place on these very tensors
                buckets = [_with_tensors(bucket, torch.Tensor.clone) for bucket in buckets]
            self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
            if asynchronous:
                self._thread.start()
            else:
                self._write(buckets)

    def finish(self, *, wait: bool) -> bool:
        """Whether the directory has its name now; without `wait`, False while a rank is still writing. Collective.

        Raises RuntimeError on every rank when one could not write or is gone.
        """
        with self._whole_or_removed():
            if wait and self._thread.ident is not None:
                self._thread.join()
            if any(gather(self._thread.is_alive())):
                return False
            self._agree(self._problem)
            results = [None] * dist.get_world_size() if self._first else None
            dist.gather_object(self._results, results, dst=0)
            sums = gather(self._sums)
            self._together(lambda: self._complete(results, sums))
        return True

    def _prepare(self) -> None:
        if not filesystem_async.HAVE_PSUTIL:
            raise ValueError("saving a checkpoint needs psutil, which cannot be imported here: pip install psutil")
        if self._first:
            if self.path.exists():
                raise ValueError(f"checkpoint {self.path} exists: remove it or save under another name")
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)

    def _plan(self, state: dict[str, Any]) -> list[Any]:
        """What this rank writes, on the host: megatron's write buckets, one a file."""
        sharded, common = save_preprocess(state)
        self._together(lambda: self._write_common(common))
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        # megatron would start a manager process for the results of writers in other processes
        filesystem_async._results_queue = queue.Queue()
        self._writer = FileSystemWriterAsync(str(self.partial), thread_count=FILES_PER_RANK)
        (_, self._metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(renamed, False),
            self._writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
        return [_with_tensors(bucket, torch.Tensor.cpu) for bucket in self._writer.write_buckets or ()]

    def _write_common(self, common: dict[str, Any]) -> None:
        if self._first:
            with (self.partial / COMMON_STATE_FNAME).open("wb") as out:  # given a path, torch hides the system's error
                torch.save(common, out)

    def _write(self, buckets: list[Any]) -> None:
        """This rank's files, to disk. No collective in here, so that it may run beside the training."""
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

    def _together(self, work: Callable[[], None]) -> None:
        """Do this rank's part; then all raise if one could not."""
        problem = None
        try:
            work()
        except ValueError as e:
            problem = e
        except (OSError, RuntimeError) as e:
            problem = first_line(e)
        self._agree(problem)

    def _agree(self, problem: str | ValueError | None) -> None:
        for rank, said in enumerate(gather(problem)):
            if isinstance(said, ValueError):
                raise said
            if said is not None:
                raise RuntimeError(f"rank {rank}: {said}")

    @contextmanager
    def _whole_or_removed(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # a rank's failure, or a collective that lost a rank
            if self._first:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise RuntimeError(
                f"checkpoint {self.path} was not written ({first_line(e)}); the one before it is as it was"
            ) from e


def _with_tensors(bucket: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    file, key, (objects, tensors) = bucket
    return file, key, (objects, [(item, change(tensor)) for item, tensor in tensors])


def first_line(error: BaseException) -> str:
    """Of what it says; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

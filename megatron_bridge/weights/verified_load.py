"""Loads a checkpoint with megatron, verifying every chunk before any of the data is used.

Stock `dist_checkpointing.load` makes the plan; its storage reader is replaced. Each rank reads only chunks that contain
its data: complete chunks, checked against the checksums, if the directory has a manifest, and otherwise only the bytes
needed. The data is staged on the host (a second copy of the rank's share of the weights) and copied into the model when
all ranks have read theirs. A byte that changed on disk, which stock loading does not detect, a truncated file or a
manifest that does not match raises the same error on every rank and leaves the model unchanged.

Ranks read at different speeds. Each collective after a read is opened when the last rank has read: `meet`, which is
`StoreSignals.meet`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron_bridge.convert.directory.torch_archive import reencoded
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.device.collective_errors import gather_after


def open_verified(path: Path, meet: Callable[[], None]) -> TorchDist:
    """Open a `torch_dist` directory and check its metadata against its manifest on every rank. Collective.

    Raises ValueError on every rank when the check fails on one.
    """
    source, problem = None, None
    try:
        source = TorchDist(path)
        _check_beside(source)
    except (ValueError, OSError) as e:
        problem = str(e)
    _raise_on_every_rank(problem, meet)
    assert source is not None
    return source


def load_verified(state: dict[str, Any], source: TorchDist, meet: Callable[[], None]) -> dict[str, Any]:
    """The result of `dist_checkpointing.load` for the sharded `state`; `source` counts the bytes of data files that
    this rank reads. Collective.

    Raises ValueError on every rank, with the tensors of `state` unchanged, when a rank reads data that is damaged or
    differs from the directory's manifest; otherwise as stock loading when the checkpoint does not fit `state`.
    """
    try:
        strategies = _Strategy(_Reader(source, meet)), _Common(meet)
        return dist_checkpointing.load(state, str(source.path), *strategies)  # type: ignore[no-any-return]
    except CheckpointException as e:
        for error, _ in e.failures.values():
            if isinstance(error, _Damaged):
                raise ValueError(str(error)) from None
        raise
    finally:
        source.close()


def _check_beside(source: TorchDist) -> None:
    """Raise ValueError when a small file that stock loading also reads differs from the one in the manifest."""
    for name in ("common.pt", "metadata.json"):
        file, facts = source.path / name, source.manifest.files if source.manifest is not None else {}
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if found is None or (facts and (name not in facts or found != facts[name].sha256)):
            listed = "differs from the file that its manifest lists" if found else "is missing"
            raise ValueError(f"{file} {listed}: copy or convert the checkpoint again")


class _Damaged(ValueError):
    """The data read is damaged; the message is the same on every rank."""


def _raise_on_every_rank(problem: str | None, meet: Callable[[], None]) -> None:
    problems = [found for found in gather_after(problem, meet) if found is not None]
    if problems:
        raise _Damaged(problems[0])


class _Common(TorchCommonLoadStrategy):
    """Megatron's strategy for the common state, after which it gathers the ranks' plans."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self._meet = meet

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        try:
            return super().load_common(checkpoint_dir)
        finally:
            self._meet()


class _Strategy(TorchDistLoadShardedStrategy):
    """Megatron's strategy with another reader, which is substituted for the module's reader function during a load."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        for tensor in nested_values(sharded_state_dict):
            # set for embedding and head: it accepts any vocabulary size, and clears the model's before reading
            if isinstance(tensor, ShardedTensor):
                tensor.allow_shape_mismatch = False
        stock = torch_strategy._get_filesystem_reader
        torch_strategy._get_filesystem_reader = lambda *args, **kwargs: self._reader
        try:
            return super().load(sharded_state_dict, checkpoint_dir)
        finally:
            torch_strategy._get_filesystem_reader = stock


class _Reader(StorageReader):
    """Reads all items of a plan before it passes any to the planner."""

    def __init__(self, source: TorchDist, meet: Callable[[], None]) -> None:
        self._source, self._meet = source, meet

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: Metadata = self._source.metadata
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        staged: list[tuple[ReadItem, torch.Tensor | bytes]] = []
        problem = None
        try:
            staged = [(item, self._read(item)) for item in self._in_file_order(plan.items)]
        except (ValueError, OSError) as e:
            problem = str(e)
        _raise_on_every_rank(problem, self._meet)
        for item, value in staged:
            if isinstance(value, bytes):
                planner.load_bytes(item, io.BytesIO(value))  # the planner calls an unrestricted torch.load
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _in_file_order(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Items sorted by file and offset, so that a chunk is read once."""
        stored = self._source.metadata.storage_data
        return sorted(items, key=lambda i: (stored[i.storage_index].relative_path, stored[i.storage_index].offset))

    def _read(self, item: ReadItem) -> torch.Tensor | bytes:
        index = item.storage_index
        if item.type is LoadItemType.BYTE_IO:
            return reencoded(self._source.read_object(index.fqn), f"{self._source.path}: {index.fqn}")
        assert index.offset is not None
        offset = [a + b for a, b in zip(index.offset, item.storage_offsets, strict=True)]
        return self._source.read(index.fqn, offset, tuple(item.lengths))

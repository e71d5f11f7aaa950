"""Megatron's load of a checkpoint, with every chunk verified as it is read, and nothing of it used before all are.

Stock `dist_checkpointing.load` plans; what it reads from is replaced. Each rank reads only chunks that hold its own
bytes: whole ones where the directory has a manifest, whose checksums they must have, and else only the bytes needed.
What is read is staged on the host (a rank's share of the weights, once more); when all ranks have all of theirs it is
copied into the model. So a byte that changed on disk, which stock loading does not notice, a file that was cut, or a
manifest that does not match is one sentence on every rank, and the model is what it was.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron_bridge.agree import gather
from megatron_bridge.convert.torch_archive import encoded_again
from megatron_bridge.convert.torch_dist import TorchDist


def open_verified(path: Path) -> TorchDist:
    """A `torch_dist` directory whose metadata is as its manifest says, on every rank. Collective.

    Raises ValueError on every rank when one finds that it is not.
    """
    source, problem = None, None
    try:
        source = TorchDist(path)
        _check_beside(source)
    except (ValueError, OSError) as e:
        problem = str(e)
    _agree(problem)
    assert source is not None
    return source


def load_verified(state: dict[str, Any], source: TorchDist) -> dict[str, Any]:
    """What `dist_checkpointing.load` returns for the sharded `state`; `source` counts the bytes that this rank read of
    data files. Collective.

    Raises ValueError on every rank, with the tensors of `state` untouched, when what one rank reads is damaged or not
    as the directory's manifest says; and what stock loading raises when the checkpoint does not fit `state`.
    """
    try:
        return dist_checkpointing.load(state, str(source.path), _Strategy(source))  # type: ignore[no-any-return]
    except CheckpointException as e:
        for error, _ in e.failures.values():
            if isinstance(error, _Damaged):
                raise ValueError(str(error)) from None
        raise
    finally:
        source.close()


def _check_beside(source: TorchDist) -> None:
    """Raises ValueError where a small file that stock loading reads too is not the one that the manifest lists."""
    for name in ("common.pt", "metadata.json"):
        file, facts = source.path / name, source.manifest.files if source.manifest is not None else {}
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if found is None or (facts and (name not in facts or found != facts[name].sha256)):
            listed = "is not the one that its manifest lists" if found else "is missing"
            raise ValueError(f"{file} {listed}: copy or convert the checkpoint again")


class _Damaged(ValueError):
    """What is read is not as it should be; the same words on every rank."""


def _agree(problem: str | None) -> None:
    said = [words for words in gather(problem) if words is not None]
    if said:
        raise _Damaged(said[0])


class _Strategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Megatron's, which makes its reader by a function of its module: that one answers with ours while it loads."""

    def __init__(self, source: TorchDist) -> None:
        super().__init__()
        self._reader = _Reader(source)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        for tensor in nested_values(sharded_state_dict):
            # of embedding and head: it takes any vocabulary, and empties the model's before anything is read
            if isinstance(tensor, ShardedTensor):
                tensor.allow_shape_mismatch = False
        stock = torch_strategy._get_filesystem_reader
        torch_strategy._get_filesystem_reader = lambda *args, **kwargs: self._reader
        try:
            return super().load(sharded_state_dict, checkpoint_dir)
        finally:
            torch_strategy._get_filesystem_reader = stock


class _Reader(StorageReader):
    """Reads all that a plan wants before it hands over any of it."""

    def __init__(self, source: TorchDist) -> None:
        self._source = source

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._source.metadata

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
        _agree(problem)
        for item, value in staged:
            if isinstance(value, bytes):
                planner.load_bytes(item, io.BytesIO(value))  # of the planner's unrestricted torch.load
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _in_file_order(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Parts of one chunk follow each other, so it is read once."""
        stored = self._source.metadata.storage_data
        return sorted(items, key=lambda i: (stored[i.storage_index].relative_path, stored[i.storage_index].offset))

    def _read(self, item: ReadItem) -> torch.Tensor | bytes:
        index = item.storage_index
        if item.type is LoadItemType.BYTE_IO:
            return encoded_again(self._source.read_object(index.fqn), f"{self._source.path}: {index.fqn}")
        assert index.offset is not None
        offset = [a + b for a, b in zip(index.offset, item.storage_offsets, strict=True)]
        return self._source.read(index.fqn, offset, tuple(item.lengths))

"""A process group of a publisher, rank 0, and the ranks of its servers, as stock SGLang 0.5.23 makes it."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from torch.distributed import PrefixStore, ProcessGroup, Store, destroy_process_group  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world


def join_group(store: Store, *, name: str, rank: int, size: int, backend: str, timeout_s: float) -> ProcessGroup:
    """Returns once all `size` ranks have joined. The process keeps its other groups.

    timeout_s: of the join and of every broadcast. Raises RuntimeError. The calls are those of SGLang's
    `init_custom_process_group` (srt/utils/common.py), so that all ranks find each other under the same keys of the
    store, which rank 0 serves.
    """
    limit = timedelta(seconds=timeout_s)
    group: ProcessGroup
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=limit
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def leave_group(group: ProcessGroup) -> None:
    """Close the connections to the other ranks, whose broadcasts then fail. It waits for a broadcast of this rank."""
    with contextlib.suppress(RuntimeError, ValueError):  # of a group that another rank has left before
        destroy_process_group(group)

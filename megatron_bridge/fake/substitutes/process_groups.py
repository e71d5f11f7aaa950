"""A fake world for executing one rank alone: its process groups have the sizes of the layout and no other members.

Collectives do nothing; their outputs have the right shapes. A gathered object is this rank's object, once for every
rank. Checks that compare ranks pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_bridge.fake.substitutes.substitute import Substitute

_EVERY_TARGET = 1 << 30  # smaller dimension of linears on other ranks


class _Store(FakeStore):
    """A rendezvous store that keeps nothing."""

    def clone(self) -> _Store:
        return self


def _join(stock: Any) -> Any:
    def init_process_group(backend: Any = None, *, rank: int, world_size: int, **_: Any) -> None:
        stock("fake", store=_Store(), rank=rank, world_size=world_size)

    return init_process_group


def _new_group(stock: Any) -> Any:
    def new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:
        if ranks is not None and dist.get_rank() not in ranks:  # what the stock function returns, after some time
            return dist.GroupMember.NON_GROUP_MEMBER
        return stock(ranks, backend="fake")

    return new_group


def _same_on_every_rank(stock: Any) -> Any:
    def all_gather_object(into: list[Any], value: Any, group: Any = None) -> None:
        into[:] = [value] * len(into)

    return all_gather_object


@contextlib.contextmanager
def _together(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """In place of torch's coalescing of collectives: they run one by one."""
    yield SimpleNamespace(wait=lambda: None)


def _any_matches(stock: Any) -> Any:
    """Name patterns match on some rank."""

    def gather_objects(value: list[bool], group: Any = None) -> list[list[bool]]:
        return [[True] * len(value)]

    return gather_objects


def _something_trains(stock: Any) -> Any:
    def gather_objects(value: Any, group: Any = None) -> list[Any]:
        return [True] if isinstance(value, bool) else [value]

    return gather_objects


def _every_target(stock: Any) -> Any:
    """Adapters' targets that this stage lacks are on others."""

    def gather_objects(value: Any, group: Any = None) -> list[Any]:
        kinds = ("attention", "experts", "shared_experts", "mlp")
        return [value, [(kind, _EVERY_TARGET, "another rank's") for kind in kinds]]

    return gather_objects


def _own_error(stock: Any) -> Any:
    def raise_on_every_rank(error: ValueError | None, device: Any) -> None:
        if error is not None:
            raise error

    return raise_on_every_rank


def _nothing(stock: Any) -> Any:
    return lambda *args, **kwargs: None


def _backend(name: str) -> Any:
    return lambda stock: lambda group=None: name


def world_substitutes(backend: str) -> tuple[Substitute, ...]:
    """Replacements for process groups and collectives. backend: name that `torch.distributed.get_backend` returns for
    every group."""
    alone = "of one rank"
    return (
        Substitute("torch.distributed", "init_process_group", f"process group {alone}", _join),
        Substitute("torch.distributed", "new_group", f"process group {alone}", _new_group),
        Substitute("torch.distributed", "get_backend", f"process group {alone}", _backend(backend)),
        Substitute("torch.distributed", "all_gather_object", "objects of every rank", _same_on_every_rank),
        Substitute("torch.distributed", "barrier", "collective", _nothing),
        Substitute("torch.distributed.distributed_c10d", "_set_pg_timeout", f"process group {alone}", _nothing),
        Substitute(
            "megatron_bridge.device.parallel", "rank_store", f"store {alone}", lambda _: lambda *a, **k: _Store()
        ),
        Substitute(
            "megatron.core.distributed.param_and_grad_buffer", "_coalescing_manager", "collectives", lambda _: _together
        ),
        Substitute("megatron_bridge.optim.param_names", "gather_objects", "names of every rank", _any_matches),
        Substitute("megatron_bridge.optim.optimizer", "gather_objects", "names of every rank", _something_trains),
        Substitute("megatron_bridge.optim.optimizer", "_all_experts_or_none", "check over all ranks", _nothing),
        Substitute("megatron_bridge.model.lora", "gather_objects", "adapters of every rank", _every_target),
        Substitute("megatron_bridge.step.step", "raise_on_every_rank", "check over all ranks", _own_error),
        Substitute("megatron_bridge.step.fake_quant", "raise_on_every_rank", "check over all ranks", _own_error),
        Substitute("megatron_bridge.step.step", "check_equal", "check over all ranks", _nothing),
        Substitute("megatron_bridge.trainer", "_agreed_fingerprint", "check over all ranks", lambda _: lambda: "fake"),
    )


def forget_last_rank() -> None:
    """Clear the caches in which this process keeps tensors of the rank that it executed last."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_bridge.model import local_modules, packed_rope
    from routing_replay import agreement

    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    for of_lengths in (local_modules._planned, local_modules._causal_blocks, packed_rope.packed_positions):
        of_lengths.cache_clear()
    agreement._marks.cache_clear()

"""What stock megatron-core builds for one rank of a large layout, without memory and without the other ranks.

Tensors are on the meta device and process groups are torch's fake ones, whose collectives do nothing: a process takes
the place of one rank after the other. Yarn's tables of angles are left out: they are no part of a model's state, and
most of the time. Everything else is the trainer's own way from config.json to its model's chunks, their gradient
buffers and the sharded state that a load asks for. Imports megatron-core only inside the functions that run in a rank's
own process.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from megatron_bridge.families.registry import family_of


class Share(NamedTuple):
    """A box of a checkpoint tensor, as one rank asks for it."""

    name: str  # of the parameter, with global numbers
    key: str
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    main: bool  # this rank is the one that would save it


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """A rank's place and what it holds."""

    pp: int
    tp: int
    ep: int
    tensors: list[tuple[str, tuple[int, ...], torch.dtype]]  # parameters and routing biases, by their global names
    exported: list[tuple[int, int | None, int | None]]  # (entry, layer, local expert) of each tensor to publish
    shares: list[Share]
    objects: list[str]  # unique keys of what is no tensor


@contextmanager
def _nowhere() -> Iterator[None]:
    from megatron.core.transformer import multi_latent_attention

    from megatron_bridge.device import parallel, shims

    join, group = dist.init_process_group, dist.new_group

    def join_alone(backend: str, *, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        join("fake", store=store, rank=rank, world_size=world_size)

    def fake_store(host: str, port: int, **ranks: Any) -> Any:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore()

    def fake_group(ranks: Sequence[int], **kwargs: Any) -> Any:
        if dist.get_rank() not in ranks:  # what the stock function returns, after some time
            return dist.GroupMember.NON_GROUP_MEMBER
        return group(ranks, **(kwargs | {"backend": "fake"}))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "init_process_group", join_alone))
        stack.enter_context(mock.patch.object(parallel, "rank_store", fake_store))
        stack.enter_context(mock.patch.object(dist, "new_group", fake_group))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: torch.device("meta")))
        stack.enter_context(mock.patch.object(shims, "_CPU", torch.device("meta")))  # of a literal device="cuda"
        angles = mock.patch.object(multi_latent_attention, "YarnRotaryEmbedding", lambda *args, **kwargs: None)
        stack.enter_context(angles)
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """A fifth of the time is to look for garbage among what was imported; what models leave is a hundred megabytes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def build_ranks(hf: dict[str, Any], layout: Mapping[str, Any], ranks: Sequence[int]) -> list[BuiltRank]:
    """Those ranks of the layout, one after the other, with the draft layers that the model has; `tests.support.spawn`
    processes only."""
    from megatron_bridge.device.device import init_device

    init_device()
    from megatron_bridge.config import OptimizerConfig, ParallelConfig, PrecisionConfig, ReplayConfig, TrainerConfig

    config = TrainerConfig(
        hf_config="",
        parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(),
        optimizer=OptimizerConfig(),
        replay=ReplayConfig(),
        mtp_coefficient=0.1 if family_of(hf).mtp_layers(hf) else 0.0,
    )
    return build_configured(config, hf, ranks)


def build_configured(config: Any, hf: dict[str, Any], ranks: Sequence[int], *, te: bool = False) -> list[BuiltRank]:
    """Those ranks of a TrainerConfig. te: of TransformerEngine's modules, in a process of tests.support.te.process."""
    from megatron_bridge.device.device import DeviceEnv
    from megatron_bridge.device.parallel import close_parallel, init_parallel
    from megatron_bridge.model.build import build_model
    from megatron_bridge.plan.resolve import resolve

    # as on a GPU, where parameters are made on the device
    resolved = resolve(config, hf, cuda=True, te=te, capability=(9, 0))
    resolved.transformer["perform_initialization"] = False  # random numbers that are not used
    join = functools.partial(init_parallel, master_addr="", master_port=0, backend="fake", seed=0)
    built = []
    with _nowhere(), _uncollected():
        for rank in ranks:
            parallel = join(config.parallel, rank=rank, world_size=config.parallel.world_size)
            with torch.device("meta"):
                chunks = build_model(config, hf, resolved, parallel, DeviceEnv(torch.device("meta"), "fake"))
            built.append(_described(hf, chunks, parallel))
            close_parallel()
    return built


def _described(hf: dict[str, Any], chunks: list[Any], parallel: Any) -> BuiltRank:
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_bridge.model.build import unwrap
    from megatron_bridge.optim.param_names import named_tensors, renamer
    from megatron_bridge.weights.checkpoint import _model_state
    from megatron_bridge.weights.export import _local_slots

    models = [unwrap(chunk) for chunk in chunks]
    held = list(named_tensors(models, parallel))
    assert all(tensor.device.type == "meta" for _, tensor in held)
    table = family_of(hf).bind(hf, mtp=True)
    slots = [slot for model in models for slot in _local_slots(model, table, parallel.pp_rank)]
    asked = [
        (rename(name), part)
        for model, state in zip(models, _model_state(models, parallel, loading=True).values(), strict=True)
        for rename in [renamer(model, parallel)]
        for name, value in state.items()
        for part in _parts(value)
    ]
    return BuiltRank(
        pp=parallel.pp_rank,
        tp=parallel.tp_rank,
        ep=parallel.ep_rank,
        tensors=[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in held],
        exported=[(slot.entry_index, slot.layer, slot.local_expert) for slot in slots],
        shares=[_share(name, part) for name, part in asked if isinstance(part, ShardedTensor)],
        objects=[part.unique_key for _, part in asked if not isinstance(part, ShardedTensor)],
    )


def _parts(value: Any) -> list[Any]:
    """Of gate and up, which lie apart in a checkpoint, both."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    built = value.build() if isinstance(value, ShardedTensorFactory) else value
    return built if isinstance(built, list) else [built]


def _share(name: str, tensor: Any) -> Share:
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    assert tensor.flattened_range is None
    return Share(
        name=name,
        key=tensor.key,
        shape=tuple(tensor.global_shape),
        offset=tuple(tensor.global_offset),
        sizes=(*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape),
        dtype=tensor.dtype,
        main=is_main_replica(tensor.replica_id),
    )

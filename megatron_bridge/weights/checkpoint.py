"""Model, optimizer, step number and random states <-> a `torch_dist` directory that any layout can read; optionally
with a further set of weights.

A directory is written as NAME.partial and renamed when every rank is done, so a directory named NAME is complete. The
step number also determines the learning rate.

Random states belong to ranks. In the layout that wrote them they are restored bit for bit; in any other they are
derived from (seed, step, the rank's position).
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_bridge.convert.directory.torch_archive import reason
from megatron_bridge.device.collective_errors import first_line
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.device.rng import KEY as RNG
from megatron_bridge.device.rng import derive_rng_state, rng_state, set_rng_state
from megatron_bridge.families.base import SCORE
from megatron_bridge.model import scalar_head
from megatron_bridge.model.build import PolicyModel
from megatron_bridge.model.lora import check_adapters, is_adapter, reset_adapters
from megatron_bridge.optim.optimizer import complete_groups, prime_state
from megatron_bridge.optim.te_names import checkpoint_state, is_extra
from megatron_bridge.weights.checkpoint_sums import verify_sums
from megatron_bridge.weights.checkpoint_writer import CheckpointSave
from megatron_bridge.weights.verified_load import load_verified, open_verified
from miles_like.limits.regular_files import check_inside, open_regular, read_json

_CONFIG_BYTES = 1 << 20  # limit on the size of metadata.json
# fully_reshardable: the optimizer's state is stored by parameter, so that another tp, pp, ep or dp can read it.
_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _model_state(models: Sequence[PolicyModel], parallel: ParallelContext, *, loading: bool) -> dict[str, Any]:
    """The sharded state of the unwrapped chunks, one entry per virtual stage. Checkpoint keys are the local spec's
    names with the global layer number, without "module.", in every layout."""
    metadata = _METADATA | {"dp_cp_group": parallel.dp_cp_group}
    out: dict[str, Any] = {}
    for i, model in enumerate(models):
        state = model.sharded_state_dict(metadata=metadata)
        if model.spec == "te":
            latent = model.config.multi_latent_attention
            state = checkpoint_state(state, latent_attention=latent, loading=loading)
        if model.scalar:
            scalar_head.rename_in_checkpoint(state)
        out[f"model{i}"] = state
    return out


def _set_models(models: Sequence[PolicyModel], state: dict[str, Any]) -> None:
    for i, model in enumerate(models):
        unasked: dict[str, Any] = {}
        if model.spec == "te":  # TransformerEngine's modules take None as "no extra state"
            unasked = {name: None for name in model.state_dict() if is_extra(name)}
        missing, unexpected = model.load_state_dict(unasked | state[f"model{i}"], strict=False)
        may_lack = (scalar_head.NAME,) if model.scalar else ()
        lacking = [name for name in missing if not (is_adapter(name) or name.endswith(may_lack))]
        assert not unexpected and not lacking, (lacking, unexpected)


def _full_state(
    models: Sequence[PolicyModel], optimizer: ChainedOptimizer, parallel: ParallelContext, step: int, *, loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = _model_state(models, parallel, loading=loading) | {"step": step}
    metadata = _METADATA | {"dp_cp_group": parallel.dp_cp_group}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state


def _is_distributed(optimizer: ChainedOptimizer) -> bool:
    """Whether the optimizer is distributed; the two kinds store their state under different names."""
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def begin_save(
    path: Path,
    models: Sequence[PolicyModel],
    optimizer: ChainedOptimizer,
    parallel: ParallelContext,
    *,
    step: int,
    asynchronous: bool,
    copies: Mapping[str, Any] | None = None,
) -> CheckpointSave:
    """Start to save everything a resumed run needs to `path`; the caller finishes the save. `copies`: results of
    `host_copy`. Collective.

    With `asynchronous`, training may continue when this returns. Raises as `CheckpointSave`.
    """
    prime_state(optimizer)
    state = _full_state(models, optimizer, parallel, step, loading=False)
    state["layout"] = parallel.config.model_dump()
    state["distributed_optimizer"] = _is_distributed(optimizer)
    state[RNG] = rng_state(parallel.rank, parallel.world_size)
    state |= {"content_metadata": dict(_METADATA)} | dict(copies or {})
    return CheckpointSave(path, state, parallel.signals.meet, asynchronous=asynchronous)


def host_copy(name: str, models: Sequence[PolicyModel], parallel: ParallelContext) -> dict[str, Any]:
    """A host copy of the current weights of `models` for `begin_save`, with keys prefixed by `name`."""

    def on_host(x: Any) -> Any:
        if isinstance(x, ShardedTensor | ShardedTensorFactory):
            x.data = x.data.detach().to("cpu", copy=True)
        return x

    state = _model_state(models, parallel, loading=False)
    dict_list_map_inplace(on_host, state)
    add_prefix_for_sharding(state, f"{name}.")
    return {name: state}


def load_host_copy(path: Path, name: str, models: Sequence[PolicyModel], parallel: ParallelContext) -> None:
    """Read the saved copy `name` into `models`. Collective. Raises ValueError when the directory is missing or
    incomplete, or has no copy of that name."""
    _check_small_files(path)
    _common(path)
    source = open_verified(path, parallel.signals.meet)
    if not any(key.startswith(f"{name}.") for key in source.names()):
        raise ValueError(
            f"checkpoint {path} has no weights of {name}, which a run with reference_every saves: resume with "
            "reference_every = 0, or from a checkpoint of such a run"
        )
    wanted = _model_state(models, parallel, loading=True)
    add_prefix_for_sharding(wanted, f"{name}.")
    with _mismatch_as_value_error(path):
        state = load_verified({name: wanted}, source, parallel.signals.meet)
    _set_models(models, state[name])


def _check_small_files(path: Path) -> None:
    """Raise ValueError when the small files that stock loading opens are missing or not regular files in the directory,
    or when metadata.json is not as a save writes it."""
    if not os.path.lexists(path / CONFIG_FNAME):
        raise ValueError(
            f"{path} is not a complete torch_dist checkpoint: it has no metadata.json; use another directory"
        )
    try:
        for name in (CONFIG_FNAME, COMMON_STATE_FNAME):
            check_inside(path / name, path)
        os.close(open_regular(path / COMMON_STATE_FNAME))
        _check_backends(read_json(path / CONFIG_FNAME, _CONFIG_BYTES))
    except (ValueError, OSError) as e:
        raise ValueError(f"checkpoint {path}: {reason(e)}: copy or convert it again") from None


def _check_backends(found: object) -> None:
    """Raise ValueError unless `found`, the content of metadata.json, has the keys of megatron's CheckpointingConfig."""
    known = {field.name for field in dataclasses.fields(CheckpointingConfig)}
    if not isinstance(found, dict) or "sharded_backend" not in found or not set(found) <= known:
        raise ValueError(
            f"{CONFIG_FNAME} was not written by a save: expected an object with the keys {', '.join(sorted(known))}"
        )


def _common(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that all ranks share. Raises ValueError when it is damaged."""
    try:
        return dict(dist_checkpointing.load_common_state_dict(str(path)))
    # exceptions of torch and megatron for an empty, truncated, foreign or missing file
    except (EOFError, RuntimeError, KeyError, AttributeError, CheckpointingException, pickle.UnpicklingError) as e:
        raise ValueError(
            f"checkpoint {path}: common.pt cannot be read ({reason(e)}): resume from an earlier checkpoint"
        ) from None


@contextmanager
def _mismatch_as_value_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointingException, KeyError, CheckpointException) as e:
        reported = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
        raise ValueError(
            f"checkpoint {path} does not fit this model: {first_line(reported)}; check that it was made with the "
            "same model configuration"
        ) from e


def load_checkpoint(
    path: Path, models: Sequence[PolicyModel], optimizer: ChainedOptimizer, parallel: ParallelContext, *, seed: int
) -> int:
    """Read what `begin_save` wrote, in any layout; returns its step. `seed` is used in another layout. Collective.

    Raises ValueError when the directory is missing, incomplete, of another model, or of the other kind of optimizer.
    """
    _check_small_files(path)
    verify_sums(path, parallel.signals.meet)
    written = _common(path)
    source = open_verified(path, parallel.signals.meet)
    if (had := written.get("distributed_optimizer")) is not (have := _is_distributed(optimizer)):
        raise ValueError(
            f"checkpoint {path} was written with distributed_optimizer = {had}, but this run has {have}: resume "
            "with the same value, or load its weights only"
        )
    check_adapters(source, models)
    prime_state(optimizer)
    wanted = _full_state(models, optimizer, parallel, 0, loading=True)
    same_layout = written.get("layout") == parallel.config.model_dump()
    if same_layout:
        wanted[RNG] = rng_state(parallel.rank, parallel.world_size)
    with _mismatch_as_value_error(path):
        state = load_verified(wanted, source, parallel.signals.meet)
    _set_models(models, state)
    optimizer.load_state_dict(state["optimizer"])
    complete_groups(optimizer)
    step = int(state["step"])
    if same_layout:
        set_rng_state(state[RNG])
    else:
        derive_rng_state(seed, step)
    return step


def read_weights(path: Path, models: Sequence[PolicyModel], parallel: ParallelContext) -> int:
    """Read only the weights of a converted model (keys as in the unwrapped GPTModel) into `models`; returns the bytes
    of data files that this rank read. A scalar head that the directory lacks is initialized to zero. Collective.

    Raises ValueError on every rank, with the models unchanged, when the directory is missing, incomplete, damaged or of
    another model.
    """
    source = open_verified(path, parallel.signals.meet)
    _check_small_files(path)
    _common(path)
    wanted = _model_state(models, parallel, loading=True)
    adapted = check_adapters(source, models)
    new_head = models[0].scalar and SCORE not in source
    head = (scalar_head.NAME,) if new_head else ()

    def lacks(name: str) -> bool:
        return name.endswith(head) or (not adapted and is_adapter(name))

    wanted = {chunk: {k: v for k, v in state.items() if not lacks(k)} for chunk, state in wanted.items()}
    with _mismatch_as_value_error(path):
        state = load_verified(wanted, source, parallel.signals.meet)  # the result also has the common state
    _set_models(models, state)
    if not adapted:
        reset_adapters(models)
    if new_head:
        scalar_head.zero_head(models)
    return source.bytes_read


def load_weights(
    path: Path, models: Sequence[PolicyModel], optimizer: ChainedOptimizer, parallel: ParallelContext
) -> int:
    """`read_weights`, then refresh the optimizer's fp32 copies. Collective."""
    bytes_read = read_weights(path, models, parallel)
    optimizer.reload_model_params()
    return bytes_read

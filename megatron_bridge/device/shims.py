"""All shims that stock megatron-core 0.16.1 needs without CUDA or TransformerEngine; `device.py` installs them.

Each is one row of a table: the target, the reason, and a check that it is still needed. A missing target or a fixed bug
fails the start; since the wheel is pinned exactly, that only happens when the pin changes.

Redirects affect only callers inside `megatron.*`; all other code in the process gets torch's own behaviour, except for
`torch.cuda.Stream` and `Event`, which need a device, and all_reduce over a single rank, which starts no thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_bridge.device.cpu_ops import (
    foreach_norm,
    gather_uneven,
    reduce_scatter_uneven,
    scale_in_place,
    skip_all_reduce_of_one_rank,
    skip_coalescing_of_one_rank,
    skip_sorted_sort,
    swiglu_back,
    unpermute_by_index_add,
    weighted_swiglu_back,
)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shim:
    """One replacement of `owner.name` by `make(stock)`."""

    owner: str  # import path of a module, or "module:Class"
    name: str
    reason: str
    make: Callable[[Any], Any]
    still_needed: Callable[[Any], bool] = lambda stock: True  # checks the stock object, where a check is possible

    def install(self) -> None:
        owner = owner_of(self.owner)
        assert hasattr(owner, self.name), (
            f"shim target {self.owner}.{self.name} is gone: review the shim ({self.reason})"
        )
        stock = getattr(owner, self.name)
        assert self.still_needed(stock), f"shim {self.owner}.{self.name} is no longer needed: drop it ({self.reason})"
        setattr(owner, self.name, self.make(stock))


def owner_of(path: str) -> Any:
    """The module, or the class "module:Class", in which a function is replaced."""
    module, _, attribute = path.partition(":")
    owner: Any = importlib.import_module(module)
    return getattr(owner, attribute) if attribute else owner


def called_by_megatron(depth: int = 2) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("megatron.")


class IdleStream:
    """Stands for torch.cuda.Stream where work runs in order, or not at all: waiting does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or IdleEvent()


class IdleEvent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


IDLE_STREAM = IdleStream()


def _for_megatron(value: Callable[..., Any]) -> Callable[[Any], Any]:
    """Calls from megatron return `value(...)`; all others call the stock function."""

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            return value(*args, **kwargs) if called_by_megatron() else stock(*args, **kwargs)

        return redirected

    return make


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(stock: Any) -> Any:
    """Make a tensor factory use plain CPU memory where megatron passes a literal device="cuda" or pin_memory=True."""

    @functools.wraps(stock)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if ("device" in kwargs or "pin_memory" in kwargs) and called_by_megatron():
            kwargs.pop("pin_memory", None)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return stock(*args, **kwargs)

    return factory


def _to_cpu(stock: Any) -> Any:
    @functools.wraps(stock)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]) and called_by_megatron():
            args = (_CPU, *args[1:])
        return stock(self, *args, **kwargs)

    return to


def _cuda_type_name(stock: Any) -> Any:
    @functools.wraps(stock)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = stock(self, *args, **kwargs)
        if isinstance(name, str) and "cuda" not in name and called_by_megatron():
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_


def _factories() -> tuple[Shim, ...]:
    names = (
        "tensor",
        "zeros",
        "empty",
        "ones",
        "full",
        "arange",
        "zeros_like",
        "empty_like",
        "ones_like",
        "rand",
        "randn",
    )
    return tuple(Shim("torch", n, 'literal device="cuda" or pin_memory=True in megatron', _on_cpu) for n in names)


# Without CUDA: installed before the first megatron import.
TORCH_SHIMS: tuple[Shim, ...] = (
    Shim("torch.cuda", "current_device", "used everywhere as device= and .to() target", _for_megatron(lambda: _CPU)),
    Shim("torch.cuda", "set_device", "asynchronous checkpoint writers", _for_megatron(lambda *a: None)),
    Shim("torch.cuda", "synchronize", "p2p, schedules, dist_checkpointing", _for_megatron(lambda *a, **k: None)),
    Shim("torch.cuda", "empty_cache", "optimizer offload, mlp", _for_megatron(lambda: None)),
    Shim("torch.cuda", "Stream", "all-to-all dispatcher, DDP communication stream", lambda stock: IdleStream),
    Shim("torch.cuda", "Event", "offload, 1F1B overlap", lambda stock: IdleEvent),
    Shim("torch.cuda", "current_stream", "all-to-all dispatcher", _for_megatron(lambda *a, **k: IDLE_STREAM)),
    Shim("torch.cuda", "default_stream", "gradient buffer overlap", _for_megatron(lambda *a, **k: IDLE_STREAM)),
    Shim("torch.cuda", "stream", "all-to-all dispatcher", _for_megatron(lambda *a, **k: contextlib.nullcontext())),
    Shim("torch.cuda", "manual_seed", "random number tracker: the CPU generator", _for_megatron(torch.manual_seed)),
    Shim("torch.cuda", "get_rng_state", "random number tracker", _for_megatron(lambda *a, **k: torch.get_rng_state())),
    Shim("torch.distributed", "all_reduce", "on a single rank gloo would wake a thread", skip_all_reduce_of_one_rank),
    Shim("torch.cuda.nvtx", "range_push", "profiling marks", _for_megatron(lambda *a: None)),
    Shim("torch.cuda.nvtx", "range_pop", "profiling marks", _for_megatron(lambda *a: None)),
    Shim(
        "torch:Tensor",
        "cuda",
        "context-parallel slices, broadcasts, checkpoints",
        _for_megatron(lambda self, *a, **k: self),
    ),
    Shim("torch:Tensor", "to", 'x.to("cuda")', _to_cpu),
    Shim("torch:Tensor", "type", "optimizers compare the type's name with torch.cuda.*", _cuda_type_name),
    *_factories(),
)


# Without CUDA: installed after the first megatron import.
MEGATRON_SHIMS: tuple[Shim, ...] = (
    Shim(
        "megatron.core.transformer.moe.token_dispatcher",
        "sort_chunks_by_idxs",
        "on a single rank the tokens are already sorted by expert: copying them in both directions is a tenth of a "
        "small model's step",
        skip_sorted_sort,
    ),
    Shim(
        "megatron.core.transformer.moe.token_dispatcher",
        "unpermute",
        "adds rows by an elementwise scatter_add, whose backward reads an index per element",
        unpermute_by_index_add,
        lambda stock: "scatter_add_" in inspect.getsource(stock),
    ),
    Shim(
        "megatron.core.fusions.fused_bias_swiglu",
        "swiglu_back",
        "allocates a dozen temporaries without a compiler to fuse them",
        swiglu_back,
    ),
    Shim(
        "megatron.core.fusions.fused_bias_swiglu",
        "weighted_swiglu_back",
        "the same for experts",
        weighted_swiglu_back,
    ),
    Shim(
        "megatron.core.distributed.param_and_grad_buffer",
        "_coalescing_manager",
        "on a single rank, reduces and gathers gradients and parameters onto themselves in a thread",
        skip_coalescing_of_one_rank,
    ),
    Shim(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        "the tracker's state is the CPU generator's",
        lambda stock: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    ),
    Shim(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "the stock function defers to CUDA's lazy initialization, so it never runs and raises no error",
        lambda stock: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        lambda stock: "_lazy_call" in inspect.getsource(stock),
    ),
    Shim(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        "converts split sizes to numpy only on CUDA; all_to_all_single would get tensors as sizes",
        lambda stock: (
            lambda tensor, as_numpy=False, record_stream=False: (
                tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor
            )
        ),
        lambda stock: torch.is_tensor(stock(torch.zeros(1), as_numpy=True)),
    ),
    Shim(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        "expert-tensor-parallel ranks hold different numbers of tokens, and gloo gathers equal sizes only",
        gather_uneven,
    ),
    Shim(
        "megatron.core.tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        "the same in backward",
        reduce_scatter_uneven,
    ),
)


def _keep_step_out(stock: Any) -> Any:
    @functools.wraps(stock)
    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: Any) -> None:
        states = [s for s in self.optimizer.state.values() if "step" in s]
        steps = [s.pop("step") for s in states]
        try:
            stock(self, model_param, tensors)
        finally:
            for state, step in zip(states, steps, strict=True):
                state["step"] = step

    return set_states


def _unshare_steps(stock: Any) -> Any:
    @functools.wraps(stock)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        stock(self, state_dict)
        for state in self.optimizer.state.values() if self.optimizer else ():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_state_dict


def _fp8_false_is_off(stock: Any) -> Any:
    @functools.wraps(stock)
    def init(self: Any, fp8: Any = None) -> None:
        stock(self, fp8=fp8 or None)

    return init


# Without TransformerEngine, on any device: bugs of 0.16.1.
NO_TE_SHIMS: tuple[Shim, ...] = (
    Shim(
        "megatron.core.optimizer.clip_grads",
        "l2_norm_impl",
        "computes the norms of gradients one by one, through Python numbers",
        foreach_norm,
    ),
    Shim(
        "megatron.core.optimizer.clip_grads",
        "multi_tensor_scale_impl",
        "clips gradients one by one into a copy, which it copies back",
        scale_in_place,
    ),
    Shim(
        "megatron.core.transformer.multi_latent_attention",
        "HAVE_TE",
        "is True by mistake (its TE classes are mocks, so isinstance raises TypeError)",
        lambda stock: False,
        lambda stock: stock is True,
    ),
    Shim(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "_set_main_param_and_optimizer_states",
        "torch's AdamW keeps `step` with the moments, the checkpoint keeps it in the param group: KeyError",
        _keep_step_out,
        lambda stock: "dst_tensors[key].copy_(tensors[key])" in inspect.getsource(stock),
    ),
    Shim(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "load_state_dict",
        "gives all parameters one shared `step`, which torch's AdamW then increments once per parameter",
        _unshare_steps,
    ),
    Shim(
        "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
        "__init__",
        "treats its default fp8=False as FP8: NameError in selective recomputation of norms",
        _fp8_false_is_off,
        lambda stock: "self.fp8 = fp8 is not None" in inspect.getsource(stock),
    ),
)

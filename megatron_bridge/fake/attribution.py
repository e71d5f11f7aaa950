"""Attributes each storage to a part of the trainer.

Storages that live as long as the trainer are attributed by the attribute of the trainer that holds them, those of a
step by the function that creates them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_bridge.fake.live_bytes import LiveBytes
from megatron_bridge.fake.substitutes.substitute import Substitute
from megatron_bridge.step.asleep import _tensors_in

ACTIVATIONS, LOGITS, COMMUNICATION = "activations", "logits", "communication"
PARAMETERS, GRADIENTS, MASTERS, MOMENTS = "parameters", "gradients", "masters", "moments"
ROUNDED, REFERENCES, STEP = "rounded weights", "reference weights", "optimizer step"
OPTIMIZER = "optimizer state"  # masters and moments
_MOMENTS = ("exp_avg", "exp_avg_sq")


def attribution_substitutes(live: LiveBytes) -> tuple[Substitute, ...]:
    """Replacements of functions that attribute the storages which the function creates to a part, or to the host, and
    of those that resize storages."""
    logprobs, why = "megatron_bridge.model.logprobs:_LabelLogprobs", "counted"

    def in_part(name: str) -> Callable[[Any], Any]:
        return lambda stock: _inside(stock, lambda: live.part(name))

    def host_buffer(nbytes: int, device: torch.device) -> Tensor:
        with live.on_host():
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    on_host = "counted, and not pinned"
    trainer = "megatron_bridge.trainer"
    return (
        Substitute(trainer, "build_model", why, in_part(PARAMETERS)),
        Substitute("megatron_bridge.model.build", "DistributedDataParallel", why, lambda s: _buffers_of(s, live)),
        Substitute(trainer, "build_optimizer", why, in_part(MASTERS)),
        Substitute(trainer, "FakeQuant", why, in_part(ROUNDED)),
        Substitute(logprobs, "forward", why, lambda stock: staticmethod(in_part(LOGITS)(stock))),
        Substitute(logprobs, "backward", why, lambda stock: staticmethod(in_part(LOGITS)(stock))),
        Substitute("megatron.core.utils:GlobalMemoryBuffer", "get_tensor", why, in_part(COMMUNICATION)),
        Substitute("megatron_bridge.weights.export:_Exporter", "_all_gather", why, _static(in_part(COMMUNICATION))),
        Substitute(trainer, "apply_gradients", why, in_part(STEP)),
        Substitute("megatron_bridge.device.host_memory", "host_buffer", on_host, lambda _: host_buffer),
        Substitute("megatron_bridge.step.asleep", "host_buffer", on_host, lambda _: host_buffer),
        Substitute("megatron_bridge.step.step:Step", "_forward", "garbage is collected", _without_garbage),
        Substitute("torch:UntypedStorage", "resize_", why, lambda stock: _measured(stock, live)),
    )


def _inside(stock: Any, context: Callable[[], Any]) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        with context():
            return stock(*args, **kwargs)

    return function


def _buffers_of(stock: Any, live: LiveBytes) -> Any:
    """Megatron's wrapper, which makes buffers of gradients and of parameters."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with live.part(GRADIENTS):
            chunk = stock(*args, **kwargs)
        buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
        live.assign([b.param_data for b in buffers if b.param_data is not None], PARAMETERS)
        return chunk

    return wrapped


def _static(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda stock: staticmethod(make(stock))


def _without_garbage(stock: Any) -> Any:
    """Python objects that refer to each other keep tensors until they are collected, at times that no layout
    determines: here before each forward pass."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        return stock(*args, **kwargs)

    return forward


def _measured(stock: Any, live: LiveBytes) -> Any:
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        out = stock(self, size)
        live.measure(self)
        return out

    return resize_


def attribute(trainer: Any, live: LiveBytes) -> None:
    """Attribute what the trainer keeps between steps. A storage that belongs to several parts is counted with the last
    one: the shards of fp32 parameters are parameters."""
    sleep = trainer._sleep
    live.assign(_tensors_in(trainer.optimizer, set()), MASTERS)
    for inner in inner_optimizers(trainer.optimizer):
        live.assign(_state(inner, _MOMENTS), MOMENTS)
        live.assign(getattr(inner, "cpu_copy_map_grad", {}).values(), GRADIENTS)
    live.assign(sleep._derived, ROUNDED)
    live.assign(sleep._gradients(), GRADIENTS)
    live.assign(sleep._parameters(), PARAMETERS)
    for copy in trainer.copies._copies.values():
        live.assign(copy, REFERENCES)


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """torch's and megatron's hybrid optimizers in a chain, and those that a hybrid one is made of."""
    for chained in optimizer.chained_optimizers:
        yield chained.optimizer
        yield from getattr(chained.optimizer, "sub_optimizers", ())


def prime_hybrid(optimizer: Any) -> None:
    """The state of AdamW that the first step of a HybridDeviceOptimizer creates: on the host, except for the share that
    is not offloaded."""
    for chained in optimizer.chained_optimizers:
        for adam in getattr(chained.optimizer, "sub_optimizers", ()):
            for group in adam.param_groups:
                for p in group["params"]:
                    if not adam.state[p]:
                        state = {name: torch.zeros_like(p) for name in _MOMENTS}
                        adam.state[p] = {"step": torch.zeros((), device="cpu")} | state


def _state(optimizer: Optimizer, names: tuple[str, ...]) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (state[name] for name in names if isinstance(state.get(name), Tensor))


def attribute_asleep(trainer: Any, live: LiveBytes) -> None:
    """Attribute the host copies of a trainer that sleeps: a buffer for the parameters, one for the optimizer."""
    for name, part in (("parameters", PARAMETERS), ("optimizer", OPTIMIZER)):
        if name in trainer._sleep._host:
            live.assign([trainer._sleep._host[name]], part)

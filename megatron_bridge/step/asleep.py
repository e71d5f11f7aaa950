"""A trainer rank that sleeps: nothing of its parameters, gradients and optimizer is left on the device.

The parameters and the optimizer's state are copied to the host; gradients are dropped, since each step begins with
zeros; weights that were rounded for the forward pass are dropped and rounded again. A rank that wakes continues with
the same bits. The host memory of the copies is allocated by the first sleep and kept for the next ones: to pin it takes
longer than to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_bridge.device.host_memory import host_buffer
from megatron_bridge.device.parallel import free_gathered
from megatron_bridge.device.storages import StorageSet, storages
from megatron_bridge.step.overlap import finish_param_gather


class Sleep:
    """Puts one rank to sleep and wakes it. `derived`: tensors that are computed again after `stale`."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        device: torch.device,
        *,
        derived: Sequence[Tensor] = (),
        stale: Callable[[], None] = lambda: None,
    ) -> None:
        self._chunks, self._optimizer, self._device = chunks, optimizer, device
        self._derived, self._stale = derived, stale
        self._last_pass = _LastPass(chunks)
        self._freed: dict[str, StorageSet] | None = None  # by part; None: awake
        self._host: dict[str, Tensor] = {}  # by part
        self._lent = False  # the parameters are on the device while the rank sleeps

    @property
    def asleep(self) -> bool:
        return self._freed is not None

    def require_awake(self, what: str, *, parameters: bool = False) -> None:
        """Raises RuntimeError while the rank sleeps; with `parameters`, only if these are not on the device."""
        if self.asleep and not (parameters and self._lent):
            raise RuntimeError(
                f"{what}: this trainer rank sleeps, its parameters and optimizer state are on the host: call wake first"
            )

    def sleep(self) -> dict[str, int]:
        """Frees the device's memory; returns the bytes freed by part, all 0 for a rank that sleeps already.
        Collective, as updated parameters are gathered first."""
        parts = dict.fromkeys(("parameters", "gradients", "optimizer", "rounded"), 0)
        if self._freed is not None:
            return parts
        finish_param_gather(self._chunks)
        self._last_pass.drop()
        self._freed = self._found()
        for part, stored in self._freed.items():
            stored.free(self._buffer(part, stored.host_nbytes))
            parts[part] = stored.nbytes
        self._return_memory()
        return parts

    def wake(self) -> None:
        """Restores everything. No effect on a rank that is awake."""
        if self._freed is None:
            return
        for stored in self._freed.values():
            stored.restore()
        self._freed = None
        self._stale()

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Inside the context the parameters are on the device, also of a rank that sleeps. They must not change, so
        that nothing is copied when they are freed again. After an exception they stay: a thread may still read them.
        """
        if self._freed is None:
            yield
            return
        stored = self._freed["parameters"]
        stored.restore()
        self._lent = True
        yield
        self._lent = False
        stored.free_again()
        self._return_memory()

    def _found(self) -> dict[str, StorageSet]:
        """The storages of each part. One that several parts share (the shards of fp32 parameters) is the first's."""
        tensors: Mapping[str, Iterator[Tensor]] = {
            "parameters": self._parameters(),
            "gradients": self._gradients(),
            "optimizer": _tensors_in(self._optimizer, set()),
            "rounded": iter(self._derived),
        }
        out, taken = dict[str, StorageSet](), set[int]()
        for part, found in tensors.items():
            own = storages(found, self._device)
            kept = part in ("parameters", "optimizer")
            out[part] = StorageSet((s for key, s in own.items() if key not in taken), kept=kept)
            taken |= own.keys()
        return out

    def _parameters(self) -> Iterator[Tensor]:
        """Parameters, their buffers, and what else the modules keep (routing biases, tables of angles)."""
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from chunk.module.buffers()
            yield from (b.param_data for b in _buffers(chunk) if b.param_data is not None)

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (b.grad_data for b in _buffers(chunk))
            for parameter in chunk.parameters():
                yield from (g for g in (parameter.grad, getattr(parameter, "main_grad", None)) if g is not None)
        for tensor in _tensors_in(self._optimizer, set()):
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad

    def _buffer(self, part: str, nbytes: int) -> Tensor:
        """The host memory for a part. Its size changes once: the optimizer has no moments before the first step."""
        if part not in self._host or self._host[part].nbytes != nbytes:
            self._host.pop(part, None)  # freed first
            self._host[part] = host_buffer(nbytes, self._device)
        return self._host[part]

    def _return_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # to the driver: the engine is another process


class _LastPass:
    """What megatron's modules keep of their last pass. Dispatchers keep the routing of it, with the graph of its
    weights, which where layers are recomputed keeps their inputs and the gradients of these: two hidden states a layer.
    The decoder of a later stage keeps the last hidden states that it received, and their gradient. The inputs that
    tensor-parallel linears gather are in a global buffer.

    To be constructed before the first pass: the tensors that a dispatcher has then are constants of it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        modules = [module for chunk in chunks for module in chunk.modules()]
        self._receivers = [m for m in modules if hasattr(m, "input_tensor")]
        dispatchers = [d for m in modules if (d := getattr(m, "token_dispatcher", None)) is not None]
        owners = [*dispatchers, *(c for d in dispatchers if (c := getattr(d, "_comm_manager", None)) is not None)]
        self._dispatchers = [(owner, frozenset(_tensor_attributes(owner))) for owner in owners]

    def drop(self) -> None:
        """The next pass sets all of it before it reads it."""
        for module in self._receivers:
            module.input_tensor = None  # type: ignore[assignment]
        for owner, constants in self._dispatchers:
            for name in _tensor_attributes(owner):
                if name not in constants:
                    setattr(owner, name, None)
        free_gathered()


def _tensor_attributes(thing: object) -> list[str]:
    return [name for name, value in vars(thing).items() if isinstance(value, Tensor)]


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    """Megatron's buffers of gradients, and with a distributed optimizer of parameters."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in an optimizer: in its attributes, in those of the optimizers that it wraps, and in their
    containers. Not in a model or a buffer that it refers to."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _tensors_in(key, seen)
            yield from _tensors_in(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from _tensors_in(value, seen)
    elif isinstance(thing, MegatronOptimizer | torch.optim.Optimizer):
        yield from _tensors_in(vars(thing), seen)

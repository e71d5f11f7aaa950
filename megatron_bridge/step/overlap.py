"""Overlaps gradient reduction with backward and the gathering of weights with the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megatron_bridge.model.build import unwrap


def connect_overlap(transformer_config: Any, chunks: Sequence[DistributedDataParallel]) -> None:
    """Set the functions by which megatron's schedules start to reduce a chunk's gradients and gather its weights.

    With virtual stages every pipeline rank starts both at the same point of the schedule, as megatron's training loop
    does by default: a stage that communicates at another time makes the others wait. Without virtual stages backward
    hooks start the reduction and forward hooks the gathering. The model reads the head's weight without calling the
    module; therefore the model itself calls the hook that waits for the gathering (`await_head`).
    """
    ddp = chunks[0].ddp_config
    transformer_config.no_sync_func = _each([_NoSync(chunk) for chunk in chunks])
    if len(chunks) > 1 and ddp.overlap_grad_reduce:
        transformer_config.grad_sync_func = _each([chunk.start_grad_sync for chunk in chunks])
    if len(chunks) > 1 and ddp.overlap_param_gather:
        transformer_config.param_sync_func = _each([chunk.start_param_sync for chunk in chunks])
    for model, chunk in ((unwrap(chunk), chunk) for chunk in chunks if ddp.overlap_param_gather):
        if model.post_process:
            model.await_head = partial(chunk._make_forward_pre_hook(), model.output_layer)


class _NoSync:
    """A chunk's no_sync that can be closed from outside."""

    def __init__(self, chunk: DistributedDataParallel) -> None:
        self._chunk = chunk
        self._entered: Any = None

    def __call__(self) -> Any:
        self._entered = self._chunk.no_sync()
        return self._entered

    def leave(self) -> None:
        if self._entered is not None:
            self._entered.gen.close()
            self._entered = None


def leave_no_sync(transformer_config: Any) -> None:
    """Leave the no_sync contexts that a schedule has entered. After an error or a forward pass, pipeline schedules
    leave that to the garbage collector, which may run during a later step or after the model is deleted."""
    functions = transformer_config.no_sync_func
    for function in functions if isinstance(functions, list) else [functions]:
        function.leave()


def finish_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather all updated weights on every rank. Collective.

    With overlap_param_gather an optimizer step updates only a rank's own shard; the next forward gathers the rest. Call
    this before reading or writing weights between steps.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _each(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]

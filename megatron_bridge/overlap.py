"""Gradients reduced while backward runs, weights gathered while the next forward runs: wiring and settling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megatron_bridge.model import unwrap


def connect_overlap(transformer_config: Any, chunks: Sequence[DistributedDataParallel]) -> None:
    """Tell megatron's schedules when a chunk's gradients may be reduced and its weights gathered.

    With virtual stages every pipeline rank starts both at the same point of the schedule, as megatron's own training
    loop does by default: a stage that communicates alone makes the others wait. Without them backward hooks start the
    reduction and forward hooks the gathering. The head's weight is read without a call of its module, so that its hook,
    which waits for the gathering, is handed to the model.
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
    """A chunk's no_sync, remembered."""

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
    """End what a schedule has begun. Pipeline schedules enter no_sync by hand and leave it to the garbage collector
    after an error or a forward pass, which may come in the midst of a later step or when the model is gone."""
    functions = transformer_config.no_sync_func
    for function in functions if isinstance(functions, list) else [functions]:
        function.leave()


def settle_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make every rank hold every updated weight. Collective.

    With overlap_param_gather an optimizer step changes a rank's own shard only, until the next forward comes by:
    whoever reads or writes weights between steps calls this first.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _each(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]

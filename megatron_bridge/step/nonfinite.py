"""Locates the first non-finite value of a failed step: its module, micro-batch and tensor, reported alike on all ranks.

The step has failed and its weights are unchanged, so forward and backward over the same micro-batches fail again. On
that repetition every module's inputs and outputs, and the gradients of both and of its parameters, are checked. A step
that succeeds has no extra cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.build import every_router, unwrap
from megatron_bridge.optim.param_names import renamer
from megatron_bridge.step.step import Step
from miles_like.protocols import LossFn
from miles_like.types import LossInputs, LossOutput

_FORWARD, _BACKWARD = 0, 1
_LOSS_INPUTS = ("logprobs", "rollout_logprobs", "advantages", "ref_logprobs", "old_logprobs", "candidate_logprobs")
_AFTER = 1 << 30  # micro-batch number of values that appear only in the sums over all micro-batches
_SQUARE_OVERFLOWS = 1e15  # from here on a few thousand squares may leave the range of fp32 (3.4e38)


class RoutingBias:
    """A saved copy of the routers' selection biases. Megatron updates them when it finalizes gradients, before it is
    known whether the step is finite."""

    def __init__(self, chunks: list[Any]) -> None:
        self._biases = [router.expert_bias for router in every_router(chunks) if router.expert_bias is not None]
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        self._kept = [bias.clone() for bias in self._biases]

    @torch.no_grad()
    def restore(self) -> None:
        for bias, kept in zip(self._biases, self._kept, strict=True):
            bias.copy_(kept)


def explain(step: Step, run: Callable[[], Mapping[str, float]], *, optimizer: Any, bias: RoutingBias) -> str:
    """A clause for an error message: where the step just run stopped being finite. Collective; equal on every rank.

    `run` repeats the step with the same arguments. Weights and optimizer state do not change; routing biases are
    restored from `bias` and gradients are zeroed.
    """

    def clear() -> None:
        bias.restore()
        optimizer.zero_grad()
        for chunk in step.chunks:
            chunk.zero_grad_buffer()

    clear()
    where = _locate(step, run)
    clear()
    return where


def _locate(step: Step, run: Callable[[], Mapping[str, float]]) -> str:
    """The earliest location over all ranks: by micro-batch, then forward before backward, then pipeline stage in the
    order of execution, then order within the stage. The data-parallel shard is that of the rank that found it; an
    expert computes tokens of other shards too."""
    watch = _Watch(step)
    with watch.on():
        metrics = run()
    if watch.found is None:
        watch.check_sums()
    found = [_decode(text) for text in gather_objects(watch.encoded()) if text]
    weight = next((text for text in gather_objects(watch.bad_weight()) if text), "")
    watch.models.clear()  # a dispatcher keeps a tensor of the graph, whose hooks keep the watch: it is never collected
    if found:
        return f"first {min(found)[1]}" + (f"; {weight}" if weight else "")
    if weight:
        return f"every value of the repeated step is finite, but {weight}"
    return (
        f"it did not recur when the step was repeated (loss {metrics['train/loss']:.6g}): a kernel or the machine "
        "is unreliable; check the device for memory errors"
    )


def _decode(line: str) -> tuple[tuple[int, ...], str]:
    order, text = line.split("|", 1)
    return tuple(map(int, order.split())), text


def _named_modules(model: Any, parallel: ParallelContext) -> Iterator[tuple[str, Any]]:
    """(name with global layer and expert numbers, module) of every module; the whole model's is "model"."""
    rename = renamer(model, parallel)
    for name, module in model.named_modules():
        yield rename(name) or "model", module


def _named_values(model: Any, parallel: ParallelContext) -> Iterator[tuple[str, str, Tensor]]:
    """("parameter" or "buffer", name as in `_named_modules`, value). The full name is renamed: in a module that holds
    all experts of a rank, the expert's number is part of the parameter's name."""
    rename = renamer(model, parallel)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, value in held.items():
                if value is not None:
                    yield kind, rename(prefix + key), value


def _bad(x: Any) -> str:
    """ "nan in 3 of 64 values", or "" if x is finite or not a floating-point tensor."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return ""
    wrong = int((~torch.isfinite(x)).sum())
    if not wrong:
        return ""
    nans = int(torch.isnan(x).sum())
    kind = "nan" if nans == wrong else "inf" if nans == 0 else "nan and inf"
    return f"{kind} in {wrong} of {x.numel()} values"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _gives_gradient(x: Tensor) -> bool:
    """Whether a hook on x will be called. The output of a recomputed layer may require a gradient before recomputation;
    a hook on it is lost, and so are all later hooks on the same tensor, including the step's."""
    return x.requires_grad and torch.is_grad_enabled()


class _Watch:
    """Checks all values that pass through this rank's modules and keeps the earliest non-finite one."""

    def __init__(self, step: Step) -> None:
        self.step, self.parallel = step, step.parallel
        self.models = [unwrap(chunk) for chunk in step.chunks]
        self.found: tuple[tuple[int, ...], str] | None = None
        self._seen = 0  # number of values checked: the order of execution on this rank

    def encoded(self) -> str:
        if self.found is None:
            return ""
        order, text = self.found
        return " ".join(map(str, order)) + "|" + text

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = []
        for stage, model in enumerate(self.models):
            for name, module in _named_modules(model, self.parallel):
                entering = partial(self._entering, stage, name)
                handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
                handles.append(module.register_forward_hook(partial(self._left, stage, name)))
            for kind, name, p in _named_values(model, self.parallel):
                if kind == "parameter" and p.requires_grad:
                    what = f"the gradient of parameter {name}"
                    handles.append(p.register_hook(partial(self._gradient, stage, what, None)))
        loss = self.step.loss
        self.step.loss = partial(self._loss, loss)
        try:
            yield
        finally:
            self.step.loss = loss
            for handle in handles:
                handle.remove()

    def check_sums(self) -> None:
        """Check sums of gradients over micro-batches and ranks, and their squares; all single values are finite."""
        largest, owner = 0.0, ""
        for name, grad in self._gradients():
            if bad := _bad(grad):
                self._record((_AFTER, 0), f"in the sum over micro-batches and ranks of the gradient of {name}: {bad}")
                return
            top = float(grad.abs().max()) if grad.numel() else 0.0
            if top > largest:
                largest, owner = top, name
        if largest > _SQUARE_OVERFLOWS:
            text = f"in the norm itself: every gradient is finite, the largest {largest:.3g} in parameter {owner}"
            self._record((_AFTER, 1, -int(1000 * math.log2(largest))), text)

    def bad_weight(self) -> str:
        """A clause on the first non-finite parameter or buffer of this rank, or ""."""
        for model in self.models:
            for kind, name, value in _named_values(model, self.parallel):
                if bad := _bad(value):
                    return f"{kind} {name} itself holds {bad} (rank {self.parallel.rank})"
        return ""

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for model in self.models:
            for kind, name, p in _named_values(model, self.parallel):
                if kind == "parameter" and (grad := getattr(p, "main_grad", None)) is not None:
                    yield name, grad

    # checks

    def _entering(
        self, stage: int, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def seen(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            self._value(stage, f"the input of module {name}", x)
            if not _gives_gradient(x):
                return x
            x = x.view_as(x)  # its gradient is this module's share only, not the sum over all users of x
            x.register_hook(partial(self._gradient, stage, f"the gradient of the input of module {name}", self._micro))
            return x

        return tuple(map(seen, args)), {key: seen(x) for key, x in kwargs.items()}

    def _left(self, stage: int, name: str, module: Any, args: Any, output: Any) -> None:
        what = "the log-probabilities (output layer)" if name == "model" else f"the output of module {name}"
        for x in _tensors(output):
            self._value(stage, what, x)
            # a linear may return its bias: a hook on a parameter would see other micro-batches, and persist
            if _gives_gradient(x) and not isinstance(x, torch.nn.Parameter):
                x.register_hook(partial(self._gradient, stage, f"the gradient that reaches {what}", self._micro))

    def _loss(self, loss: LossFn, inputs: LossInputs) -> LossOutput:
        stage, logprobs, loss_mask = len(self.models) - 1, inputs.logprobs, inputs.loss_mask
        checked = {name: getattr(inputs, name) for name in _LOSS_INPUTS}
        state = ", ".join(
            f"{name} {_bad(x[loss_mask]) or 'finite'}" for name, x in checked.items() if isinstance(x, Tensor)
        )
        if logprobs.requires_grad:
            logprobs = logprobs.view_as(logprobs)
            what = f"the gradient that the loss function returns (its inputs: {state})"
            logprobs.register_hook(partial(self._gradient, stage, what, self._micro))
        per_token, stats = loss(replace(inputs, logprobs=logprobs))
        self._value(stage, f"the result of the loss function (its inputs: {state})", per_token[loss_mask])
        return per_token, stats

    # records

    @property
    def _micro(self) -> int:
        return self.step.replay.micro

    def _position(self, stage: int) -> int:
        """Index of a virtual stage in forward order."""
        return stage * self.parallel.config.pp + self.parallel.pp_rank

    def _value(self, stage: int, what: str, x: Tensor) -> None:
        self._check((self._micro, _FORWARD, self._position(stage)), what, x)

    def _gradient(self, stage: int, what: str, micro: int | None, grad: Tensor) -> None:
        at = self._micro if micro is None else micro
        self._check((at, _BACKWARD, -self._position(stage)), what, grad)

    def _check(self, order: tuple[int, ...], what: str, x: Tensor) -> None:
        self._seen += 1
        order = (*order, self._seen)
        # a pipeline runs later micro-batches forward before earlier ones backward, so execution order does not decide
        if (self.found is None or order < self.found[0]) and (bad := _bad(x)):
            self._record(order, f"in {what}, {self._where(order[0])}: {bad}")

    def _where(self, micro: int) -> str:
        return f"micro-batch {micro} of data-parallel shard {self.parallel.dp_rank} (rank {self.parallel.rank})"

    def _record(self, order: tuple[int, ...], text: str) -> None:
        if self.found is None or order < self.found[0]:
            self.found = (order, text)

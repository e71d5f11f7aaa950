"""Host copies of further sets of weights for the model: a reference, a teacher. They are swapped with the model's
values for the duration of forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_bridge.device.host_memory import host_like
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.build import unwrap
from megatron_bridge.step.overlap import finish_param_gather
from megatron_bridge.weights.checkpoint import read_weights

_EXCHANGE_ELEMENTS = 1 << 24  # elements of the only temporary an exchange makes


class WeightCopies:
    """Named copies of this rank's parameters and persistent buffers (also the routing bias), one host tensor for each.

    A swap exchanges values, not tensors: a parameter is a view into megatron's buffers, which gather and reduce by
    address. The optimizer is not involved. Its fp32 masters do not change; where weights are fp32 the master is the
    weight itself, which is bitwise restored at the end of the swap. Adapters and frozen weights are copied like any
    others, although a frozen base with its adapters set to zero would be a cheaper reference.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        parallel: ParallelContext,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called whenever the model's values have changed."""
        self._chunks, self._parallel, self._changed = chunks, parallel, changed
        self._models = [unwrap(chunk) for chunk in chunks]
        self._copies: dict[str, list[Tensor]] = {}
        self.current: str | None = None  # the copy whose values the model currently holds

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def keep(self, name: str) -> None:
        """Copy the model's current values; a copy of that name is overwritten."""
        self._finish_param_gather()
        kept = self._copies.get(name)
        if kept is None:
            own = self._live()
            kept = self._copies[name] = host_like(own, own[0].device)
        for live, copy in zip(self._live(), kept, strict=True):
            copy.copy_(live.detach())

    def load(self, name: str, path: Path) -> None:
        """Create a copy from a converted `torch_dist` directory; the model's values do not change. Collective.

        Raises ValueError, without creating a copy, when the directory is missing, incomplete, or of another model.
        """
        self.keep(name)
        try:
            read_weights(path, self._models, self._parallel)
        except BaseException:
            self._exchange(name)
            del self._copies[name]
            raise
        self._exchange(name)

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """A context in which the model holds the copy's values, for forward passes only; afterwards its own values are
        restored bit for bit.

        Raises ValueError when there is no copy of that name.
        """
        if name not in self._copies:
            raise ValueError(
                f"no copy of weights is named {name!r} (copies: {sorted(self._copies)}): keep or load it first"
            )
        self._finish_param_gather()
        self._exchange(name)
        self.current = name
        try:
            with torch.no_grad():
                yield
        finally:
            self.current = None
            self._exchange(name)

    def assert_not_swapped(self) -> None:
        """Assert that the model holds its own values. Call it before training, saving or publishing."""
        assert self.current is None, (
            f"the model has the values of its copy {self.current!r}, which allow forward passes only"
        )

    def _finish_param_gather(self) -> None:
        self.assert_not_swapped()
        finish_param_gather(self._chunks)

    def _live(self) -> list[Tensor]:
        found: list[Tensor] = []
        for model in self._models:
            saved = model.state_dict(keep_vars=True)
            found += list(model.parameters())
            found += [x for name, x in model.named_buffers() if name in saved]
        return found

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        for live, copy in zip(self._live(), self._copies[name], strict=True):
            for a, b in zip(
                live.view(-1).split(_EXCHANGE_ELEMENTS), copy.view(-1).split(_EXCHANGE_ELEMENTS), strict=True
            ):
                held = a.clone()
                a.copy_(b)
                b.copy_(held)
        self._changed()

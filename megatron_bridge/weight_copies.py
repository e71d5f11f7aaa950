"""Further sets of weights for the one model in memory: a reference, a teacher. They wait on the host and change places
with the model's own values while a forward pass needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_bridge.checkpoint import read_weights
from megatron_bridge.model import unwrap
from megatron_bridge.overlap import settle_parameters
from megatron_bridge.parallel import ParallelContext

_AT_ONCE = 1 << 24  # elements of the only temporary an exchange makes


class WeightCopies:
    """Named copies of this rank's parameters and persistent buffers (the routing bias too), one host tensor for each.

    Values change places, tensors do not: a parameter is a view into megatron's buffers, which gather and reduce by
    address. The optimizer is not looked at. Its fp32 masters stay as they are; where weights are fp32 the master is the
    weight itself, and has its own bits back when the exchange ends. Kept adapters or frozen weights are copied like any
    other, though a frozen base with its adapters set to zero would be the cheaper reference.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        parallel: ParallelContext,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called whenever the model has got other values."""
        self._chunks, self._parallel, self._changed = chunks, parallel, changed
        self._models = [unwrap(chunk) for chunk in chunks]
        self._copies: dict[str, list[Tensor]] = {}
        self.current: str | None = None  # the copy whose values the model holds just now

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def keep(self, name: str) -> None:
        """Copy the model's values of this moment; an older copy of that name is overwritten."""
        self._settle()
        kept = self._copies.get(name)
        if kept is None:
            kept = self._copies[name] = [_on_host(x) for x in self._live()]
        for live, copy in zip(self._live(), kept, strict=True):
            copy.copy_(live.detach())

    def load(self, name: str, path: Path) -> None:
        """Fill a copy from a converted `torch_dist` directory; the model has its own values afterwards. Collective.

        Raises ValueError when the directory is missing, incomplete, or of another model; there is no copy then.
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
        """The model holds the copy's values inside, for forward passes only, and its own again after, bit for bit.

        Raises ValueError when there is no copy of that name.
        """
        if name not in self._copies:
            raise ValueError(
                f"no copy of weights is named {name!r}, only {sorted(self._copies)}: keep or load it before it is used"
            )
        self._settle()
        self._exchange(name)
        self.current = name
        try:
            with torch.no_grad():
                yield
        finally:
            self.current = None
            self._exchange(name)

    def assert_own(self) -> None:
        """Whatever trains, saves or publishes the model calls this first."""
        assert self.current is None, f"the model holds the values of its copy {self.current!r}: forward passes only"

    def _settle(self) -> None:
        self.assert_own()
        settle_parameters(self._chunks)

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
            for a, b in zip(live.view(-1).split(_AT_ONCE), copy.view(-1).split(_AT_ONCE), strict=True):
                held = a.clone()
                a.copy_(b)
                b.copy_(held)
        self._changed()


def _on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)

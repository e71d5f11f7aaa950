"""Functions of TransformerEngine's extension for attention over context-parallel ranks in PyTorch: halves of packed
sequences, and sums of softmax over parts of the keys. And the streams of a device, on which nothing runs here.

A rank has two chunks of each sequence, of which the first lies before the other ranks' and the second behind them:
`cu_seqlens` are the ends of its sequences, whose lengths are even. Logarithms of sums of exponentials are [h, T].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Event:
    """torch.cuda.Event where everything has happened when a call returns."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream:
    """torch.cuda.Stream, likewise."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()


def on_stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class _Once:
    """A request of torch.distributed that may be waited for again, as NCCL's may; gloo's would wait for another."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
        self._request = None


def waited_once(communicate: Callable[..., Any]) -> Callable[..., Any]:
    """The package's exchange around the ring, over gloo."""
    return lambda *args: [_Once(request) for request in communicate(*args)]


def _half(cu_seqlens: Tensor, second: bool) -> Tensor:
    """int64: rows of the first or second half of each sequence."""
    starts, lengths = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    assert not any(n % 2 for n in lengths), "a sequence has two chunks of one length"
    return torch.cat(
        [torch.arange(a + n // 2 * second, a + n // 2 * (1 + second)) for a, n in zip(starts, lengths, strict=True)]
    )


def thd_read_half_tensor(x: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """[T, ...] -> [T / 2, ...]"""
    return x.index_select(0, _half(cu_seqlens, bool(half)))


def thd_second_half_lse_correction(lse: Tensor, of_step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    """Adds keys that only the second halves attend to."""
    assert packed, "not emulated"
    rows = _half(cu_seqlens, True)
    lse[:, rows] = torch.logaddexp(lse[:, rows], of_step)


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    """[h, T] -> [h, T / 2]"""
    assert packed, "not emulated"
    return lse[:, _half(cu_seqlens, True)]


def thd_out_correction(
    out: Tensor,
    of_step: Tensor,
    old: Tensor,
    new: Tensor,
    lse_of_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    packed: bool,
) -> None:
    """out [T, h, v] over some keys becomes that over these and those of `of_step`."""
    assert packed, "not emulated"
    rows = _half(cu_seqlens, True) if only_second_half else torch.arange(len(out))
    share, of_new = (x.exp().t()[..., None] for x in (old[:, rows] - new[:, rows], lse_of_step - new[:, rows]))
    out[rows] = (out[rows].float() * share + of_step.float() * of_new).to(out.dtype)


def thd_grad_correction(grad: Tensor, of_step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """Each half of grad [T, ...] takes that of `of_step` by "copy" or "add", becomes "zero" or stays ("none"). of_step
    has both halves, or the one that is taken."""
    taken = {"copy", "add"}
    whole = first in taken and second in taken
    for number, act in enumerate((first, second)):
        rows = _half(cu_seqlens, bool(number))
        if act == "zero":
            grad[rows] = 0
        elif act in taken:
            given = of_step[rows] if whole else of_step
            grad[rows] = given if act == "copy" else grad[rows] + given


def thd_get_partitioned_indices(cu_seqlens: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """int32: a rank's rows of whole sequences."""
    out = []
    for start, n in zip(cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist(), strict=True):
        chunk = n // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            out.append(torch.arange(start + number * chunk, start + (number + 1) * chunk, dtype=torch.int32))
    return torch.cat(out)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "thd_read_half_tensor": thd_read_half_tensor,
    "thd_second_half_lse_correction": thd_second_half_lse_correction,
    "thd_read_second_half_lse": thd_read_second_half_lse,
    "thd_out_correction": thd_out_correction,
    "thd_grad_correction": thd_grad_correction,
    "thd_get_partitioned_indices": thd_get_partitioned_indices,
}

"""Runs functions in a process in which Triton interprets its kernels on CPU tensors. The process has to begin so: what
`triton.jit` returns depends on the environment at that moment.

The interpreter truncates fp32 to BF16 (Triton 3.7), so kernels are compared in fp32.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


def _begin(megatron: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if megatron:
        from megatron_bridge.device.device import init_device

        init_device()  # before a function imports megatron


def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    return pickle.dumps(function(*arguments))  # by value: tensors would be handles that live with the process


@contextmanager
def interpreter(*, megatron: bool = True) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls its first argument with the others in that process, and returns the result.
    megatron: whether they need it, which takes seconds to import."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (megatron,)) as pool:
            yield lambda function, *arguments: pickle.loads(pool.submit(_called, function, arguments).result())
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Lets the trainer choose the kernels for CPU tensors, except attention, which has none for them."""
    from megatron_bridge.model.kernels import chosen, grouped_product

    with patch.object(chosen, "uses_triton", _always), patch.object(grouped_product, "on_device", _always):
        yield


def _always(tensor: Any) -> bool:
    return True

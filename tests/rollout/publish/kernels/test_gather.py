"""A bucket that the Triton kernel gathers has the bytes of one that is copied tensor by tensor: interpreted on a CPU,
and compiled for Hopper and Blackwell. Not covered: a device (tests/gpu/test_handles_cuda.py) and its rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from miles_like.types import NamedTensor
from rollout.publish.kernels import gather
from tests.support.interpreted import interpreter
from tests.support.triton_aot import TARGETS, compiled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter(megatron=False) as run:
        yield run


def _bucket(tensors: list[tuple[str, list[int], str]]) -> list[NamedTensor]:
    """Random bits of (name, shape, dtype), the second of each pair a view with strides."""
    g, out = torch.Generator().manual_seed(0), []
    for i, (name, shape, dtype) in enumerate(tensors):
        kind = getattr(torch, dtype)
        wide = torch.randint(0, 256, (*shape, 2 * kind.itemsize), dtype=torch.uint8, generator=g).view(kind)
        out.append(NamedTensor(name, wide[..., 0] if i % 2 else wide[..., 0].contiguous()))
    return out


def _both(tensors: list[tuple[str, list[int], str]], offset: int) -> tuple[list[int], list[int], float | None]:
    """Bytes of the buffer, which begins `offset` bytes behind a multiple of 16, by the kernel and by copies; the share
    that the kernel has put there."""
    from rollout.publish import buffers
    from rollout.wire.flat import aligned_layout, flat_bytes

    named = _bucket(tensors)
    layout, found = aligned_layout(named), []
    before = buffers.PACKED.now()
    for fused in (True, False):
        memory = torch.full((flat_bytes(layout) + 64,), 7, dtype=torch.uint8)
        at = -memory.data_ptr() % 16 + offset
        buffer = buffers.Buffer(0)
        buffer.memory = memory[at : at + flat_bytes(layout) + 5]
        with patch.object(buffers, "uses_triton", lambda tensor, fused=fused: fused):
            buffers.put(buffer, layout, named)
        found.append(buffer.memory.tolist())
    return found[0], found[1], buffers.PACKED.share_since(before)


BUCKETS: dict[str, list[tuple[str, list[int], str]]] = {
    "codes and scales": [("w", [130, 70], "float8_e4m3fn"), ("s", [2, 1], "float32"), ("n", [37], "bfloat16")],
    "a piece and one byte": [("w", [gather.PIECE + 1], "uint8"), ("b", [3], "bfloat16")],
    "several pieces": [("w", [3 * gather.PIECE // 2], "bfloat16"), ("x", [gather.PIECE // 4], "float32")],
    "an empty tensor": [("e", [0, 4], "bfloat16"), ("one", [1], "uint8")],
}


@pytest.mark.parametrize("offset", [0, 4, 1])
@pytest.mark.parametrize("name", BUCKETS)
def test_the_bytes_are_those_of_copies(interpreted: Callable[..., Any], name: str, offset: int) -> None:
    """And no byte behind the bucket is written."""
    fused, plain, share = interpreted(_both, BUCKETS[name], offset)
    assert fused == plain and plain[-5:] == [7] * 5
    assert share == 0.5


def test_pieces_tile_each_tensor() -> None:
    table = gather.pieces([1000, 5_000_000], [64, 900_000], [2 * gather.PIECE + 3, 10])
    assert table[:, 2].tolist() == [gather.PIECE, gather.PIECE, 3, 10]
    np.testing.assert_array_equal(table[:3, 0] - 1000, table[:3, 1] - 64)
    assert table[3, :2].tolist() == [5_000_000, 900_000] and table.shape == (4, gather._COLUMNS)


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_to_wide_loads_and_stores(target: str) -> None:
    """16 bytes at a time where addresses allow it, enough of them to hide the memory's latency."""
    found = compiled(gather.gather_kernel, {"table": "*i64"}, gather.TILES, target, num_warps=gather.WARPS)
    each = gather.TILES["WORDS"] * 4 // 16 // found.threads
    assert found.count("ld.global.v4") + found.count("ld.global.b128") >= each
    assert found.count("st.global.v4") + found.count("st.global.b128") >= each
    assert found.spills == 0 and found.registers * found.threads <= 1 << 15, "two programs a multiprocessor"

"""Law: a weight difference gives the new tensor bit for bit, or is refused in one sentence; it never gives other bits.

Why it must hold: it is applied to served weights, and the next difference to its result. The oracle reads the format by
hand, with another library's zstd. Not covered: directories of differences (tests/rollout/publish) and how small they
are for real steps (benchmarks/weight_changes.py).
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pyarrow
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.wire.deltas import Delta, DeltaConfig, Kind, content_hash, encode_delta
from tests.support.refusals import refuses

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32)
HEAD = 48  # bytes, before the shape
NAME = "model.norm.weight"


def raw(t: Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bits, those of NaNs among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=g, dtype=torch.uint8).view(dtype).reshape(shape)


def changed(old: Tensor, share: float, seed: int = 1) -> Tensor:
    """The lowest bit of that share of the bytes at each element's start flipped."""
    bits = old.clone().reshape(-1).view(torch.uint8).view(-1, old.dtype.itemsize)
    chosen = torch.rand(len(bits), generator=torch.Generator().manual_seed(seed)) < share
    bits[chosen, 0] ^= 1
    return bits.reshape(-1).view(old.dtype).reshape(old.shape)


def payload_of(old: Tensor | None, new: Tensor) -> bytes:
    return encode_delta(old, b"" if old is None else content_hash(old), new, content_hash(new)).payload


def applied(payload: bytes, old: Tensor) -> Tensor:
    return Delta(NAME, torch.tensor(bytearray(payload), dtype=torch.uint8)).applied(old)


def by_hand(payload: bytes, old: Tensor) -> bytes:
    """The new tensor's bytes."""
    kind, _, dims = payload[:3]
    count = struct.unpack_from("<Q", payload, 8)[0]
    body = payload[HEAD + 8 * dims :]
    if kind == 3:
        return body
    before = bytearray(raw(old))
    if kind == 0:
        return bytes(before)
    width = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}.get(old.dtype, 1)
    size = count * (4 + width) if kind == 1 else len(before)
    planes = pyarrow.decompress(body, size, codec="zstd", asbytes=True)
    if kind == 2:
        places, planes, count = range(len(before) // width), planes, len(before) // width
    else:
        gaps = [sum(planes[b * count + i] << 8 * b for b in range(4)) for i in range(count)]
        places, planes = np.cumsum(gaps).tolist(), planes[4 * count :]
    for i, place in enumerate(places):
        for b in range(width):
            before[place * width + b] ^= planes[b * count + i]
    return bytes(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.6])
def test_the_new_bits_come_back(dtype: torch.dtype, share: float) -> None:
    old = made(dtype, (64, 96))
    new = changed(old, share)
    payload = payload_of(old, new)
    assert raw(applied(payload, old)) == raw(new) == by_hand(payload, old)
    assert len(payload) <= new.nbytes + HEAD + 16
    if share < 0.01:
        assert len(payload) < 0.05 * new.nbytes + HEAD + 16


def test_each_kind_is_taken_where_it_is_the_smallest() -> None:
    old = made(torch.bfloat16, (64, 96))
    kinds = [
        encode_delta(o, content_hash(old), n, content_hash(n)).kind
        for o, n in (
            (old, old.clone()),
            (old, changed(old, 0.02)),
            (old, changed(old, 0.6)),
            (old, made(torch.bfloat16, (64, 96), seed=7)),
            (old, made(torch.bfloat16, (64, 97))),
            (None, old),
        )
    ]
    assert kinds == [Kind.SAME, Kind.SPARSE, Kind.DENSE, Kind.WHOLE, Kind.WHOLE, Kind.WHOLE]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    old = made(torch.float32, shape)
    for new in (old.clone(), changed(old, 0.5), made(torch.float32, shape, seed=2)):
        found = applied(payload_of(old, new), old)
        assert raw(found) == raw(new) and found.shape == new.shape and found.dtype is new.dtype


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 399), st.integers(1, 255)), max_size=40),
)
def test_any_bytes_that_change(dtype: torch.dtype, elements: int, flips: list[tuple[int, int]]) -> None:
    old = made(dtype, (elements,))
    bits = old.clone().view(torch.uint8)
    for at, by in flips:
        bits[at % len(bits)] ^= by
    new = bits.view(dtype)
    payload = payload_of(old, new)
    assert raw(applied(payload, old)) == raw(new) == by_hand(payload, old)


def test_a_difference_is_applied_to_its_base_alone() -> None:
    old, other = made(torch.bfloat16, (8, 16)), made(torch.bfloat16, (8, 16), seed=3)
    for new in (old.clone(), changed(old, 0.1), changed(old, 0.9)):
        payload = payload_of(old, new)
        with refuses(ValueError, NAME):
            applied(payload, other)
        with refuses(ValueError, NAME, "[8, 17]", "[8, 16]"):
            applied(payload, made(torch.bfloat16, (8, 17)))
        with refuses(ValueError, NAME, "torch.float16", "torch.bfloat16"):
            applied(payload, old.view(torch.float16))
        assert raw(old) == raw(made(torch.bfloat16, (8, 16))), "the old tensor is not changed"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_a_damaged_difference_gives_no_other_bits(share: float) -> None:
    """Every byte flipped, and every length."""
    old = made(torch.bfloat16, (8, 16))
    new = made(torch.bfloat16, (8, 16), seed=4) if share == 1 else changed(old, share)
    payload = payload_of(old, new)
    refused = 0
    for at in range(len(payload)):
        for damaged in (payload[:at], payload[:at] + bytes([payload[at] ^ 0x41]) + payload[at + 1 :]):
            try:
                found = applied(damaged, old)
            except ValueError as e:
                assert NAME in str(e) and len(str(e)) < 300
                refused += 1
            else:  # a byte of the header that says nothing about this kind
                assert raw(found) == raw(new)
    assert refused > 2 * len(payload) - 40


def _header(payload: bytes, **changes: int) -> bytes:
    fields = list(struct.unpack_from("<BBBxIQ16s16s", payload))
    for name, value in changes.items():
        fields[("kind", "dtype", "dims", "format", "count").index(name)] = value
    return struct.pack("<BBBxIQ16s16s", *fields) + payload[HEAD:]


def test_hostile_sizes_take_no_memory() -> None:
    """Frames that unpack to 64 GiB, headers that count more than there is, shapes of 2^120 bytes."""
    old = made(torch.bfloat16, (8, 16))
    payload = payload_of(old, changed(old, 0.1))
    head, shape = payload[:HEAD], payload[HEAD : HEAD + 16]
    one = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 4096)
    promise = bytearray(zstandard.ZstdCompressor().compress(b"\0" * (1 << 20)))
    size = zstandard.get_frame_parameters(bytes(promise)).content_size
    at = bytes(promise).index(struct.pack("<I", size))
    promise[at : at + 4] = b"\xff\xff\xff\x7f"
    for body in (one, bytes(promise)):
        with refuses(ValueError, NAME):
            applied(head + shape + body, old)
    with refuses(ValueError, NAME, 1 << 60, 128):
        applied(_header(payload, count=1 << 60), old)
    with refuses(ValueError, NAME):
        applied(head + struct.pack("<2Q", 1 << 60, 1 << 60) + payload[HEAD + 16 :], old)
    for changes in ({"kind": 9}, {"dtype": 200}, {"dims": 255}, {"format": 2}):
        with refuses(ValueError, NAME):
            applied(_header(payload, **changes), old)
    places = np.array([127, 1], "<u4").tobytes()
    planes = bytes(places[b] for b in (0, 4, 1, 5, 2, 6, 3, 7)) + b"\1\1\0\0"
    with refuses(ValueError, NAME, 128):
        applied(_header(head + shape, count=2) + zstandard.ZstdCompressor().compress(planes), old)


@pytest.mark.parametrize("tensor", [torch.zeros(60, dtype=torch.int32), torch.zeros(6, 60, dtype=torch.uint8)])
def test_what_is_no_difference_is_refused(tensor: Tensor) -> None:
    with refuses(ValueError, NAME):
        Delta(NAME, tensor)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({}, "delta"),
        ({"delta": 3}, "delta"),
        ({"delta": {"format": 2, "base": "1", "version": "2"}}, "delta.format"),
        ({"delta": {"base": "1"}}, "delta.version"),
    ],
)
def test_a_directory_of_something_else_is_refused(config: dict[str, object], fact: str) -> None:
    with refuses(ValueError, fact, "/shared/version_2"):
        DeltaConfig.of(config, "/shared/version_2")


def test_versions_are_text() -> None:
    config = DeltaConfig(base="3", version="4")
    assert DeltaConfig.of(config.to_json(), "x") == config
    assert all(a < b for a, b in pairwise(Kind))

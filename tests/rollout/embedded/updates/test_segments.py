"""A description of a segment is read like any hostile request: what it says of other memory is refused in a sentence,
and the server neither ends nor allocates what was not sent.

Not covered: that clients of other hosts are refused (tests/rollout/embedded/server/test_weights_by_handle.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.types import NamedTensor
from rollout.embedded.updates import segments
from rollout.embedded.updates.segments import read_segment
from rollout.publish.buffers import Pool, Segment
from rollout.wire.flat import encode_segment
from tests.support.refusals import refuses

MOST = 1 << 14
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int64)


def tensors() -> list[NamedTensor]:
    """Of all sizes of elements, in an order in which they would not be aligned, one of them empty and one a scalar."""
    g = torch.Generator().manual_seed(0)
    out = []
    for i, dtype in enumerate(reversed(DTYPES)):
        raw = torch.randint(0, 255, (3, 5, dtype.itemsize), generator=g, dtype=torch.uint8)
        out.append(NamedTensor(f"w{i}", raw.view(dtype).reshape(3, 5)))
    return [*out, NamedTensor("none", torch.zeros(0, 4)), NamedTensor("one", torch.tensor(2.5))]


@pytest.fixture
def segment() -> Iterator[Segment]:
    pool = Pool(Segment)
    yield pool.holding(tensors())
    pool.close()


def description(segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_segment(segment.name, segment.layout))
    return found


def read(changed: object) -> list[NamedTensor]:
    return read_segment(changed if isinstance(changed, str) else json.dumps(changed), MOST)


def test_what_is_read_is_what_was_written(segment: Segment) -> None:
    found = dict(read(description(segment)))
    wanted = dict(tensors())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    memory = {t.untyped_storage().data_ptr() for t in found.values() if t.numel()}
    assert len(memory) == len(wanted) - 1, "a tensor that is kept keeps others"
    assert all(t.start % t.dtype.itemsize == 0 for t in segment.layout)


def test_other_memory_is_not_read(segment: Segment, tmp_path: Path) -> None:
    body = description(segment)
    for name in ("/etc/passwd", "/miles-like-../../etc/passwd", "/psm_1234", "", "/miles-like-" + "0" * 31 + "\n"):
        with refuses(ValueError, repr(name), "32 hexadecimal digits"):
            read(body | {"segment": name})
    with refuses(ValueError, "/miles-like-" + "0" * 32, "/dev/shm"):
        read(body | {"segment": "/miles-like-" + "0" * 32})
    link = segments.DIRECTORY / ("miles-like-" + "1" * 32)
    link.symlink_to("/proc/self/environ")
    try:
        with refuses(ValueError, f"/{link.name}", "/dev/shm"):
            read(body | {"segment": f"/{link.name}"})
    finally:
        link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_memory_of_another_user_is_not_read(segment: Segment) -> None:
    os.chown(segments.DIRECTORY / segment.name[1:], 12345, 12345)
    with refuses(ValueError, segment.name, "user"):
        read(description(segment))


def test_tensors_beyond_the_segment_are_not_read(segment: Segment) -> None:
    body = description(segment)
    first = body["tensors"][0]
    size = sum(t.nbytes for t in segment.layout)
    for changed in ({"start": size}, {"shape": [size]}, {"start": 1 << 48}):
        with refuses(ValueError, segment.name, size, first["name"], unrecorded="sizes differ"):
            read(body | {"tensors": [first | changed]})
    with refuses(ValueError, segment.name, f"{MOST:,}", "--bucket-bytes"):
        read(body | {"tensors": [first | {"shape": [1 << 20, 1 << 20]}]})
    many = [first | {"name": f"w{i}", "shape": [8]} for i in range(MOST // 64 + 1)]  # each within, all of one place
    with refuses(ValueError, segment.name, f"{MOST:,}", "--bucket-bytes"):
        read(body | {"tensors": many})


def test_a_segment_that_is_cut_while_it_is_read_does_not_end_the_server(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of its size is before."""

    def cut(fd: int, buffers: Any, at: int) -> int:
        os.truncate(segments.DIRECTORY / segment.name[1:], 0)
        return preadv(fd, buffers, at)

    preadv = os.preadv
    monkeypatch.setattr(segments.os, "preadv", cut)
    with refuses(ValueError, segment.name):
        read(description(segment))


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        pytest.param("[", ("JSON",), id="no JSON"),
        pytest.param("[]", (), id="no object"),
        pytest.param({"tensors": []}, ("tensors",), id="nothing"),
        pytest.param({"tensors": [{"name": "w"}]}, ("dtype",), id="half an entry"),
        pytest.param({"dtype": "complex64"}, ("complex64",), id="complex"),
        pytest.param({"dtype": "nn"}, ("nn",), id="no dtype"),
        pytest.param({"start": -1}, ("start", -1), id="before"),
        pytest.param({"shape": [-1]}, ("shape", -1), id="negative"),
        pytest.param({"shape": [1] * 9}, ("shape",), id="many dimensions"),
        pytest.param({"name": ""}, ("name",), id="no name"),
    ],
)
def test_what_is_no_description_is_refused(segment: Segment, changed: Any, facts: tuple[object, ...]) -> None:
    body = description(segment)
    if isinstance(changed, dict):
        entries = changed.get("tensors", [body["tensors"][0] | changed])
        changed = body | {"tensors": entries}
    with refuses(ValueError, *facts):
        read(changed)

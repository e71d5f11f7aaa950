"""Law: the host memory of a publication does not grow with the model.

Why it must hold: of a model of 1 T parameters the sender has room for a small part, and a host whose memory ends kills
the process without a message. A process publishes weights that it makes one at a time; the operating system reports its
peak. Not covered: memory of GPUs; the gather (miles_like/planning/memory/gathering.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.types import NamedTensor
from quant.spec import QuantFormat, QuantSpec
from rollout.config import PublishConfig
from rollout.publish.buckets import HostBytes
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from tests.support.fakes import FakeServer
from tests.support.spawn import warm_context

MIB = 1 << 20
COUNT, EACH = 128, 4 * MIB  # tensors, bytes: 512 MiB in all
BUCKET, HOLD = 8 * MIB, 16 * MIB


class _Sink(FakeServer):
    """Forgets the weights that it is sent."""

    def _update_weights_from_tensor(self, body: Any) -> tuple[int, Any]:
        self.calls.clear()
        return 200, {"success": True, "message": ""}

    def _update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        return 200, {"success": True, "message": ""}


def _stream() -> Iterator[NamedTensor]:
    for i in range(COUNT):
        yield NamedTensor(f"model.layers.{i}.mlp.up_proj.weight", torch.randn(1024, EACH // 2048).bfloat16())


def _status(key: str) -> int:
    """Bytes, of this process."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def _peak(url: str, path: str, hold: int, spec: QuantSpec | None, where: Path, found: Any) -> None:
    """Puts (growth of the process while it publishes, bytes sent, HostBytes.peak)."""
    config = PublishConfig(path=path, bucket_bytes=BUCKET, hold_bytes=hold)  # type: ignore[arg-type]
    target = PublishTarget(urls=(url,), kind="embedded", spec=spec, config=config, timeout_s=60.0)
    publisher: Any
    if path == "tensor":
        publisher = TensorPublisher(target, send=True)
    else:
        publisher = DiskPublisher(target, SharedDirectory(path=where, hf_config={"model_type": "x"}, copy_from=None))
    _ = torch.randn(1024, 1024).bfloat16()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    report = publisher.publish(_stream(), version=1)
    own = publisher.host.peak if path == "tensor" else 0
    found.put((_status("VmHWM") - before, report.bytes, own))


def peak(path: str, where: Path, hold: int = HOLD, spec: QuantSpec | None = None) -> tuple[int, int, int]:
    context = warm_context()
    with _Sink() as server:
        found: Any = context.SimpleQueue()
        process = context.Process(target=_peak, args=(server.url, path, hold, spec, where, found))
        process.start()
        process.join(100)
        assert process.exitcode == 0
        return tuple(found.get())


LONG = pytest.mark.long(beside="tests/rollout/publish/test_held_memory.py")
CASES = [("tensor", None), ("disk", QuantFormat.FP8)]
LATER = [("tensor", QuantFormat.FP8), ("disk", None)]


@pytest.mark.parametrize(("path", "format"), [*CASES, *(pytest.param(*case, marks=LONG) for case in LATER)])
def test_the_peak_is_bounded(path: str, format: QuantFormat | None, tmp_path: Path) -> None:
    """By buckets and their text where they are sent, and by a few tensors where they are written."""
    grown, sent, own = peak(path, tmp_path / "published", spec=None if format is None else QuantSpec(format=format))
    bound = HostBytes(HOLD, BUCKET).bound
    assert sent >= COUNT * EACH // (1 if format is None else 2)
    if path == "tensor":
        assert HOLD < own < bound, "what it counts"
        assert grown < 300 * MIB < 0.6 * COUNT * EACH, "with the text of requests, and what the allocator keeps"
    else:
        assert grown < 100 * MIB


@LONG
def test_the_measure_sees_what_is_held(tmp_path: Path) -> None:
    grown, sent, own = peak("tensor", tmp_path, hold=COUNT * EACH)
    assert grown > sent and own == sent


def test_more_than_the_bound_is_an_error() -> None:
    host = HostBytes(4 * MIB, MIB)
    for _ in range(7):
        host.take(MIB)
    with pytest.raises(AssertionError, match=f"{7 * MIB + 1} .* {7 * MIB}"):
        host.take(1)
    host.give(1)
    host.give(MIB)
    host.take(3 * MIB)  # a tensor that is larger than a bucket has room too

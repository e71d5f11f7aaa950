"""A CUDA IPC handle, in the pickle that stock SGLang reads, opens the bucket that was packed, in another process that
numbers the devices in another way; each rank has its own handle, and the memory is given back.

A process without SGLang opens it: `tests/support/stock_pickles.py` stands in for the two functions of SGLang that the
pickle names. Not covered: SGLang itself; readers on another GPU than the sender's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from miles_like.types import NamedTensor
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire.checksum import tensor_checksum
from tests.support.fakes import FakeServer
from tests.support.spawn import warm_context
from tests.support.stock_pickles import opened

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TP = 2
SPEC = QuantSpec(format=QuantFormat.FP8)


def weights() -> list[NamedTensor]:
    g = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.mlp.{name}_proj.weight" for i in range(12) for name in ("gate", "up", "down")]
    return [NamedTensor(n, torch.randn(512, 512, generator=g).bfloat16().cuda()) for n in names]


def read(line: Any) -> None:
    """Checksums of the tensors of each payload that comes; ends at None."""
    while (payload := line.recv()) is not None:
        tensors = opened(payload)
        assert all(t.is_cuda for _, t in tensors)
        line.send({name: tensor_checksum(name, t) for name, t in tensors})
        del tensors
        torch.cuda.ipc_collect()


def test_every_rank_opens_its_handle_of_the_packed_bucket() -> None:
    ours, theirs = warm_context().Pipe()
    reader = warm_context().Process(target=read, args=(theirs,), daemon=True)
    reader.start()
    found: list[dict[str, str]] = [{} for _ in range(TP)]
    with FakeServer() as server:

        def take(body: Any) -> tuple[int, Any]:
            assert body["load_format"] == "flattened_bucket" and len(set(body["serialized_named_tensors"])) == TP
            for rank, payload in enumerate(body["serialized_named_tensors"]):
                ours.send(payload)
                found[rank] |= ours.recv()
            return 200, {"success": True, "message": ""}

        server._update_weights_from_tensor = take  # type: ignore[method-assign]
        target = PublishTarget(
            urls=(server.url,),
            kind="sglang",
            spec=SPEC,
            config=PublishConfig(bucket_bytes=1 << 20, verify=False),
            tp_size=TP,
            handles="cuda",
        )
        stream = weights()
        wanted = {name: tensor_checksum(name, t) for name, t in quantize_stream(stream, SPEC)}
        before = torch.cuda.memory_allocated()
        TensorPublisher(target, send=True).publish(stream, version=1)
        assert found == [wanted] * TP
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() <= before + (1 << 20), "buckets are kept"
    ours.send(None)
    reader.join(30)

"""Weights that are published to an engine on a device are there, and are those that were sent: by tensors, by a
directory, by differences.

The device is pretended (tests/support/pretended_cuda.py), and may be waited for: no step runs. Not covered: the release
of memory, which these tensors have none of (tests/gpu/test_embedded_cuda.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.hf.checkpoint import write_hf
from miles_like.types import NamedTensor
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.server.service import Service
from rollout.wire.checksum import tensor_checksum
from rollout.wire.deltas import DeltaConfig, content_hash, encode_delta
from tests.support.pretended_cuda import pretended
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

FORM = QuantSpec(format=QuantFormat.FP8)
HF = tiny(num_hidden_layers=2, n_routed_experts=4, n_group=2, num_experts_per_tok=2, topk_group=1)


def stored(seed: int) -> dict[str, Tensor]:
    return dict(quantize_stream(random_tensors(HF, seed).items(), FORM))


def by_tensors(served: Service, where: Path, new: dict[str, Tensor]) -> None:
    served.begin_update("1")
    served.update([NamedTensor(n, t) for n, t in new.items()], flush_cache=True, version="1")
    served.end_update("1")


def by_directory(served: Service, where: Path, new: dict[str, Tensor]) -> None:
    write_checkpoint(where, quantized_config(HF, FORM), new)
    served.update_from_disk(where, flush_cache=True, version="1")


def by_differences(served: Service, where: Path, new: dict[str, Tensor]) -> None:
    old = stored(0)
    coded = {n: encode_delta(old[n], content_hash(old[n]), t, content_hash(t)).payload for n, t in new.items()}
    raw = {n: torch.frombuffer(bytearray(payload), dtype=torch.uint8) for n, payload in coded.items()}
    write_hf(where, iter(raw.items()), DeltaConfig(base="0", version="1").to_json(), shard_bytes=1 << 30)
    served.load_delta(where, flush_cache=True, version="1")


@pytest.mark.parametrize("publish", [by_tensors, by_directory, by_differences])
@pytest.mark.parametrize("weights", ["decoded", "codes"])
def test_published_weights_are_on_the_device(publish: Any, weights: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "old", quantized_config(HF, FORM), stored(0))
    limits, new = EngineLimits(max_total_tokens=64, context_length=64), stored(1)
    new["model.norm.weight"] = stored(0)["model.norm.weight"]  # one that does not change
    with pretended(set(), set()) as mode, mode.unchecked():
        served = Service(tmp_path / "old", limits, device="cuda", weights=weights, version="0")
        publish(served, tmp_path / "new", new)
        assert served.checksums() == {n: tensor_checksum(n, t) for n, t in new.items()}
        assert all(t.is_cuda for t in served.part._tensors())
    assert served.engine.version == "1"

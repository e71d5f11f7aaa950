"""Small checkpoints of every family and format, other weights of them, and publications to their servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from megatron_bridge.families.registry import family_of
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.buffers import DIRECTORY
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire.checksum import tensor_checksum
from tests.support.tiny_models import (
    random_tensors,
    tiny,
    tiny_dense,
    tiny_glm,
    tiny_kimi,
    tiny_qwen,
    write_checkpoint,
)

_SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 4}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "deepseek": tiny(**_SMALL, **_EXPERTS, n_routed_experts=8),
    "kimi": tiny_kimi(**_SMALL, **_EXPERTS, n_routed_experts=8),
    "qwen": tiny_dense(**_SMALL),
    "qwen_moe": tiny_qwen(**_SMALL, **_EXPERTS, num_experts=8, mlp_only_layers=[]),
    "glm": tiny_glm(**_SMALL, **_EXPERTS, n_routed_experts=8),
}
FORMATS: Mapping[str, QuantSpec | None] = {
    "bf16": None,
    "fp8": QuantSpec.of(QuantFormat.FP8),
    "int4": QuantSpec.of(QuantFormat.INT4),
}
SIZES = (1, 20_000, 1 << 30)  # bytes of a bucket: one module each, some, all


class Published:
    """One family in one format."""

    def __init__(self, family: str, format: str) -> None:
        self.hf, self.spec = FAMILIES[family], FORMATS[format]
        self.fused = family_of(self.hf).bind(self.hf).fused()

    def weights(self, seed: int) -> list[NamedTensor]:
        return [NamedTensor(name, tensor) for name, tensor in random_tensors(self.hf, seed).items()]

    def encoded(self, seed: int) -> dict[str, Tensor]:
        return dict(quantize_stream(self.weights(seed), self.spec))

    def sums(self, seed: int) -> dict[str, str]:
        """What the embedded server reports of these weights."""
        return {name: tensor_checksum(name, tensor) for name, tensor in self.encoded(seed).items()}

    def checkpoint(self, path: Path) -> Path:
        """Of seed 0."""
        stored = self.encoded(0)
        config = quantized_config(self.hf, self.spec, [n for n, _ in self.weights(0)])
        return write_checkpoint(path, config, stored)

    def target(
        self,
        urls: Iterable[str],
        path: Literal["tensor", "distributed"] = "tensor",
        *,
        bucket_bytes: int = 1 << 30,
        **options: Any,
    ) -> PublishTarget:
        config = PublishConfig(path=path, bucket_bytes=bucket_bytes)
        defaults: dict[str, Any] = {"kind": "embedded", "timeout_s": 60.0}
        return PublishTarget(urls=tuple(urls), config=config, spec=self.spec, fused=self.fused, **(defaults | options))

    def publish(self, target: PublishTarget, seed: int, version: int) -> PublishReport:
        return TensorPublisher(target, send=True).publish(self.weights(seed), version=version)


def with_buckets_of(target: PublishTarget, nbytes: int) -> PublishTarget:
    return replace(target, config=target.config.model_copy(update={"bucket_bytes": nbytes}))


def mapped_segments(pid: int) -> set[Path]:
    """Segments of weights that a process has mapped; other tests make some at the same time."""
    paths = (line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {Path(path) for path in paths if path.startswith(f"{DIRECTORY}/miles-like-")}

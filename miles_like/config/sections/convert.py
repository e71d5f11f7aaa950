"""Settings of the conversion. Torch-free."""

from __future__ import annotations

from pydantic import Field

from miles_like.section import Section


class ConvertConfig(Section):
    """Conversion of the checkpoint to Megatron shards."""

    fuse: bool = False  # dequantize during conversion, without a BF16 directory
    memory_limit_gib: float = Field(4.0, gt=0)  # resident memory of all processes on one node
    workers: int = Field(1, ge=1)  # processes on each node

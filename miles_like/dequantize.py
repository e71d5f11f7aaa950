"""An FP8 checkpoint as a bf16 one: what the trainer starts from, as the FP8 codes are what the rollout starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from miles_like.hf_checkpoint import HFCheckpoint, write_hf
from quant.fp8_block import SCALE_SUFFIX
from quant.spec import QuantSpec
from quant.stream import dequantize_stream


def dequantize_checkpoint(src: Path | str, dst: Path | str, *, shard_bytes: int = 5 << 30) -> int:
    """Write the model directory `src` to `dst` with every FP8 weight as bf16; return the bytes of tensor data.

    Tensor by tensor: at no time are more than a few of them in memory. The configuration loses `quantization_config`,
    names and order stay, everything that was not quantized is copied bit by bit, tokenizer files too. A checkpoint that
    is not quantized is copied. Raises ValueError naming a tensor that is not finite or lacks its scale or its weight,
    and as `HFCheckpoint` and `write_hf` do.
    """
    hf = HFCheckpoint(src)
    spec = QuantSpec.from_hf(hf.config, reading=True)
    config = {k: v for k, v in hf.config.items() if k != "quantization_config"}

    def scale(name: str) -> Tensor | None:
        return hf.read(name) if name in hf else None

    return write_hf(
        dst,
        _finite(dequantize_stream(hf.stream(), spec, torch.bfloat16, lookup=scale)),
        config,
        copy_from=src,
        shard_bytes=shard_bytes,
        nbytes=dequantized_bytes(hf),
    )


def dequantized_bytes(hf: HFCheckpoint) -> int:
    """Bytes of tensor data that `dequantize_checkpoint` will write: two for each FP8 code, none for scales."""
    total = 0
    for name in hf.names():
        info = hf.info(name)
        if not (name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in hf):
            total += info.nbytes * (2 if info.dtype is torch.float8_e4m3fn else 1)
    return total


def is_plain(hf: HFCheckpoint) -> bool:
    """Nothing to dequantize. FP8 codes without `quantization_config` are not: `dequantize_checkpoint` refuses them."""
    coded = any(hf.info(name).dtype is torch.float8_e4m3fn for name in hf.names())
    return not coded and QuantSpec.from_hf(hf.config, reading=True) is None


def _finite(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} has NaN or infinite values: fetch the checkpoint again")
        yield name, tensor

"""Convert a quantized checkpoint to bf16, from which the trainer starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.convert.hf_manifest import Sums
from megatron_bridge.convert.units import Watch, unwatched
from miles_like.hf.checkpoint import HFCheckpoint, unfinished, write_hf
from quant.hf_config import quantized_config, spec_from_hf
from quant.registry import codec_or_none
from quant.stream import coded_weight_of, dequantize_stream, is_foreign


def dequantize_checkpoint(
    src: Path | str,
    dst: Path | str,
    *,
    shard_bytes: int = 5 << 30,
    manifest: bool = False,
    watch: Watch = unwatched,
) -> int:
    """Write the model directory `src` to `dst` with every quantized weight as bf16; return the bytes of tensor data.

    Only a few tensors are in memory at a time. `quantization_config` is removed from the configuration; names, order,
    unquantized tensors and tokenizer files are kept bit by bit. An unquantized checkpoint is copied. `manifest`: write
    one, for which all files are read once more; the stages of a run hash what they write themselves. `watch` shows the
    progress. Raises ValueError naming a tensor that is not finite or lacks its scale or its weight, and as
    `HFCheckpoint` and `write_hf` do.
    """
    hf = HFCheckpoint(src)
    spec = spec_from_hf(hf.config)

    def part(name: str) -> Tensor | None:
        return hf.read(name) if name in hf else None

    tensors = _finite(dequantize_stream(hf.stream(), spec, torch.bfloat16, lookup=part))
    sums, nbytes = Sums() if manifest else None, dequantized_bytes(hf)
    with watch(unfinished(dst), nbytes):
        return write_hf(
            dst,
            tensors if sums is None else sums.of(tensors),
            quantized_config(hf.config, None),
            copy_from=src,
            shard_bytes=shard_bytes,
            nbytes=nbytes,
            beside=None if sums is None else sums.write,
        )


def dequantized_bytes(hf: HFCheckpoint) -> int:
    """Bytes of tensor data that `dequantize_checkpoint` will write: two per quantized weight, none for scales."""
    codec = codec_or_none(spec_from_hf(hf.config))
    total = 0
    for name in hf.names():
        info = hf.info(name)
        part = coded_weight_of(codec, name, info.dtype)
        if codec is None or (part is None and name.rpartition(".")[2] not in codec.dropped):
            total += info.nbytes
        elif part is not None and part[1] == codec.leaves[0]:
            total += 2 * math.prod(codec.shape_of({part[1]: info.shape}, part[0]))
    return total


def is_unquantized(hf: HFCheckpoint) -> bool:
    """Whether there is nothing to dequantize. False too for quantized tensors without `quantization_config`, which
    `dequantize_checkpoint` refuses."""
    return spec_from_hf(hf.config) is None and not any(is_foreign(name, hf.info(name).dtype) for name in hf.names())


def _finite(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        check_finite(name, tensor)
        yield name, tensor


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises ValueError naming the tensor."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = (float(x) for x in torch.aminmax(tensor))  # both are NaN if a value is; faster than isfinite
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{name} has NaN or infinite values: fetch the checkpoint again")

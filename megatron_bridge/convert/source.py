"""The tensors of a Hugging Face checkpoint as the model has them, by rows: BF16 and FP32 as stored, block FP8 decoded.

FP8 is decoded a run of whole blocks of rows at a time by `quant/`, so no BF16 copy of the checkpoint is ever made. A
weight and its scales may lie in different files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles_like.hf_checkpoint import HFCheckpoint, TensorInfo
from quant.fp8_block import SCALE_SUFFIX, Fp8BlockCodec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import dequantize_stream

_CODES = torch.float8_e4m3fn
DECODED = torch.bfloat16
"""What FP8 weights are decoded to, as `miles-like dequantize` does."""


_SCRATCH = 28
"""Bytes an element of a band, as seen."""


@dataclass(frozen=True)
class Source:
    """Picklable; no file stays open."""

    hf: HFCheckpoint
    spec: QuantSpec | None

    @classmethod
    def open(cls, path: Path | str) -> Source:
        """Raises ValueError as HFCheckpoint does, and naming FP8 codes without their scale or without a
        `quantization_config`, a scale without its codes, or scales that do not fit."""
        hf = HFCheckpoint(path)
        source = cls(hf, QuantSpec.from_hf(hf.config, reading=True))
        source._check_scales()
        return source

    def names(self) -> list[str]:
        """Of all weights, in the order of the files and of the data in each; scales are not weights."""
        return [name for name in self.hf.names() if not name.endswith(SCALE_SUFFIX)]

    def __contains__(self, name: str) -> bool:
        return name in self.hf and not name.endswith(SCALE_SUFFIX)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.hf.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """As `rows` gives it."""
        return DECODED if self.is_coded(name) else self.hf.info(name).dtype

    def nbytes(self, name: str) -> int:
        """Of the whole tensor, as `rows` gives it."""
        info = self.hf.info(name)
        return info.nbytes // info.dtype.itemsize * self.dtype(name).itemsize

    def is_coded(self, name: str) -> bool:
        return self.hf.info(name).dtype is _CODES

    def block_rows(self, name: str) -> int:
        """Rows that are cheap to take together: a block's, or one."""
        return self.spec.block[0] if self.is_coded(name) and self.spec is not None else 1

    def scratch(self, name: str) -> int:
        """Bytes that decoding needs besides codes and result: what `quant` works on at once, in fp32 and indices."""
        if not self.is_coded(name):
            return 0
        return _SCRATCH * max(1 << 20, self.block_rows(name) * self.shape(name)[1])

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """Everything that `rows` reads for a tensor."""
        info = self.hf.info(name)
        return (info, self.hf.info(name + SCALE_SUFFIX)) if self.is_coded(name) else (info,)

    def rows(self, name: str, a: int, b: int, buffer: memoryview | None = None) -> Tensor:
        """Rows [a, b) of the first axis (some, where they are coded), in storage of exactly their size; where nothing
        is decoded that is `buffer`, if given.

        Raises ValueError for scales or codes that are not finite, and when the file has been cut since it was opened.
        """
        if not self.is_coded(name):
            return self.hf.read_rows(name, a, b, buffer)
        assert self.spec is not None
        block, n = self.spec.block[0], self.shape(name)[0]
        first, last = a // block * block, min(n, -(-b // block) * block)  # what scales belong to
        codes = self.hf.read_rows(name, first, last, buffer)
        scales = self.hf.read_rows(name + SCALE_SUFFIX, first // block, -(-last // block))
        ((_, decoded),) = dequantize_stream([(name, codes)], self.spec, DECODED, lookup=lambda _: scales)
        return decoded if (first, last) == (a, b) else decoded[a - first : b - first].clone()

    def _check_scales(self) -> None:
        """From the headers alone, for the whole checkpoint."""
        codec = Fp8BlockCodec(self.spec) if self.spec is not None and self.spec.format is QuantFormat.FP8 else None
        for name in self.hf.names():
            if name.endswith(SCALE_SUFFIX):
                weight = name.removesuffix(SCALE_SUFFIX)
                if weight not in self.hf or not self.is_coded(weight):
                    raise ValueError(f"{name}: a scale without its FP8 weight {weight}: fetch the checkpoint again")
            elif self.is_coded(name):
                self._check_coded(name, codec)

    def _check_coded(self, name: str, codec: Fp8BlockCodec | None) -> None:
        if codec is None:
            raise ValueError(
                f"{name}: FP8 codes, but config.json has no FP8 quantization_config: use the config.json that belongs "
                "to these weights"
            )
        shape = self.shape(name)
        if name + SCALE_SUFFIX not in self.hf:
            raise ValueError(f"{name}: FP8 codes without their scale {name}{SCALE_SUFFIX}: fetch the checkpoint again")
        scale = self.hf.info(name + SCALE_SUFFIX)
        if len(shape) != 2:
            raise ValueError(f"{name}: FP8 codes are 2-D, these are {shape}")
        want = codec.scale_shape(shape)
        if scale.shape != want or scale.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name}{SCALE_SUFFIX}: {scale.dtype} {scale.shape}; a weight {shape} in blocks of {codec.block} has "
                f"float32 {want}: is weight_block_size in config.json right?"
            )

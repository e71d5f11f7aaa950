"""The tensors of a Hugging Face checkpoint as the model has them, by rows: BF16 and FP32 as stored, quantized weights
decoded.

They are decoded a run of whole blocks of rows at a time by `quant/`, so no BF16 copy of the checkpoint is ever made.
The parts of a weight may lie in different files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from miles_like.hf_checkpoint import HFCheckpoint, TensorInfo
from quant.codec import Codec, Part
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import part_of, refuse_foreign, stored_name

DECODED = torch.bfloat16
"""What quantized weights are decoded to, as `miles-like dequantize` does."""


_SCRATCH = 28
"""Bytes an element of a band, as seen."""


@dataclass(frozen=True)
class Source:
    """Picklable; no file stays open."""

    hf: HFCheckpoint
    spec: QuantSpec | None

    @classmethod
    def open(cls, path: Path | str) -> Source:
        """Raises ValueError as HFCheckpoint does, and naming codes without their scales or without a
        `quantization_config`, scales without their codes, or parts that do not fit."""
        hf = HFCheckpoint(path)
        source = cls(hf, spec_from_hf(hf.config))
        source._check_parts()
        return source

    @cached_property
    def codec(self) -> Codec | None:
        return codec_or_none(self.spec)

    def names(self) -> list[str]:
        """Of all weights, in the order of the files and of the data in each; a quantized one is where its codes are."""
        return [name for name, leaf in self._stored() if leaf is None or leaf == self._codes]

    def __contains__(self, name: str) -> bool:
        return self.is_coded(name) or (name in self.hf and self._part(name) is None and not self._drops(name))

    def shape(self, name: str) -> tuple[int, ...]:
        if self.codec is None or not self.is_coded(name):
            return self.hf.info(name).shape
        return self.codec.shape_of({self._codes: self.hf.info(stored_name(name, self._codes)).shape}, name)

    def dtype(self, name: str) -> torch.dtype:
        """As `rows` gives it."""
        return DECODED if self.is_coded(name) else self.hf.info(name).dtype

    def nbytes(self, name: str) -> int:
        """Of the whole tensor, as `rows` gives it."""
        return torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize

    def is_coded(self, name: str) -> bool:
        codes = stored_name(name, self._codes)
        return self.codec is not None and codes in self.hf and self._part(codes) == (name, self._codes)

    def block_rows(self, name: str) -> int:
        """Rows that are cheap to take together: a block's, or one."""
        return self.spec.block[0] if self.spec is not None and self.is_coded(name) else 1

    def scratch(self, name: str) -> int:
        """Bytes that decoding needs besides codes and result: what `quant` works on at once, in fp32 and indices."""
        if not self.is_coded(name):
            return 0
        return _SCRATCH * max(1 << 20, self.block_rows(name) * self.shape(name)[1])

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """Everything that `rows` reads for a tensor; first what it reads into a buffer."""
        if self.codec is None or not self.is_coded(name):
            return (self.hf.info(name),)
        return tuple(self.hf.info(stored_name(name, leaf)) for leaf in self._read_leaves())

    def rows(self, name: str, a: int, b: int, buffer: memoryview | None = None) -> Tensor:
        """Rows [a, b) of the first axis (some, where they are coded), in storage of exactly their size; where nothing
        is decoded that is `buffer`, if given.

        Raises ValueError for scales or codes that are not finite, and when the file has been cut since it was opened.
        """
        if self.codec is None or not self.is_coded(name):
            return self.hf.read_rows(name, a, b, buffer)
        n, k = self.shape(name)
        block = self.codec.block[0]
        first, last = a // block * block, min(n, -(-b // block) * block)  # what scales belong to
        parts: dict[str, Tensor] = {}
        for leaf in self._read_leaves():
            part, stored = self.codec.parts[leaf], stored_name(name, leaf)
            if isinstance(part, Part):
                run = first // part.rows, -(-last // part.rows)
                parts[leaf] = self.hf.read_rows(stored, *run, buffer if leaf == self._codes else None)
            else:
                parts[leaf] = self.hf.read(stored)
        decoded = self.codec.decode(self.codec.adopt(name, parts, (n, k)), DECODED)
        return decoded if (first, last) == (a, b) else decoded[a - first : b - first].clone()

    @property
    def _codes(self) -> str:
        return "weight" if self.codec is None else self.codec.leaves[0]

    def _read_leaves(self) -> Iterator[str]:
        return (leaf for leaf in self.codec.leaves if leaf not in self.codec.dropped) if self.codec else iter(())

    def _part(self, stored: str) -> tuple[str, str] | None:
        """(weight, last component) where a stored tensor is a part of one."""
        return part_of(self.codec, stored, self.hf.info(stored).dtype)

    def _drops(self, stored: str) -> bool:
        return self.codec is not None and stored.rpartition(".")[2] in self.codec.dropped

    def _stored(self) -> Iterator[tuple[str, str | None]]:
        """(weight, last component, where it is a part) of all that is read, in the order of the files."""
        for stored in self.hf.names():
            if not self._drops(stored):
                yield self._part(stored) or (stored, None)

    def _check_parts(self) -> None:
        """From the headers alone, for the whole checkpoint."""
        for name, leaf in self._stored():
            if leaf is None:
                refuse_foreign(name, self.hf.info(name).dtype, self.spec)
            elif leaf == self._codes:
                self._check_coded(name)
            elif not self.is_coded(name):
                codes = stored_name(name, self._codes)
                raise ValueError(
                    f"{stored_name(name, leaf)}: a scale without its weight {codes}: fetch the checkpoint again"
                )

    def _check_coded(self, name: str) -> None:
        assert self.codec is not None
        if self._codes != "weight" and name in self.hf:
            raise ValueError(f"{name} is there twice, as it is and as codes: fetch the checkpoint again")
        parts: dict[str, Tensor] = {}
        for leaf in self._read_leaves():
            stored = stored_name(name, leaf)
            if stored not in self.hf:
                raise ValueError(
                    f"{stored_name(name, self._codes)}: codes without their scale {stored}: fetch the checkpoint again"
                )
            info = self.hf.info(stored)
            parts[leaf] = torch.empty(info.shape, dtype=info.dtype, device="meta")
        self.codec.fit(name, parts)

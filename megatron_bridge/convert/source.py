"""Reads the tensors of a Hugging Face checkpoint by rows: BF16 and FP32 as stored, quantized weights decoded.

`quant/` decodes complete blocks of rows at a time, so no BF16 copy of the checkpoint is made. The codes and scales of a
weight may lie in different files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint, TensorInfo
from quant.formats.codec import Codec, PerBlock
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import coded_weight_of, is_dropped, refuse_foreign, stored_name

DECODED = torch.bfloat16
"""The dtype of decoded weights, as in `miles-like dequantize`."""


_SCRATCH = 28
"""Measured bytes per element of a band."""


@dataclass(frozen=True)
class Source:
    """A Hugging Face checkpoint. Picklable; keeps no file open."""

    hf: HFCheckpoint
    spec: QuantSpec | None

    @classmethod
    def open(cls, path: Path | str) -> Source:
        """Raises ValueError as HFCheckpoint, and naming codes without scales or without a `quantization_config`, scales
        without codes, or codes and scales that do not match."""
        hf = HFCheckpoint(path)
        source = cls(hf, spec_from_hf(hf.config))
        source._check_headers()
        return source

    @cached_property
    def codec(self) -> Codec | None:
        return codec_or_none(self.spec)

    def names(self) -> list[str]:
        """Names of all weights in file and data order; a quantized weight's position is that of its codes."""
        return [name for name, leaf in self._stored() if leaf is None or leaf == self._codes]

    def __contains__(self, name: str) -> bool:
        return self.is_coded(name) or (
            name in self.hf and self._coded_weight_of(name) is None and not is_dropped(self.codec, name)
        )

    def shape(self, name: str) -> tuple[int, ...]:
        if self.codec is None or not self.is_coded(name):
            return self.hf.info(name).shape
        return self.codec.shape_of({self._codes: self.hf.info(stored_name(name, self._codes)).shape}, name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `rows` returns."""
        return DECODED if self.is_coded(name) else self.hf.info(name).dtype

    def nbytes(self, name: str) -> int:
        """Bytes of the complete tensor in that dtype."""
        return torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize

    def is_coded(self, name: str) -> bool:
        codes = stored_name(name, self._codes)
        return self.codec is not None and codes in self.hf and self._coded_weight_of(codes) == (name, self._codes)

    def block_rows(self, name: str) -> int:
        """Rows that should be read together: those of a block, or one."""
        return self.spec.block[0] if self.spec is not None and self.is_coded(name) else 1

    def scratch(self, name: str) -> int:
        """Bytes that decoding needs besides codes and result: the fp32 values and indices of one batch in `quant`."""
        if not self.is_coded(name):
            return 0
        return _SCRATCH * max(1 << 20, self.block_rows(name) * self.shape(name)[1])

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """The stored tensors that `rows` reads for a weight; the first is the one read into the buffer."""
        if self.codec is None or not self.is_coded(name):
            return (self.hf.info(name),)
        return tuple(self.hf.info(stored_name(name, leaf)) for leaf in self._read_leaves())

    def rows(self, name: str, a: int, b: int, buffer: memoryview | None = None) -> Tensor:
        """Rows [a, b) of the first axis (at least one row of a coded tensor), in storage of exactly their size, which
        is `buffer` if given and nothing is decoded.

        Raises ValueError for scales or codes that are not finite, and when the file was truncated after opening.
        """
        if self.codec is None or not self.is_coded(name):
            return self.hf.read_rows(name, a, b, buffer)
        n, k = self.shape(name)
        block = self.codec.block[0]
        first, last = a // block * block, min(n, -(-b // block) * block)  # complete blocks
        tensors: dict[str, Tensor] = {}
        for leaf in self._read_leaves():
            layout, stored = self.codec.stored[leaf], stored_name(name, leaf)
            if isinstance(layout, PerBlock):
                run = first // layout.rows, -(-last // layout.rows)
                tensors[leaf] = self.hf.read_rows(stored, *run, buffer if leaf == self._codes else None)
            else:
                tensors[leaf] = self.hf.read(stored)
        decoded = self.codec.decode(self.codec.adopt(name, tensors, (n, k)), DECODED)
        return decoded if (first, last) == (a, b) else decoded[a - first : b - first].clone()

    @property
    def _codes(self) -> str:
        return "weight" if self.codec is None else self.codec.leaves[0]

    def _read_leaves(self) -> Iterator[str]:
        return (leaf for leaf in self.codec.leaves if leaf not in self.codec.dropped) if self.codec else iter(())

    def _coded_weight_of(self, stored: str) -> tuple[str, str] | None:
        """(weight, last name component) if a stored tensor belongs to a quantized weight."""
        return coded_weight_of(self.codec, stored, self.hf.info(stored).dtype)

    def _stored(self) -> Iterator[tuple[str, str | None]]:
        """(weight, last name component or None) of all stored tensors that are read, in file order."""
        for stored in self.hf.names():
            if not is_dropped(self.codec, stored):
                yield self._coded_weight_of(stored) or (stored, None)

    def _check_headers(self) -> None:
        """Check the whole checkpoint from its headers."""
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
            raise ValueError(f"{name} is stored twice, plain and as codes: fetch the checkpoint again")
        tensors: dict[str, Tensor] = {}
        for leaf in self._read_leaves():
            stored = stored_name(name, leaf)
            if stored not in self.hf:
                raise ValueError(
                    f"{stored_name(name, self._codes)}: codes without their scale {stored}: fetch the checkpoint again"
                )
            info = self.hf.info(stored)
            tensors[leaf] = torch.empty(info.shape, dtype=info.dtype, device="meta")
        self.codec.fit(name, tensors)

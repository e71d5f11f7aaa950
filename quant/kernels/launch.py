"""Launches of the codecs' Triton kernels over weights of one shape. Importing this module imports Triton.

Addresses of all weights go to the device in one small table, so that a launch serves any number of weights that lie
anywhere: a launch takes as long as the kernel's work on a few MB.

Letters: B weights of one shape, n rows (out) and k columns (in).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels import decoders, encoders

_ALIGNMENT = 16  # bytes of one load or store of a thread
_GREATEST_BLOCK = 1 << 14  # weights of a block, which one program holds in registers
_BLOCK_WARPS = 4  # of such a program
_TILE = 1 << 11  # weights of a program along rows
_WARPS = 2
_WORDS = 1 << 13  # pairs of weights of a program that looks for the largest
_LAST = 1 << 31  # weights and codes are counted in int32
_OUT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_FOUR_BITS = ("int4", "mxfp4", "nvfp4")
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}  # each operation is rounded, as PyTorch's are


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one codec. format: a value of `QuantFormat`; divides: of NVFP4, `Nvfp4Codec.divides`."""

    format: str
    block: tuple[int, int]
    divides: bool = False

    def serve(self, shape: tuple[int, int]) -> bool:
        """Whether there are kernels for weights [n, k]."""
        if shape[0] * shape[1] >= _LAST:
            return False
        return self._in_rows or (self.format.startswith("fp8") and self._padded[0] * self._padded[1] <= _GREATEST_BLOCK)

    @property
    def _in_rows(self) -> bool:
        """Whether scales belong to runs of a row, so that a weight is one sequence of them."""
        bn, bk = self.block
        return bn == 1 and 8 <= bk <= _TILE and bk & (bk - 1) == 0

    @property
    def _padded(self) -> tuple[int, int]:
        bn, bk = self.block
        return triton.next_power_of_2(bn), triton.next_power_of_2(bk)

    def encode(self, weights: Sequence[Tensor], stored: Sequence[tuple[Tensor, Tensor]], tops: Tensor | None) -> Tensor:
        """bf16 [n, k] -> codes and scales, written to `stored`. tops: as of `Codec._choose`, on the CPU. Returns int32
        [B], on the device: 1 for weights with NaN or infinite values, whose codes mean nothing."""
        table = [(w, codes, scales) for w, (codes, scales) in zip(weights, stored, strict=True)]
        return self._quantize(table, tops, fake=False)

    def fake(self, weights: Sequence[Tensor], out: Sequence[Tensor], tops: Tensor | None) -> Tensor:
        """bf16 [n, k] -> the values of their codes, bf16 [n, k], written to `out`. Otherwise as `encode`."""
        return self._quantize([(w, o, o) for w, o in zip(weights, out, strict=True)], tops, fake=True)

    def _quantize(self, tensors: Sequence[tuple[Tensor, Tensor, Tensor]], tops: Tensor | None, fake: bool) -> Tensor:
        w = tensors[0][0]
        table, aligned = _table(tensors, 2, tops)
        flags = torch.zeros(len(tensors), dtype=torch.int32, device=w.device)
        rest = {"FAKE": fake, "ALIGNED": aligned, **_EXACT}
        with _on(w):
            if not self._in_rows:
                self._in_blocks(
                    encoders.encode_blocks, w, len(tensors), table, flags, POWER=self.format != "fp8", **rest
                )
            elif self.format not in _FOUR_BITS:
                self._along_rows(encoders.encode_rows8, w, len(tensors), table, flags, **rest)
            else:
                raised = tops is not None and bool((tops.reciprocal() if self.divides else tops).min() < encoders.TINY)
                rest |= {"DIVIDES": self.divides, "RAISED": raised}
                self._along_rows(encoders.encode_rows4, w, len(tensors), table, flags, **rest)
        return flags

    def decode(
        self,
        codes: Sequence[Tensor],
        scales: Sequence[Tensor],
        out: Sequence[Tensor],
        tops: Tensor | None,
        *,
        rounded: bool,
    ) -> None:
        """Codes and scales -> out [n, k], bf16 or fp32. tops: as of `Codec._scaled`, on the device. rounded: to bf16
        first."""
        w = out[0]
        table, aligned = _table(list(zip(codes, out, scales, strict=True)), 2)
        rest = {"OUT": _OUT[w.dtype], "ROUND": rounded, "ALIGNED": aligned, **_EXACT}
        with _on(w):
            if not self._in_rows:
                self._in_blocks(decoders.decode_blocks, w, len(out), table, **rest)
            elif self.format not in _FOUR_BITS:
                self._along_rows(decoders.decode_rows8, w, len(out), table, **rest)
            else:
                scale = table if tops is None else tops
                self._along_rows(decoders.decode_rows4, w, len(out), table, scale, DIVIDES=self.divides, **rest)

    def _in_blocks(self, kernel: Any, w: Tensor, count: int, *arguments: Tensor, **rest: Any) -> None:
        (n, k), (bn, bk), (tn, tk) = w.shape, self.block, self._padded
        across = triton.cdiv(k, bk)
        grid = (triton.cdiv(n, bn) * across, count)
        sizes = {"BN": bn, "BK": bk, "TN": tn, "TK": tk}
        kernel[grid](*arguments, n, k, across, **sizes, **rest, num_warps=_BLOCK_WARPS)

    def _along_rows(self, kernel: Any, w: Tensor, count: int, *arguments: Tensor, **rest: Any) -> None:
        group = self.block[1]
        groups, tile = w.numel() // group, max(1, _TILE // group)
        of_format = {"FORMAT": self.format, "GROUP": group, "TILE": tile}
        kernel[(triton.cdiv(groups, tile), count)](*arguments, groups, **of_format, **rest, num_warps=_WARPS)


def amax(weights: Sequence[Tensor]) -> Tensor:
    """fp32 [B]: largest magnitudes of contiguous bf16 weights of one even number of elements, at multiples of 4 bytes;
    NaN or infinite where a weight is not finite."""
    w = weights[0]
    table, aligned = _table([(w, w, w) for w in weights], 1)
    bits = torch.zeros(len(weights), dtype=torch.int32, device=w.device)
    words = w.numel() // 2
    with _on(w):
        grid = (triton.cdiv(words, _WORDS), len(weights))
        encoders.largest[grid](table, bits, words, TILE=_WORDS, ALIGNED=aligned, num_warps=4)
    return bits.view(torch.float32)


def _table(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor]], wide: int, tops: Tensor | None = None
) -> tuple[Tensor, bool]:
    """int64 [B, 4] of addresses and the bits of `tops`, fp32 on the CPU, on its way to the tensors' device; and whether
    the first `wide` of each are multiples of 16."""
    device = tensors[0][0].device
    table = torch.empty(len(tensors), 4, dtype=torch.int64, pin_memory=device.type != "cpu")
    rows = table.numpy()
    rows[:, :3] = [[t.data_ptr() for t in row] for row in tensors]
    rows[:, 3] = 0 if tops is None else tops.view(torch.int32).numpy()
    return table.to(device, non_blocking=True), not (rows[:, :wide] % _ALIGNMENT).any()


def _on(w: Tensor) -> contextlib.AbstractContextManager[Any]:
    elsewhere = w.is_cuda and torch.cuda.current_device() != w.device.index
    return torch.cuda.device(w.device) if elsewhere else contextlib.nullcontext()

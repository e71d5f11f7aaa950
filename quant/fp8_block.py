"""DeepSeek-V3's FP8: e4m3 codes and one fp32 scale for each block of a weight.

Letters: B weights of one shape, n rows (out), k columns (in), bn x bk a block, nb x kb blocks.

Encode: s = max(amax, 1e-10) / 448 over the block, code = e4m3(clamp(w / s, -448, 448)), a true division, rounded to
nearest even. Decode: fp32(code) * s. The scale is stored as `weight_scale_inv`, though it is the multiplier of decoding
(DeepSeek-V3, README_WEIGHTS; the formula of its `weight_dequant` kernel).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.codec import QuantTensor
from quant.minifloat import E4M3_MAX
from quant.spec import QuantFormat, QuantSpec

SCALE_SUFFIX = "_scale_inv"
ZERO_BLOCK_AMAX = 1e-10  # a block of zeros gets a small positive scale: 0 / 0 would be NaN
_BAND_ELEMENTS = 1 << 20  # fp32 work at once: bounds memory and stays near the cache


class Fp8BlockCodec:
    """The codec of `QuantFormat.FP8`."""

    def __init__(self, spec: QuantSpec) -> None:
        if spec.format is not QuantFormat.FP8:
            raise ValueError(f"the FP8 codec was given a spec of format {spec.format}")
        self.block = spec.block

    def encode(self, bundle: Mapping[str, Tensor]) -> Mapping[str, QuantTensor]:
        """Weights [n, k], bf16 or fp32 -> codes e4m3 [n, k] and scales fp32 [nb, kb] under `_scale_inv`.

        Weights need not share anything; giving many at once is cheaper, as those of one shape are encoded together.
        Raises ValueError naming a tensor that is not 2-D or not finite.
        """
        alike: defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = defaultdict(list)
        for name, w in bundle.items():
            if w.ndim != 2 or not w.is_floating_point() or not w.numel():
                raise ValueError(f"{name}: FP8 holds 2-D float weights, this one is {w.dtype} {tuple(w.shape)}")
            alike[w.shape, w.dtype, w.device].append(name)
        done: dict[str, QuantTensor] = {}
        for (shape, _, _), names in alike.items():
            codes, scales = self._encode_alike([bundle[n].detach() for n in names])
            finite = torch.isfinite(torch.stack(scales)).flatten(1).all(1).tolist()
            if not all(finite):
                raise ValueError(
                    f"{names[finite.index(False)]}: the weight has NaN or infinite values; nothing was quantized. "
                    "Check the checkpoint it came from, or the gradient norm of the last step"
                )
            for name, c, s in zip(names, codes, scales, strict=True):
                done[name] = QuantTensor(codes=c, scales={SCALE_SUFFIX: s}, shape=tuple(shape))
        return {name: done[name] for name in bundle}

    def decode(self, q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[n, k] in `dtype`: the exact fp32 product, rounded once."""
        n, k = q.shape
        bn, bk = self.block
        scales = q.scales[SCALE_SUFFIX]
        if tuple(scales.shape) != self.scale_shape(q.shape):
            raise ValueError(
                f"scales {tuple(scales.shape)} do not fit a weight {n} x {k} in blocks of {bn} x {bk}: "
                f"want {self.scale_shape(q.shape)}"
            )
        out = torch.empty((n, k), dtype=dtype, device=q.codes.device)
        rows = max(1, _BAND_ELEMENTS // max(1, k * bn)) * bn
        for a in range(0, n, rows):
            codes = q.codes[a : a + rows]
            s = scales[a // bn : a // bn + -(-len(codes) // bn)].to(torch.float32)
            if s.numel() > 1:
                s = s.repeat_interleave(bn, 0)[: len(codes)].repeat_interleave(bk, 1)[:, :k]
            out[a : a + rows] = e4m3_to_float(codes) * s
        return out

    def decode_stack(self, qs: Sequence[QuantTensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, n, k] of B weights of one shape."""
        n, k = qs[0].shape
        if any(q.shape != (n, k) for q in qs):
            raise ValueError(f"weights of shapes {sorted({q.shape for q in qs})} cannot be stacked")
        if len(qs) * n * k > _BAND_ELEMENTS or self.scale_shape((n, k)) != (1, 1):
            return torch.stack([self.decode(q, dtype) for q in qs])
        scales = torch.stack([q.scales[SCALE_SUFFIX].to(torch.float32) for q in qs])  # [B, 1, 1]
        codes = torch.stack([q.codes.view(torch.uint8) for q in qs]).view(torch.float8_e4m3fn)
        return (e4m3_to_float(codes.view(-1, k)).view(codes.shape) * scales).to(dtype)

    def bundle_of(self, name: str) -> frozenset[str]:
        return frozenset((name,))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """[nb, kb] of a weight [n, k]."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def _encode_alike(self, ws: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """[B] weights of one shape -> codes e4m3 [n, k] and scales fp32 [nb, kb] of each, none sharing storage."""
        n, k = ws[0].shape
        codes, scales = [], []
        if n * k > _BAND_ELEMENTS:
            for w in ws:
                c, s = self._encode_bands(w)
                codes.append(c)
                scales.append(s)
            return codes, scales
        together = _BAND_ELEMENTS // (n * k)
        for i in range(0, len(ws), together):
            c, s = self._encode_stack(torch.stack(ws[i : i + together]))
            # a view into the stack would be pickled with the whole of it
            codes.extend(x.clone() for x in c.unbind())
            scales.extend(x.clone() for x in s.unbind())
        return codes, scales

    def _encode_bands(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """[n, k] -> codes [n, k], scales [nb, kb], some rows of blocks at a time."""
        n, k = w.shape
        bn = self.block[0]
        codes = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=w.device)
        scales = torch.empty(self.scale_shape((n, k)), dtype=torch.float32, device=w.device)
        rows = max(1, _BAND_ELEMENTS // (k * bn)) * bn
        for a in range(0, n, rows):
            c, s = self._encode_stack(w[None, a : a + rows])
            codes[a : a + rows] = c[0]
            scales[a // bn : a // bn + s.shape[1]] = s[0]
        return codes, scales

    def _encode_stack(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n, k] -> codes [B, n, k], scales [B, nb, kb]. The scale of a block with a NaN or infinity is neither."""
        b, n, k = w.shape
        nb, kb = self.scale_shape((n, k))
        # a weight smaller than a block is a block of its own; else zeros, which cannot raise an amax, fill the last one
        bn, bk = min(self.block[0], n), min(self.block[1], k)
        x = w.to(torch.float32)
        if (nb * bn, kb * bk) != (n, k):
            x = F.pad(x, (0, kb * bk - k, 0, nb * bn - n))
        x = x.view(b, nb, bn, kb, bk)
        amax = x.abs().amax(4).amax(2)  # [B, nb, kb]; one axis at a time is 20 times faster
        scales = amax.clamp(min=ZERO_BLOCK_AMAX) / E4M3_MAX
        q = (x / scales[:, :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return q.view(b, nb * bn, kb * bk)[:, :n, :k], scales


@lru_cache(maxsize=8)
def _e4m3_values(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """fp32 of e4m3 `codes`, any shape. A look-up: PyTorch's own cast on CPU takes five times as long."""
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    index = codes.contiguous().view(torch.uint8).flatten().to(torch.int32)
    return _e4m3_values(codes.device).index_select(0, index).view(codes.shape)

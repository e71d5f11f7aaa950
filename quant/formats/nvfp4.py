"""NVFP4: e2m1 codes, one e4m3 scale per 16 columns of a row, and one fp32 scale per weight.

Letters: B weights of one shape, r rows (out) and c columns (in) of a tile; a group is 16 columns.

With S = amax / (6 * 448) over the weights that an engine multiplies at once (the gate and up projection of an MLP):
s = e4m3(min(amax_group / 6 / S, 448)), code = e2m1(w / (s * S)), a true division, decode = code * (s * S). Where s * S
is zero the codes are zero too. An all-zero weight has S = 1.

S is stored in one of two ways, which only the convention determines. All arithmetic uses the stored, rounded number, so
decoding reproduces the encoded values:
modelopt            `weight` uint8 [n, k / 2], `weight_scale` e4m3 [n, k / 16], `weight_scale_2` fp32 [] = S, and
                    `input_scale` fp32 [] = 1: loaders require it; it applies to activations and is not read here;
compressed-tensors  `weight_packed`, `weight_scale`, `weight_global_scale` fp32 [1] = G = 1 / S =
                    2688 / amax. The arithmetic, amax_group / 6 * G and s / G, is bit for bit that of
                    compressed-tensors.
Reading one as the other gives values wrong by a factor of 1e6 and more.

Attention projections do not share S here, although engines multiply some of them at once: quantized attention
projections are read correctly from other checkpoints, but are not written (`check_bundle`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor

from quant.formats.codec import PerBlock, PerWeight
from quant.formats.e2m1 import E2m1Codec, e2m1_codes
from quant.formats.scale_rules import E2M1_MAX, E4M3_MAX
from quant.formats.tiles import divide_, groups
from quant.spec import QuantFormat, QuantSpec

GROUP = 16
_RANGE = E2M1_MAX * E4M3_MAX
_FUSED = ("gate_proj", "up_proj")


class Nvfp4Codec(E2m1Codec):
    """The codec of `QuantFormat.NVFP4`, in either convention."""

    shared_amax = True

    def __init__(self, spec: QuantSpec) -> None:
        if spec.format is not QuantFormat.NVFP4:
            raise ValueError(f"the NVFP4 codec does not support a spec of format {spec.format}")
        super().__init__(spec)
        self.divides = spec.convention == "compressed-tensors"  # whether decoding divides by the stored scale
        codes, scales = PerBlock(torch.uint8, 1, 2), PerBlock(torch.float8_e4m3fn, 1, GROUP)
        if self.divides:
            self.of_weight = "weight_global_scale"
            self.stored = {
                "weight_packed": codes,
                "weight_scale": scales,
                self.of_weight: PerWeight(torch.float32, (1,)),
            }
            self.dropped = frozenset(("input_global_scale",))
        else:
            self.of_weight = "weight_scale_2"
            self.stored = {
                "weight": codes,
                "weight_scale": scales,
                self.of_weight: PerWeight(torch.float32),
                "input_scale": PerWeight(torch.float32),
            }
            self.dropped = frozenset(("input_scale",))

    def bundle_of(self, name: str) -> tuple[str, ...]:
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        return tuple(f"{parent}.{p}.weight" for p in _FUSED) if last in _FUSED else (name,)

    def check_bundle(self, name: str, coded: Container[str]) -> None:
        super().check_bundle(name, coded)
        if "self_attn" in name.split("."):
            raise ValueError(
                f"{name}: engines fuse attention projections and need one shared scale, but {self.spec.format} "
                "shares a scale only between gate_proj and up_proj: do not quantize attention (scope 'experts', "
                "or ignore 'self_attn')"
            )

    def _shared(self, amax: Tensor) -> Tensor:
        stored = _RANGE / amax if self.divides else divide_(amax.clone(), _RANGE)
        stored = stored.clamp(max=torch.finfo(torch.float32).max)  # 2688 / amax is infinite below 1e-35
        return torch.where(amax > 0, stored, 1.0)

    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert top is not None
        x = divide_(bits.view(torch.bfloat16).float(), E2M1_MAX)
        x = x.mul_(_column(top)) if self.divides else x.div_(_column(top))
        scales = x.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
        by = self._factors(scales, top)
        by = by.masked_fill_(by == 0, math.inf)  # w / infinity = 0
        quotients = w.to(torch.float32, memory_format=torch.contiguous_format)
        groups(quotients, GROUP).div_(by[..., None])
        return e2m1_codes(w, quotients), (scales,)

    def _factors(self, scales: Tensor, top: Tensor) -> Tensor:
        """The multipliers of codes, fp32 [B, r, c / 16]."""
        s = scales.to(torch.float32)
        return s.div_(_column(top)) if self.divides else s.mul_(_column(top))

    def _scaled(self, levels: Tensor, scales: tuple[Tensor, ...], top: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert top is not None
        groups(levels, GROUP).mul_(self._factors(scales[0], top)[..., None])
        return levels

    def _whole(self, shape: tuple[int, ...], top: Tensor | None) -> dict[str, Tensor]:
        found = {} if self.divides else {"input_scale": torch.ones(())}
        if top is not None:
            found[self.of_weight] = top[:, None] if self.divides else top
        return found

    def _accept(self, leaf: str, tensor: Tensor) -> Tensor:
        wanted = self.stored[leaf]
        return tensor.reshape(wanted.shape) if isinstance(wanted, PerWeight) and tensor.numel() == 1 else tensor

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:
        if not 0 < float(stored[self.of_weight]) < math.inf:
            raise ValueError(
                f"{name}.{self.of_weight} = {float(stored[self.of_weight])}: it must be positive and finite: fetch the "
                "checkpoint again"
            )
        if int(stored["weight_scale"].view(torch.uint8).max()) >= 0x7F:  # NaN, or a sign
            raise ValueError(f"{name}.weight_scale: scales must be finite and not negative: fetch the checkpoint again")


def _column(top: Tensor) -> Tensor:
    return top[:, None, None]

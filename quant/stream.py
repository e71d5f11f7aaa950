"""Streams of named tensors, quantized and back. Names are those of a Hugging Face checkpoint.

Memory: `quantize_stream` holds at most `batch_bytes` and one tensor. `pair_stream` holds scales that came before their
codes (1/4096 of the codes' bytes at 128 x 128), and codes whose scale has not come: with `lookup` there are none of
those, so a checkpoint whose scales lie in another file streams in the memory of a few tensors; without it they are at
most `held_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from quant.codec import Codec, QuantTensor
from quant.fp8_block import SCALE_SUFFIX, Fp8BlockCodec
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec

Named = tuple[str, Tensor]
Lookup = Callable[[str], Tensor | None]


def quantize_stream(
    tensors: Iterable[Named], spec: QuantSpec | None, *, batch_bytes: int = 16 << 20
) -> Iterator[Named]:
    """Each weight the spec covers as `X.weight` codes followed by its scales; everything else as it is, order kept.

    Without a spec, or with a bf16 one, all tensors pass. Up to `batch_bytes` of tensors are encoded at once, so one
    that was taken must stay valid until it has been given back. Raises ValueError naming a weight that is not finite.
    """
    if spec is None or spec.format is QuantFormat.BF16:
        yield from tensors
        return
    codec = make_codec(spec)
    batch: list[Named] = []
    size = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= batch_bytes:
            yield from _quantize_batch(batch, spec, codec)
            batch, size = [], 0
    yield from _quantize_batch(batch, spec, codec)


def _quantize_batch(batch: list[Named], spec: QuantSpec, codec: Codec) -> Iterator[Named]:
    encoded = codec.encode({name: t for name, t in batch if spec.covers(name, t.shape)})
    for name, tensor in batch:
        q = encoded.get(name)
        if q is None:
            yield name, tensor
            continue
        yield name, q.codes
        for suffix, scale in q.scales.items():
            yield name + suffix, scale


def pair_stream(
    tensors: Iterable[Named],
    spec: QuantSpec | None,
    *,
    lookup: Lookup | None = None,
    held_bytes: int = 4 << 30,
) -> Iterator[tuple[str, Tensor | QuantTensor]]:
    """Joins each weight's codes with its scales, which may come before or after; everything else passes as it is.

    `lookup(name)` fetches a scale that has not come yet (None: there is none). Scales stored in bf16 become fp32.
    Raises ValueError naming the tensor: codes without scale, scale without codes, scales of a wrong shape or dtype,
    negative or not finite, codes that are NaN, or codes in a stream whose model has no `quantization_config`.
    """
    pairs = _Pairs(spec, lookup, held_bytes)
    for name, tensor in tensors:
        if tensor.dtype is torch.float8_e4m3fn:
            got = pairs.take_codes(name, tensor)
        elif name.endswith(SCALE_SUFFIX):
            got = pairs.take_scale(name, tensor)
        else:
            yield name, tensor
            continue
        if got is not None:
            yield got
    pairs.finish()


def dequantize_stream(
    tensors: Iterable[Named],
    spec: QuantSpec | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    lookup: Lookup | None = None,
) -> Iterator[Named]:
    """Quantized weights decoded to `dtype`, scales left out, everything else as it is. Raises as `pair_stream` does."""
    codec = make_codec(spec) if spec is not None and spec.format is not QuantFormat.BF16 else None
    for name, value in pair_stream(tensors, spec, lookup=lookup):
        if isinstance(value, QuantTensor):
            assert codec is not None
            yield name, codec.decode(value, dtype)
        else:
            yield name, value


class _Pairs:
    """Halves that wait for each other."""

    def __init__(self, spec: QuantSpec | None, lookup: Lookup | None, held_bytes: int) -> None:
        self.codec = Fp8BlockCodec(spec) if spec is not None and spec.format is QuantFormat.FP8 else None
        self.lookup = lookup
        self.held_bytes = held_bytes
        self.codes: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.fetched: set[str] = set()  # scales that `lookup` gave before the stream did
        self.waiting = 0  # bytes of self.codes

    def take_codes(self, name: str, codes: Tensor) -> tuple[str, QuantTensor] | None:
        if self.codec is None:
            raise ValueError(
                f"{name}: FP8 codes, but the model's config.json has no FP8 quantization_config: "
                "use the config.json that belongs to these weights"
            )
        scale = self.scales.pop(name + SCALE_SUFFIX, None)
        if scale is None and self.lookup is not None:
            scale = self.lookup(name + SCALE_SUFFIX)
            if scale is None:
                raise ValueError(_missing_scale(name))
            self.fetched.add(name + SCALE_SUFFIX)
        if scale is not None:
            return name, self.join(name, codes, scale)
        self.codes[name] = codes
        self.waiting += codes.nbytes
        if self.waiting > self.held_bytes:
            raise ValueError(
                f"{len(self.codes)} weights of {self.waiting} bytes, first {next(iter(self.codes))}, wait for their "
                f"scales: more than the {self.held_bytes} bytes held; send scales next to their weights"
            )
        return None

    def take_scale(self, name: str, scale: Tensor) -> tuple[str, QuantTensor] | None:
        if name in self.fetched:
            self.fetched.remove(name)
            return None
        weight = name.removesuffix(SCALE_SUFFIX)
        codes = self.codes.pop(weight, None)
        if codes is None:
            self.scales[name] = scale
            return None
        self.waiting -= codes.nbytes
        return weight, self.join(weight, codes, scale)

    def join(self, name: str, codes: Tensor, scale: Tensor) -> QuantTensor:
        assert self.codec is not None
        if codes.ndim != 2:
            raise ValueError(f"{name}: FP8 codes are 2-D, these are {tuple(codes.shape)}")
        want = self.codec.scale_shape(tuple(codes.shape))
        if tuple(scale.shape) != want or scale.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name}{SCALE_SUFFIX}: {scale.dtype} {tuple(scale.shape)}; a weight {tuple(codes.shape)} in blocks of "
                f"{self.codec.block} has float32 {want}: is weight_block_size in config.json right?"
            )
        low, high = (x.item() for x in torch.aminmax(scale))  # either is NaN when one scale is
        if not (low >= 0 and high < math.inf):
            raise ValueError(f"{name}{SCALE_SUFFIX}: scales must be finite, not negative: fetch the checkpoint again")
        if codes.numel() and int((codes.view(torch.uint8) & 0x7F).max()) == 0x7F:
            raise ValueError(f"{name}: codes that are NaN: fetch the checkpoint again")
        return QuantTensor(codes=codes, scales={SCALE_SUFFIX: scale.to(torch.float32)}, shape=tuple(codes.shape))

    def finish(self) -> None:
        for name in self.codes:
            raise ValueError(_missing_scale(name))
        for name in self.scales:
            raise ValueError(f"{name}: a scale without its weight {name.removesuffix(SCALE_SUFFIX)}")


def _missing_scale(name: str) -> str:
    return f"{name}: FP8 codes without their scale {name}{SCALE_SUFFIX}: fetch the checkpoint again"

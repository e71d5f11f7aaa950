"""Quantization and dequantization of streams of named tensors. Names are those of a Hugging Face checkpoint.

The stored tensors of a quantized weight are its codes and its scales. Memory: `quantize_stream` holds at most
`batch_bytes`, one tensor, and weights that wait for another one with the same scale. `pair_stream` holds scales that
came before their codes, and codes whose scales have not come. With `lookup` there are no such codes, so a checkpoint
whose scales are in another file streams in the memory of a few tensors; without it they are at most `held_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from quant.formats.codec import Codec, QuantTensor
from quant.registry import CODECS, codec_or_none, make_codec
from quant.spec import CONVENTIONS, QuantSpec

Named = tuple[str, Tensor]
Lookup = Callable[[str], Tensor | None]
_CODED = (torch.float8_e4m3fn, torch.int32, torch.uint8)
_LEAVES = {
    leaf for f in CODECS for c in CONVENTIONS[f] for leaf in make_codec(QuantSpec(format=f, convention=c)).leaves
} - {"weight"}


def stored_name(name: str, leaf: str) -> str:
    """Name of the stored tensor `leaf` of the weight `name`."""
    return f"{name.removesuffix('weight')}{leaf}"


def coded_weight_of(codec: Codec | None, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """(weight, leaf) if `name` and `dtype` are those of a stored tensor of a quantized weight, else None."""
    if codec is None:
        return None
    module, _, leaf = name.rpartition(".")
    kind = codec.stored.get(leaf)
    if kind is None or (leaf == "weight" and dtype is not kind.dtype):
        return None
    return f"{module}.weight", leaf


def is_dropped(codec: Codec | None, name: str) -> bool:
    """Whether the stored tensor `name` is one that decoding does not read."""
    return codec is not None and name.rpartition(".")[2] in codec.dropped


def quantize_stream(
    tensors: Iterable[Named], spec: QuantSpec | None, *, batch_bytes: int = 16 << 20
) -> Iterator[Named]:
    """Yields each weight that the spec covers as its codes followed by its scales, and all other tensors unchanged. The
    order is kept, except that weights that share a scale are yielded after the last of them.

    Without a spec, or with a bf16 one, all tensors are unchanged. Up to `batch_bytes` of tensors are encoded at once,
    so an input tensor must stay valid until its output has been yielded. Raises ValueError naming a weight that is not
    finite, and one that shares a scale with a weight that is missing.
    """
    codec = codec_or_none(spec)
    if codec is None or spec is None:
        yield from tensors
        return
    batch: list[Named] = []
    size = 0
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if spec.covers(name, tensor.shape) and len(bundle := codec.bundle_of(name)) > 1:
            waiting[name] = tensor
            if any(n not in waiting for n in bundle):
                continue
            ready = [(n, waiting.pop(n)) for n in bundle]
        else:
            ready = [(name, tensor)]
        batch += ready
        size += sum(t.nbytes for _, t in ready)
        if size >= batch_bytes:
            yield from _quantize_batch(batch, spec, codec)
            batch, size = [], 0
    yield from _quantize_batch(batch, spec, codec)
    for name in waiting:
        missing = next(n for n in codec.bundle_of(name) if n not in waiting)
        raise ValueError(f"{name} shares a scale with {missing}, which is missing: pass both")


def _quantize_batch(batch: list[Named], spec: QuantSpec, codec: Codec) -> Iterator[Named]:
    encoded = codec.encode({name: t for name, t in batch if spec.covers(name, t.shape)})
    for name, tensor in batch:
        q = encoded.get(name)
        if q is None:
            yield name, tensor
            continue
        for leaf, stored in q.stored.items():
            yield stored_name(name, leaf), stored


def pair_stream(
    tensors: Iterable[Named],
    spec: QuantSpec | None,
    *,
    lookup: Lookup | None = None,
    held_bytes: int = 4 << 30,
    whole: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[tuple[str, Tensor | QuantTensor]]:
    """Joins the stored tensors of each quantized weight, which come in any order; yields all others unchanged.

    lookup: name -> a stored tensor that has not come yet, or None if there is none. whole: shape of each weight, where
    the tensors hold only some of its rows of blocks. Raises ValueError naming the
    tensor: codes without scale, scale without codes, tensors of a wrong shape or dtype or with invalid values, or
    quantized weights in a stream whose model has no `quantization_config`.
    """
    pairs = _Pairs(codec_or_none(spec), lookup, held_bytes, whole or {})
    for name, tensor in tensors:
        if is_dropped(pairs.codec, name):
            continue
        coded = coded_weight_of(pairs.codec, name, tensor.dtype)
        if coded is None:
            refuse_foreign(name, tensor.dtype, spec)
            yield name, tensor
        elif (got := pairs.take(*coded, tensor)) is not None:
            yield got
    pairs.finish()


def is_foreign(name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor that does not belong to the codec in use is a stored tensor of some other format."""
    leaf = name.rpartition(".")[2]
    return leaf in _LEAVES or (leaf == "weight" and dtype in _CODED)


def refuse_foreign(name: str, dtype: torch.dtype, spec: QuantSpec | None) -> None:
    """Raises ValueError for a stored tensor of a weight that is quantized in another format than `spec`."""
    if is_foreign(name, dtype) and coded_weight_of(codec_or_none(spec), name, dtype) is None:
        has = "no quantization_config" if spec is None else f"a quantization_config of {spec.format}"
        raise ValueError(
            f"{name}: a stored tensor of a quantized weight ({str(dtype).removeprefix('torch.')}), but the model's "
            f"config.json has {has}: use the config.json that belongs to these weights"
        )


def dequantize_stream(
    tensors: Iterable[Named],
    spec: QuantSpec | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    lookup: Lookup | None = None,
) -> Iterator[Named]:
    """Yields quantized weights decoded to `dtype` without their scales, and all others unchanged. Raises as
    `pair_stream` does."""
    codec = codec_or_none(spec)
    for name, value in pair_stream(tensors, spec, lookup=lookup):
        if isinstance(value, QuantTensor):
            assert codec is not None
            yield name, codec.decode(value, dtype)
        else:
            yield name, value


class _Pairs:
    """Stored tensors that wait for the others of their weight."""

    def __init__(
        self, codec: Codec | None, lookup: Lookup | None, held_bytes: int, whole: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.codec = codec
        self.whole = whole
        self.lookup = lookup
        self.held_bytes = held_bytes
        self.held: dict[str, dict[str, Tensor]] = {}  # weight -> leaf -> stored tensor
        self.fetched: set[str] = set()  # stored names that `lookup` returned before they came in the stream
        self.waiting = 0  # bytes of codes in self.held

    def take(self, name: str, leaf: str, tensor: Tensor) -> tuple[str, QuantTensor] | None:
        """The weight `name`, if `tensor` completes it."""
        assert self.codec is not None
        if (stored := stored_name(name, leaf)) in self.fetched:
            self.fetched.remove(stored)
            return None
        have = self.held.setdefault(name, {})
        have[leaf] = tensor
        codes, wanted = self.codec.leaves[0], [n for n in self.codec.leaves if n not in self.codec.dropped]
        if codes in have and self.lookup is not None:
            for other in wanted:
                if other not in have:
                    found = self.lookup(stored_name(name, other))
                    if found is None:
                        raise ValueError(_missing(name, codes, other))
                    have[other] = found
                    self.fetched.add(stored_name(name, other))
        if all(n in have for n in wanted):
            if leaf != codes:
                self.waiting -= have[codes].nbytes
            rows, columns = self.whole.get(name, (0, 0))
            return name, self.codec.adopt(name, self.held.pop(name), (rows, columns) if rows else None)
        if leaf == codes:
            self.waiting += tensor.nbytes
            if self.waiting > self.held_bytes:
                raise ValueError(
                    f"{len(self.held)} weights of {self.waiting} bytes, the first is {next(iter(self.held))}, "
                    f"wait for their scales, which exceeds the limit of {self.held_bytes} bytes: pass scales next "
                    "to their weights"
                )
        return None

    def finish(self) -> None:
        if self.codec is None:
            return
        codes = self.codec.leaves[0]
        for name, have in self.held.items():
            if codes in have:
                raise ValueError(_missing(name, codes, next(n for n in self.codec.leaves if n not in have)))
            leaf = next(iter(have))
            raise ValueError(
                f"{stored_name(name, leaf)}: a scale without its weight {stored_name(name, codes)}: fetch the "
                "checkpoint again"
            )


def _missing(name: str, codes: str, leaf: str) -> str:
    return (
        f"{stored_name(name, codes)}: codes without their scale {stored_name(name, leaf)}: fetch the checkpoint again"
    )

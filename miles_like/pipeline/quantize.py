"""Convert a bf16 checkpoint to a low-precision format, for rollout servers or for upload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

from torch import Tensor

from megatron_bridge.convert.hf_manifest import Sums
from megatron_bridge.convert.units import Watch, unwatched
from miles_like.hf.checkpoint import HFCheckpoint, unfinished, write_hf
from miles_like.pipeline.dequantize import check_finite
from miles_like.pipeline.quant_report import PLOTS, QuantReport
from quant.formats.codec import Codec, QuantTensor
from quant.hf_config import quantized_config
from quant.registry import CODECS, codec_or_none, make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import coded_weight_of, quantize_stream, refuse_foreign

Scope = Literal["all", "experts"]
Named = tuple[str, Tensor]


def spec_of(
    format: str,
    *,
    scope: str | None = None,
    block: str | None = None,
    group: int | None = None,
    convention: str | None = None,
    ignore: Sequence[str] = (),
) -> QuantSpec:
    """A `QuantSpec` from command-line options. Raises ValueError naming an option whose value is unknown or does not
    apply to `format`."""
    if format not in tuple(CODECS):
        raise ValueError(f"--format {format!r}: choose one of {', '.join(CODECS)}")
    if scope is not None and scope not in get_args(Scope):
        raise ValueError(f"--scope {scope!r}: expected {' or '.join(get_args(Scope))}")
    kind = QuantFormat(format)
    by_block = kind in (QuantFormat.FP8, QuantFormat.FP8_UE8M0)
    size: tuple[int, int] | None = None
    if block is not None:
        sizes = block.lower().split("x")
        if not by_block or not all(s.isdecimal() and int(s) for s in sizes) or len(sizes) > 2:
            raise ValueError(
                f"--block {block!r}: expected a size such as 128 or 128x64 for an FP8 format; for other formats "
                "use --group"
            )
        size = (int(sizes[0]), int(sizes[-1]))
    if group is not None:
        if by_block:
            raise ValueError(f"--group {group}: {format} has blocks of rows and columns: use --block")
        size = (1, group)
    spec = QuantSpec.of(kind, cast("Scope | None", scope))
    convention = convention or spec.convention
    return replace(spec, block=size or spec.block, convention=convention, ignore=(*spec.ignore, *ignore))


def quantize_checkpoint(
    src: Path | str,
    dst: Path | str,
    spec: QuantSpec,
    *,
    report: QuantReport | None = None,
    watch: Watch = unwatched,
    shard_bytes: int = 5 << 30,
) -> int:
    """Write the unquantized model directory `src` to `dst` in the format `spec`; return the bytes of tensor data.

    Weights that share a scale are read together and everything else in order, so that only a few tensors are in memory
    at a time. The configuration gets `quantization_config`, tokenizer files are copied, and a manifest is written.
    `report` is filled, and written into `dst`; `watch` shows the progress. Raises ValueError, leaving no `dst`, for a
    source that is already quantized, of which no weight would be quantized, with a weight whose shape the format does
    not support (before anything is written), or with values that are not finite; and as `HFCheckpoint` and `write_hf`
    do.
    """
    hf, codec = unquantized(src), make_codec(spec)
    nbytes = quantized_bytes(hf, spec)
    tensors = in_bundles(hf.names(), lambda name: hf.info(name).shape, hf.read, spec)
    stored = quantize_stream(tensors, spec) if report is None else _measured(tensors, spec, codec, report)
    sums = Sums()
    with watch(unfinished(dst), nbytes):
        return write_hf(
            dst,
            sums.of(stored),
            quantized_config(hf.config, spec, sorted(hf.names())),
            copy_from=src,
            shard_bytes=shard_bytes,
            nbytes=nbytes,
            beside=partial(_write_beside, report, sums),
        )


def _write_beside(report: QuantReport | None, sums: Sums, directory: Path) -> None:
    if report is not None:
        from miles_like.pipeline.quant_plots import write_quant_plots  # imports matplotlib, which is slow

        report.write(directory)
        write_quant_plots(report, directory / PLOTS)
    sums.write(directory)


def quantized_bytes(hf: HFCheckpoint, spec: QuantSpec) -> int:
    """Bytes of tensor data that `quantize_checkpoint` will write, from the headers alone. Raises its ValueErrors about
    names and shapes."""
    codec = make_codec(spec)
    coded = {name for name in hf.names() if spec.covers(name, hf.info(name).shape)}
    if not coded:
        raise ValueError(
            f"{hf.path} has no weight to store in {spec.format} (ignored: {', '.join(spec.ignore) or 'none'}): "
            "pass --scope all, or fewer --ignore"
        )
    total = 0
    for name in hf.names():
        info = hf.info(name)
        if name not in coded:
            total += info.nbytes
            continue
        codec.check_bundle(name, coded)
        layout = codec.layout(info.shape, name)
        total += sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
    return total


def unquantized(hf_dir: Path | str) -> HFCheckpoint:
    """The checkpoint. Raises ValueError for one that is quantized already."""
    hf = HFCheckpoint(hf_dir)
    if hf.config.get("quantization_config") is not None:
        raise ValueError(
            f"{hf_dir} is already quantized: convert it to BF16 first (miles-like dequantize {hf_dir} OUT_DIR)"
        )
    for name in hf.names():
        refuse_foreign(name, hf.info(name).dtype, None)
    return hf


def in_bundles(
    names: Sequence[str], shape: Callable[[str], Sequence[int]], read: Callable[[str], Tensor], spec: QuantSpec | None
) -> Iterator[Named]:
    """Every tensor in the order of `names`, except that weights which share a scale follow each other. Raises
    ValueError naming an unquantized tensor that is not finite; the encoder checks the others."""
    codec, ahead = codec_or_none(spec), set[str]()
    for name in names:
        if name in ahead:
            ahead.remove(name)
        elif codec is not None and codec.spec.covers(name, shape(name)):
            for other in codec.bundle_of(name):
                yield other, read(other)
                ahead.add(other)
            ahead.remove(name)
        else:
            tensor = read(name)
            check_finite(name, tensor)
            yield name, tensor


def _measured(tensors: Iterator[Named], spec: QuantSpec, codec: Codec, report: QuantReport) -> Iterator[Named]:
    """`quantize_stream` that adds each weight and its encoding to `report`; a weight is held until then."""
    held: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}

    def held_back() -> Iterator[Named]:
        for name, tensor in tensors:
            if spec.covers(name, tensor.shape):
                held[name] = tensor
            else:
                report.skip(tensor)
            yield name, tensor

    for stored, tensor in quantize_stream(held_back(), spec):
        found = coded_weight_of(codec, stored, tensor.dtype)
        if found is not None and found[0] in held:
            parts[found[1]] = tensor
            if len(parts) == len(codec.leaves):
                w = held.pop(found[0])
                report.add(found[0], w, QuantTensor(parts, tuple(w.shape)))
                parts = {}
        yield stored, tensor

"""`miles_like.convert`, `quantize` and `export`: checkpoints in other forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from miles_like.api.calls import console_of, from_python
from miles_like.limits.memory_size import parse_bytes

if TYPE_CHECKING:
    from miles_like.pipeline.convert import Conversion
    from miles_like.pipeline.quant_report import QuantReport
    from miles_like.report.written import Written


@from_python
def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Literal["megatron", "hf"],
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    format: str = "bf16",
    hf_config: str | Path | None = None,
    lora_alpha: float | None = None,
    memory_limit: str = "4GiB",
    workers: int = 1,
    ray_address: str | None = None,
    quiet: bool = False,
) -> Conversion:
    """Convert a checkpoint between Hugging Face and Megatron form, as `miles-like convert` does.

    An interrupted conversion goes on where it stopped.

    Args:
        source: with `to="megatron"` a Hugging Face directory, BF16 or quantized; with `to="hf"` a directory of
            torch_dist shards, from a conversion or saved by training.
        out: the directory that is written.
        to: "megatron": torch_dist shards that load in any layout; "hf": a Hugging Face directory.
        tp, pp, ep, etp: with `to="megatron"`, the layout for which shards are cut.
        format: with `to="hf"`, bf16, fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4.
        hf_config: with `to="hf"`, the Hugging Face directory of a checkpoint that training saved.
        lora_alpha: with `to="hf"`, merge the checkpoint's adapters, as trained with this alpha.
        memory_limit: resident memory of all processes of a machine, such as "4GiB".
        workers: processes on each machine.
        ray_address: share the work with the nodes of this Ray cluster.
        quiet: show no progress.

    Returns:
        `tensors`, `bytes`, `seconds` and `skipped`; as text, a summary of one line.

    Raises:
        UserError: a source that cannot be read, a layout or format that the model does not fit, a full disk.
    """
    from miles_like.pipeline import convert as conversions
    from miles_like.run import assemble

    if to not in ("megatron", "hf"):
        raise ValueError(f"to = {to!r}: expected 'megatron' or 'hf'")
    nodes = conversions.cluster_nodes(ray_address)
    work = conversions.ConvertWork(parse_bytes(memory_limit), workers, nodes, watch=_progress("converting", quiet))
    try:
        if to == "megatron":
            return conversions.to_megatron(Path(source), Path(out), work, tp=tp, pp=pp, ep=ep, etp=etp)
        directory = None if hf_config is None else Path(hf_config)
        return conversions.to_hf(
            Path(source), Path(out), work, format=format, hf_config=directory, lora_alpha=lora_alpha
        )
    finally:
        assemble.shut_down()


@from_python
def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    format: str = "bf16",
    hf_config: str | Path | None = None,
    memory_limit: str = "4GiB",
    workers: int = 1,
    quiet: bool = False,
) -> Conversion:
    """Write the trained model of a run as a Hugging Face directory, as `miles-like export` does.

    Args:
        run_dir: directory of the run.
        out: the directory that is written.
        step: of the checkpoint; None: the last one.
        format: bf16, fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4.
        hf_config: the model that the run began with, where its cache is not there any more.
        memory_limit, workers, quiet: as for `convert`.

    Returns:
        As `convert`.

    Raises:
        UserError: a directory without a run, a step without a checkpoint, a damaged file.
    """
    from miles_like.pipeline.convert import ConvertWork
    from miles_like.run.export import export_run

    work = ConvertWork(parse_bytes(memory_limit), workers, None, watch=_progress("exporting", quiet))
    directory = None if hf_config is None else Path(hf_config)
    return export_run(Path(run_dir), Path(out), work, step=step, format=format, hf_config=directory)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A finished quantization."""

    out: Path
    bytes: int  # of tensor data
    report: QuantReport | None  # the measured error, if it was asked for

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes -> {self.out}"


@from_python
def quantize(
    source: str | Path,
    out: str | Path,
    *,
    format: str = "fp8",
    scope: str | None = None,
    block: str | None = None,
    group: int | None = None,
    convention: str | None = None,
    ignore: Sequence[str] = (),
    report: bool = False,
    quiet: bool = False,
) -> Quantized:
    """Convert a BF16 Hugging Face directory to a low-precision format, as `miles-like quantize` does.

    Args:
        source: a Hugging Face directory that is not quantized.
        out: the directory that is written.
        format: fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4.
        scope: "all" or "experts"; None: "experts" for formats of 4 bits, else "all".
        block: rows x columns of an FP8 block, such as "128x128".
        group: columns of an INT4 group: 32, 64 or 128.
        convention: deepseek, sglang, compressed-tensors or modelopt; None: the format's own.
        ignore: modules to leave unquantized: "layers.0.self_attn" or "re:...".
        report: measure the error of every weight, and write it into `out` with plots.
        quiet: show no progress.

    Returns:
        `bytes` of tensor data and, if asked for, the `report`.

    Raises:
        UserError: a source that is quantized, options that exclude each other, a weight that the format cannot hold.
    """
    from miles_like.pipeline.quant_report import QuantReport
    from miles_like.pipeline.quantize import quantize_checkpoint, spec_of

    spec = spec_of(format, scope=scope, block=block, group=group, convention=convention, ignore=ignore)
    measured, watch = QuantReport(spec) if report else None, _progress("quantizing", quiet)
    nbytes = quantize_checkpoint(Path(source), Path(out), spec, report=measured, watch=watch)
    return Quantized(Path(out), nbytes, measured)


def _progress(what: str, quiet: bool) -> Written:
    from miles_like.report.written import Written

    return Written(what, console_of(quiet))

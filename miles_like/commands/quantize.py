"""`miles-like quantize` and `dequantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import FORMATS
from miles_like.commands.output import console, echo, silent


def dequantize(hf_dir: Path, out_dir: Path) -> None:
    """Convert a quantized checkpoint to BF16."""
    with one_sentence():
        from miles_like.pipeline.dequantize import dequantize_checkpoint
        from miles_like.report.written import Written

        watch = Written("dequantizing", console())
        echo(f"{dequantize_checkpoint(hf_dir, out_dir, manifest=True, watch=watch):,} bytes -> {out_dir}")


def quantize(
    hf_dir: Path,
    out_dir: Path,
    format: Annotated[str, typer.Option("--format", help=FORMATS)] = "fp8",
    scope: Annotated[
        str | None,
        typer.Option("--scope", help="weights to quantize: all or experts; default for 4-bit formats: experts"),
    ] = None,
    block: Annotated[str | None, typer.Option("--block", help="FP8 block size, rows x columns, e.g. 128x128")] = None,
    group: Annotated[int | None, typer.Option("--group", help="INT4 group size in columns: 32, 64 or 128")] = None,
    convention: Annotated[
        str | None, typer.Option("--convention", help="tensor names: deepseek, sglang, compressed-tensors or modelopt")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", metavar="PATTERN", help="modules to leave unquantized, e.g. layers.0.self_attn or re:..."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="measure the quantization error and write a table, a JSON file and plots")
    ] = False,
) -> None:
    """Quantize a BF16 checkpoint."""
    with one_sentence():
        from miles_like.api import checkpoints

        done = checkpoints.quantize(
            hf_dir,
            out_dir,
            format=format,
            scope=scope,
            block=block,
            group=group,
            convention=convention,
            ignore=ignore or (),
            report=report,
            quiet=silent(),
        )
        if done.report is not None:
            console().print(done.report.table())
        echo(done)

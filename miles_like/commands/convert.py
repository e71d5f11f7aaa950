"""`miles-like convert`: checkpoints between Hugging Face and Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import FORMATS, Command, Group
from miles_like.commands.output import echo, silent
from miles_like.limits.memory_size import parse_bytes

convert = typer.Typer(cls=Group, no_args_is_help=True, help="Convert checkpoints between Hugging Face and Megatron.")
MemoryOption = Annotated[
    str, typer.Option("--memory-limit", help="memory limit of all processes on this machine, e.g. 4GiB")
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="processes on each machine")]
RayOption = Annotated[str | None, typer.Option("--ray-address", help="share the work with this Ray cluster's nodes")]


@convert.command("to-megatron", cls=Command)
def to_megatron(
    hf_dir: Path,
    out_dir: Path,
    tp: Annotated[int, typer.Option("--tp", min=1, help="tensor-parallel ranks that the shards are cut for")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="pipeline stages that convert in parallel")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="expert-parallel ranks that convert in parallel")] = 1,
    etp: Annotated[int, typer.Option("--etp", min=1, help="tensor-parallel ranks of the experts")] = 1,
    memory_limit: MemoryOption = "4GiB",
    workers: WorkersOption = 1,
    ray_address: RayOption = None,
) -> None:
    """Convert a BF16 or quantized Hugging Face directory to Megatron torch_dist shards that load in any layout."""
    with one_sentence():
        from miles_like.api import checkpoints

        done = checkpoints.convert(
            hf_dir,
            out_dir,
            to="megatron",
            tp=tp,
            pp=pp,
            ep=ep,
            etp=etp,
            memory_limit=memory_limit,
            workers=workers,
            ray_address=ray_address,
            quiet=silent(),
        )
        echo(done)


@convert.command("to-hf", cls=Command)
def to_hf(
    megatron_dir: Path,
    out_dir: Path,
    format: Annotated[str, typer.Option("--format", help=f"bf16, {FORMATS}")] = "bf16",
    hf_config: Annotated[
        Path | None, typer.Option("--hf-config", help="Hugging Face directory of the model that was trained")
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option("--lora-alpha", help="merge the checkpoint's adapters, as trained with this alpha")
    ] = None,
    memory_limit: MemoryOption = "4GiB",
    workers: WorkersOption = 1,
    ray_address: RayOption = None,
) -> None:
    """Convert Megatron torch_dist shards, from a conversion or saved by training, to a Hugging Face directory."""
    with one_sentence():
        from miles_like.api import checkpoints

        done = checkpoints.convert(
            megatron_dir,
            out_dir,
            to="hf",
            format=format,
            hf_config=hf_config,
            lora_alpha=lora_alpha,
            memory_limit=memory_limit,
            workers=workers,
            ray_address=ray_address,
            quiet=silent(),
        )
        echo(done)


@convert.command("check", cls=Command)
def check_converted(directory: Path, memory_limit: MemoryOption = "4GiB", workers: WorkersOption = 1) -> None:
    """Verify every tensor and file of a converted or quantized directory against its manifest."""
    with one_sentence():
        from miles_like.pipeline import convert as conversions

        echo(conversions.check(directory, memory_limit=parse_bytes(memory_limit), workers=workers))

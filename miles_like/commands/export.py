"""`miles-like export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.convert import MemoryOption, WorkersOption
from miles_like.commands.options import FORMATS
from miles_like.commands.output import echo, silent


def export(
    run_dir: Path,
    out_dir: Path,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="export the checkpoint of step N; default: the latest")
    ] = None,
    format: Annotated[str, typer.Option("--format", help=f"bf16, {FORMATS}")] = "bf16",
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="directory of the initial model, if the run's cache was deleted"),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="REPO", help="then upload to this hub repository; a new repository is private"),
    ] = None,
    memory_limit: MemoryOption = "4GiB",
    workers: WorkersOption = 1,
) -> None:
    """Write the trained model of a run as a Hugging Face directory."""
    with one_sentence():
        from miles_like.api import checkpoints
        from miles_like.hf.push import check_push
        from miles_like.hf.push import push as upload

        if push is not None:
            check_push(push)
        done = checkpoints.export(
            run_dir,
            out_dir,
            step=step,
            format=format,
            hf_config=hf_config,
            memory_limit=memory_limit,
            workers=workers,
            quiet=silent(),
        )
        echo(done)
        if push is not None:
            echo(upload(out_dir, push, f"Model of the run {run_dir.resolve().name}, {format}"))

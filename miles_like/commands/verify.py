"""`miles-like verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import KeyFileOption, RayOption, SetOption
from miles_like.commands.output import console, echo


def verify(
    config: Annotated[Path, typer.Option("--config", help="configuration of the run")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="directory for logs and plots")] = Path("runs/verify"),
    json: Annotated[Path | None, typer.Option("--json", help="write metrics and verdicts to this file")] = None,
    rollouts: Annotated[
        Path | None,
        typer.Option("--rollouts", help="compare the samples of a run's rollouts/step_N.jsonl instead of new ones"),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="a run's checkpoints/step_N; default: the last of --run-dir, if any"),
    ] = None,
    server: Annotated[list[str] | None, typer.Option("--server", metavar="URL", help="use this running server")] = None,
    key_file: KeyFileOption = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="publish the trainer's weights to the --server after comparing hashes"),
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="find the first layer whose residual stream differs")
    ] = False,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="number of prompts to sample; default: 32")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    ray_address: RayOption = None,
) -> None:
    """Compare trainer and rollout log-probabilities and diagnose the difference.

    Exits 1 if it exceeds what the precision explains."""
    with one_sentence(run_dir / "logs"):
        from miles_like.api import models

        done = models.verify(
            config,
            run_dir=run_dir,
            rollouts=rollouts,
            checkpoint=checkpoint,
            servers=server or (),
            key_file=key_file,
            overwrite=overwrite,
            layers=layers,
            prompts=prompts,
            overrides=overrides,
            ray_address=ray_address,
            quiet=console().quiet,
        )
        found = done.report
        echo(f"Weights compared: {done.checkpoint or 'the initial ones'}")
        _print(found.table(), done.plots)
        if json is not None:
            found.write_json(json)
        if server and found.differing:
            changed = "published the trainer's weights to" if overwrite else "did not change"
            rest = "" if overwrite else "; --overwrite publishes the trainer's weights to them"
            echo(f"This command {changed} {', '.join(server)}{rest}.")
    console(stderr=not found.ok, soft_wrap=True).print(found.conclusion(), markup=False, highlight=False)
    if not found.ok:
        raise typer.Exit(1)


def _print(table: object, plots: Sequence[Path]) -> None:
    console().print(table)
    for path in plots:
        echo(f"-> {path}")

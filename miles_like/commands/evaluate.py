"""`miles-like eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import KeyFileOption, SetOption, check_writable
from miles_like.commands.output import console


def evaluate(
    hf_dir: Path,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]FILE", help="prompts and answers, instead of the config's sets"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="take columns, template, sampling, reward and sets from this run's config"),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="k of avg@k and pass@k; 1: greedy")] = None,
    greedy: Annotated[bool | None, typer.Option("--greedy/--no-greedy", help="one greedy answer per prompt")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="sampling temperature")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="limit of an answer")] = None,
    max_prompts: Annotated[int | None, typer.Option("--max-prompts", min=1, help="number of prompts per set")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="name or import path of the reward")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="sampling seed")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, help="threads of the embedded server")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="of the server; default: a free port")
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="URL", help="use this running server")] = None,
    key_file: KeyFileOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="write the metrics to this file")] = None,
    answers: Annotated[Path | None, typer.Option("--answers", help="write all answers to this JSON lines file")] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="directory of the server's log")] = Path("runs/eval"),
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Evaluate a checkpoint (BF16 or quantized) on held-out prompts."""
    with one_sentence(run_dir / "logs"):
        from miles_like.api import models

        for path in filter(None, (json, answers)):
            check_writable(path)
        found = models.evaluate(
            hf_dir,
            data=data or (),
            config=config,
            reward=reward,
            samples=samples,
            greedy=greedy,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            max_prompts=max_prompts,
            seed=seed,
            threads=threads,
            port=port,
            server=server,
            key_file=key_file,
            run_dir=run_dir,
            overrides=overrides,
            quiet=console().quiet,
        )
        console().print(found.table())
        if json is not None:
            found.write_json(json)
        if answers is not None:
            found.write_answers(answers)

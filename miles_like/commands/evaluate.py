"""`miles-like eval` and `miles-like calibrate`: of models, and of the rewards that judge them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import KeyFileOption, SetOption, check_writable
from miles_like.commands.output import console

if TYPE_CHECKING:
    from miles_like.run.evaluate import SearchOptions


DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="[NAME=]FILE", help="file of prompts and answers, instead of the configuration's"),
]
SamplesOption = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="k of avg@k and pass@k: sampled answers per prompt; 1: one greedy answer"),
]
PortOption = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="port of the server; default: any free port")
]
BestOption = Annotated[
    int | None,
    typer.Option("--best-of", min=2, metavar="N", help="sample N answers and choose one, instead of --samples"),
]
BeamOption = Annotated[
    int | None, typer.Option("--beam", min=1, metavar="W", help="also run a beam search that keeps W of the N answers")
]
StepOption = Annotated[
    int | None, typer.Option("--step-tokens", min=1, help="tokens per step of the beam search; default: 16")
]


def evaluate(
    hf_dir: Path,
    data: DataOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="run configuration with columns, template, sampling, reward and eval sets"),
    ] = None,
    samples: SamplesOption = None,
    greedy: Annotated[bool | None, typer.Option("--greedy/--no-greedy", help="one greedy answer per prompt")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="sampling temperature")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="tokens per answer")] = None,
    max_prompts: Annotated[int | None, typer.Option("--max-prompts", min=1, help="number of prompts per set")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="name or import path of the reward")] = None,
    best: BestOption = None,
    by: Annotated[str | None, typer.Option("--by", metavar="REWARD", help="reward that chooses the answer")] = None,
    beams: BeamOption = None,
    step_tokens: StepOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="sampling seed")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads of the embedded server")
    ] = None,
    port: PortOption = None,
    server: Annotated[str | None, typer.Option("--server", metavar="URL", help="use this running server")] = None,
    key_file: KeyFileOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="write the metrics to this file")] = None,
    answers: Annotated[Path | None, typer.Option("--answers", help="write all answers to this JSON lines file")] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="directory for the server's log")] = Path("runs/eval"),
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
            samples=samples if best is None else best,
            greedy=greedy,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            max_prompts=max_prompts,
            seed=seed,
            threads=threads,
            port=port,
            server=server,
            search=_search(samples, best, by, beams, step_tokens),
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


def _search(
    samples: int | None, best: int | None, by: str | None, beams: int | None, step_tokens: int | None
) -> SearchOptions | None:
    """None: no search. Raises ValueError for search options that have no effect without another option."""
    from miles_like.run.evaluate import SearchOptions

    if best is not None and samples is not None:
        raise ValueError(
            f"--samples {samples} and --best-of {best}: both set the number of sampled answers: pass one of them"
        )
    if best is not None and by is None:
        raise ValueError(f"--best-of {best} needs --by REWARD, a reward model or judge that chooses the answer")
    for option, value in {"--by": by, "--beam": beams}.items():
        if best is None and value is not None:
            raise ValueError(f"{option} {value} has no effect without --best-of N: pass the number of answers")
    if step_tokens is not None and beams is None:
        raise ValueError(f"--step-tokens {step_tokens} has no effect without --beam W: pass the number of beams")
    if best is None or by is None:
        return None
    return SearchOptions(
        best_of=best, by=by, beams=beams, **({} if step_tokens is None else {"step_tokens": step_tokens})
    )


def calibrate(
    pairs: Annotated[
        str,
        typer.Argument(metavar="PAIRS", help="held-out preference pairs: a json, jsonl or parquet file, or a hub name"),
    ],
    by: Annotated[
        list[str],
        typer.Option("--by", metavar="REWARD", help="reward of the configuration to measure; several are compared"),
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="run configuration with reward options, columns and template")
    ] = None,
    max_pairs: Annotated[
        int | None, typer.Option("--max-pairs", min=1, help="number of pairs, from the beginning of the file")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="directory with the chat template, for data.template = 'chat'")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Measure accuracy, biases and agreement of reward models and judges."""
    with one_sentence():
        from miles_like.run.calibrate import calibrate as measured
        from miles_like.run.calibrate import read_calibration_config

        if json is not None:
            check_writable(json)
        found = measured(read_calibration_config(config, overrides), by, pairs, max_pairs, tokenizer)
        for table in found.tables():
            console().print(table)
        if json is not None:
            found.write_json(json)

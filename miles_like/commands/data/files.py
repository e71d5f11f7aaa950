"""`miles-like data`: prompt files before a run, and after it its hard prompts and its answers as rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import Command, Group, SetOption, check_writable
from miles_like.commands.output import echo

if TYPE_CHECKING:
    from miles_like.datasets.settings import DataTools
    from miles_like.run.setup.model_plan import RunTokenizer

data = typer.Typer(
    cls=Group, no_args_is_help=True, help="Prompt files: faults, duplicates, splits, figures, rows of a run's answers."
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="run configuration with columns, template, reward and eval sets")
]
PromptKeyOption = Annotated[str | None, typer.Option("--prompt-key", help="column of the prompt")]
AnswerKeyOption = Annotated[str | None, typer.Option("--answer-key", help="column of the answer")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="HF_DIR", help="directory of a tokenizer, to count tokens and apply its chat template"
    ),
]
AgainstOption = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="[NAME=]FILE", help="eval set, instead of the configuration's"),
]
ThresholdOption = Annotated[
    float,
    typer.Option("--threshold", help="Jaccard similarity of 3-word shingles from which prompts count as duplicates"),
]
AnswersOption = Annotated[
    Path, typer.Option("--answers", metavar="FILE", help="what `miles-like eval --answers` wrote of these prompts")
]
CardOption = Annotated[
    Path | None, typer.Option("--card", metavar="FILE", help="write a data card in Markdown to this file")
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all findings to this JSON file")]


@data.command("check", cls=Command)
def check(
    file: Annotated[str, typer.Argument(help="jsonl, json or parquet file, or hub name")],
    config: ConfigOption = None,
    prompt_key: PromptKeyOption = None,
    answer_key: AnswerKeyOption = None,
    reward: Annotated[str | None, typer.Option("--reward", help="reward that verifies the answers")] = None,
    response: Annotated[
        str | None,
        typer.Option(
            "--response",
            metavar="TEXT",
            help="template of a model's response around {answer}; default: several common forms",
        ),
    ] = None,
    full: Annotated[float, typer.Option("--full", help="reward that a right answer must get")] = 1.0,
    against: AgainstOption = None,
    threshold: ThresholdOption = 0.8,
    tokenizer: TokenizerOption = None,
    shown: Annotated[int, typer.Option("--shown", min=0, help="number of rows printed per kind of finding")] = 10,
    json: JsonOption = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """List rows that a run rejects, wrong answers, duplicates and leaks into eval sets. Exits 1 if there are any."""
    with one_sentence():
        from miles_like.datasets.check import examine_file
        from miles_like.datasets.settings import eval_files

        settings = _settings(config, overrides, prompt_key, answer_key, reward)
        if json is not None:
            check_writable(json)
        held, used = eval_files(settings, against or ()), _tokenizer(tokenizer)
        found = examine_file(file, settings, tokenizer=used, held=held, threshold=threshold, full=full, form=response)
        for line in found.lines(shown):
            echo(line)
        if json is not None:
            found.write_json(json)
    if not found.ok:
        raise typer.Exit(1)


@data.command("stats", cls=Command)
def stats(
    file: Annotated[str, typer.Argument(help="jsonl, json or parquet file, or hub name")],
    config: ConfigOption = None,
    prompt_key: PromptKeyOption = None,
    answer_key: AnswerKeyOption = None,
    tokenizer: TokenizerOption = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers", metavar="FILE", help="output of `eval --answers`, to measure the prompts' pass rates"
        ),
    ] = None,
    pass_at: Annotated[float, typer.Option("--pass-at", help="lowest reward of an answer that passes")] = 1.0,
    json: JsonOption = None,
    card: CardOption = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Print counts, sources, licences, languages, lengths and pass rates of a file."""
    with one_sentence():
        from miles_like.datasets.card import write_card
        from miles_like.datasets.stats import measure
        from miles_like.datasets.strata import pass_rates
        from miles_like.datasets.table import read_table

        settings = _settings(config, overrides, prompt_key, answer_key, None)
        for path in (json, card):
            if path is not None:
                check_writable(path)
        used = _tokenizer(tokenizer)
        table = read_table(file, settings.data, used)
        found = measure(table, used, None if answers is None else pass_rates(answers, table, pass_at))
        for line in found.lines():
            echo(line)
        if json is not None:
            found.write_json(json)
        if card is not None:
            write_card(card, found)


@data.command("dedup", cls=Command)
def dedup(
    file: Annotated[str, typer.Argument(help="jsonl, json or parquet file, or hub name")],
    out: Annotated[Path, typer.Argument(help=".jsonl or .parquet file to write")],
    config: ConfigOption = None,
    prompt_key: PromptKeyOption = None,
    answer_key: AnswerKeyOption = None,
    against: AgainstOption = None,
    threshold: ThresholdOption = 0.8,
    card: CardOption = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Write the rows without duplicates and, with --against, without rows of eval sets."""
    with one_sentence():
        from miles_like.datasets.derive import write_reduced
        from miles_like.datasets.settings import eval_files

        for path in (out, card):
            if path is not None:
                check_writable(path)
        settings = _settings(config, overrides, prompt_key, answer_key, None)
        held = eval_files(settings, against or ())
        for line in write_reduced(file, out, settings.data, held=held, threshold=threshold, card_file=card):
            echo(line)


@data.command("split", cls=Command)
def split(
    file: Annotated[str, typer.Argument(help="jsonl, json or parquet file, or hub name")],
    out_dir: Annotated[Path, typer.Argument(help="directory to create, or an empty one")],
    parts: Annotated[str, typer.Option("--parts", metavar="NAME=SHARE,...")] = "train=0.9,heldout=0.1",
    config: ConfigOption = None,
    prompt_key: PromptKeyOption = None,
    answer_key: AnswerKeyOption = None,
    threshold: ThresholdOption = 0.8,
    seed: Annotated[int, typer.Option("--seed", help="seed of the split")] = 0,
    format: Annotated[
        str | None, typer.Option("--format", help="format of the parts: jsonl or parquet; default: that of FILE")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Split a file into parts by the hash of the prompt, and write a data card; similar prompts stay together."""
    with one_sentence():
        from miles_like.datasets.derive import write_split

        settings = _settings(config, overrides, prompt_key, answer_key, None)
        for line in write_split(file, out_dir, settings.data, parts, threshold=threshold, seed=seed, format=format):
            echo(line)


@data.command("recycle", cls=Command)
def recycle(
    run_dir: Annotated[Path, typer.Argument(help="run directory")],
    out: Annotated[Path, typer.Argument(help=".jsonl or .parquet file to write")],
    low: Annotated[float, typer.Option("--min-pass-rate", help="lowest pass rate of the prompts to write")] = 0.0,
    high: Annotated[float, typer.Option("--max-pass-rate", help="highest pass rate of the prompts to write")] = 0.25,
    pass_at: Annotated[
        float | None,
        typer.Option("--pass-at", help="lowest reward of a sample that passes; default: the curriculum's, or 1"),
    ] = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Write the prompts with a low pass rate in a run, with all columns of their rows."""
    with one_sentence():
        from miles_like.run.recycle import recycle_run

        _check_out(out)
        found, tables = recycle_run(run_dir, low=low, high=high, pass_at=pass_at, tokenizer=tokenizer)
        if not found.rows:
            raise ValueError(
                f"none of the {found.visited} prompts that {run_dir} visited had a pass rate of {low:g} to {high:g}: "
                "raise --max-pass-rate"
            )
        files = ", ".join(t.path for t in tables)
        unknown = f", of which {found.unknown} are not in the run's data files" if found.unknown else ""
        line = f"{len(found.rows)} of the {found.visited} prompts that were scored{unknown}; rows of {files}"
        _write(out, found.rows, line)


@data.command("pairs", cls=Command)
def pairs(
    file: Annotated[str, typer.Argument(help="the prompts that were answered: jsonl, json, parquet or a hub name")],
    out: Annotated[Path, typer.Argument(help=".jsonl or .parquet file to write")],
    answers: AnswersOption,
    per_prompt: Annotated[int, typer.Option("--per-prompt", metavar="N", help="most pairs of a prompt")] = 1,
    min_gap: Annotated[float, typer.Option("--min-gap", help="least difference of a pair's rewards")] = 0.0,
    config: ConfigOption = None,
    prompt_key: PromptKeyOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Write prompts with a better and a worse of their sampled answers, for preferences and reward models."""
    with one_sentence():
        from miles_like.datasets.sampled.examples import preference_pairs
        from miles_like.datasets.table import read_table

        _check_out(out)
        table = read_table(file, _settings(config, [], prompt_key, None, None).data, _tokenizer(tokenizer))
        found = preference_pairs(table, answers, per_prompt=per_prompt, min_gap=min_gap)
        _write(out, found.rows, found.line("pairs"))


@data.command("best", cls=Command)
def best(
    file: Annotated[str, typer.Argument(help="the prompts that were answered: jsonl, json, parquet or a hub name")],
    out: Annotated[Path, typer.Argument(help=".jsonl or .parquet file to write")],
    answers: AnswersOption,
    per_prompt: Annotated[int, typer.Option("--per-prompt", metavar="N", help="most answers of a prompt")] = 1,
    min_reward: Annotated[float, typer.Option("--min-reward", help="of an answer that is taken")] = 1.0,
    config: ConfigOption = None,
    prompt_key: PromptKeyOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Write prompts with the best of their sampled answers as `response`, for supervised fine-tuning."""
    with one_sentence():
        from miles_like.datasets.sampled.examples import best_answers
        from miles_like.datasets.table import read_table

        _check_out(out)
        table = read_table(file, _settings(config, [], prompt_key, None, None).data, _tokenizer(tokenizer))
        found = best_answers(table, answers, per_prompt=per_prompt, min_reward=min_reward)
        _write(out, found.rows, found.line("answers"))


def _check_out(out: Path) -> None:
    from miles_like.datasets.write import check_suffix

    check_suffix(out)
    check_writable(out)


def _write(out: Path, rows: Sequence[dict[str, Any]], line: str) -> None:
    from miles_like.datasets.write import Outputs

    with Outputs() as outputs:
        outputs.rows(out, rows)
    for note in outputs.notes:
        echo(note)
    echo(f"{out}: {line}")


def _settings(
    config: Path | None, overrides: list[str], prompt_key: str | None, answer_key: str | None, reward: str | None
) -> DataTools:
    from miles_like.datasets.settings import read_settings

    given = {"data.prompt_key": prompt_key, "data.answer_key": answer_key, "reward.name": reward}
    return read_settings(config, [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)])


def _tokenizer(directory: Path | None) -> RunTokenizer | None:
    from miles_like.run.setup.model_plan import run_tokenizer

    return None if directory is None else run_tokenizer(directory)

"""The command line. Errors a user can mend end in one sentence on stderr and exit status 2."""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich.console import Console
from rich.markup import escape

from miles_like import assemble
from miles_like.checks import Check, not_checked, refuse_wrong
from miles_like.command_errors import one_sentence
from miles_like.config import RunConfig
from miles_like.config_io import dump_config, load_config
from miles_like.pipeline import (
    STAGES,
    Stage,
    describe_cache,
    parse_stages,
    plan_stages,
    run_stages,
    stages_to_do,
)
from miles_like.run_directory import Mode, check_run_dir
from miles_like.run_state import check_kept
from miles_like.server_url import server_url

# the interpreter's last collection would walk a million imported objects: 0.3 s of every command
atexit.register(gc.freeze)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
convert = typer.Typer(no_args_is_help=True, help="Checkpoints from one form to another.")
app.add_typer(convert, name="convert")

DEMO = Path(__file__).resolve().parent / "demo_files" / "tiny.toml"
FORMATS = "fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4"
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="outputs of the stages before training; default: cache beside the run directory"),
]
SetOption = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override section.key of the config")]

FromStepOption = Annotated[
    int | None, typer.Option("--from-step", metavar="N", help="go on from the checkpoint of step N, not the last")
]


def check_writable(path: Path) -> None:
    """Before an hour's work, not after it. Raises OSError; leaves no file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.exists()
    path.touch()
    if not there:
        path.unlink()


def pipeline(
    config_path: Path,
    run_dir: Path,
    *,
    stages: str = ",".join(STAGES),
    overrides: list[str],
    fuse: bool = False,
    resume: bool = False,
    from_step: int | None = None,
    fresh: bool = False,
    dry_run: bool = False,
    ray_address: str | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Run (or with `dry_run` only print) the selected stages of a configuration."""
    console = Console()
    with one_sentence(run_dir / "logs"):
        resume = resume or from_step is not None
        if resume and fresh:
            option = "--resume" if from_step is None else "--from-step"
            raise ValueError(f"{option} continues a run and --fresh throws it away: give one of the two")
        if from_step is not None:
            check_kept(run_dir / "checkpoints", from_step)
        given = ["convert.fuse=true"] if fuse else []
        given += [] if cache_dir is None else [tomli_w.dumps({"cache_dir": str(cache_dir.resolve())}).strip()]
        config = load_config(config_path, [*overrides, *given])
        parts = assemble.pipeline_parts(config, console, ray_address or os.environ.get("RAY_ADDRESS") or None)
        mode: Mode = "resume" if resume else "fresh" if fresh else "auto"
        planned = plan_stages(config, run_dir, parts, mode=mode, from_step=from_step)
        selected = parse_stages(stages)
        if "train" in (to_do := stages_to_do(planned, selected, fresh=fresh)):
            check_run_dir(run_dir, mode)
        if dry_run:
            checks = parts.preflight(planned, to_do, False).run()
            refuse_wrong(checks)
            print_plan(console, config, planned, selected, run_dir)
            print_not_checked(console, checks)
            return
        console.print(f"[bold]{'cache':>10}[/]  {escape(describe_cache(config, run_dir))}", soft_wrap=True)
        try:
            run_stages(
                planned, selected, console, fresh=fresh, preflight=lambda names: parts.preflight(planned, names, True)
            )
        finally:
            assemble.shut_down()


def print_plan(console: Console, config: RunConfig, planned: list[Stage], selected: list[str], run_dir: Path) -> None:
    """What each stage would do: state, directory, bytes; processes and commands; the resolved configuration."""
    console.print(f"[bold]{'cache':>10}[/]  {escape(describe_cache(config, run_dir))}", soft_wrap=True)
    for stage in planned:
        state = "not selected" if stage.name not in selected else stage.why_not_done()
        unknown = "grows with the steps" if stage.name == "train" else "size known once fetched"
        size = unknown if stage.size is None else f"{stage.size:,} bytes"
        console.print(f"[bold]{stage.name:>10}[/]  {stage.what}", soft_wrap=True)
        done = state or "complete, would be skipped"
        console.print(f"{'':12}{size} -> {stage.directory}  [{done}]", markup=False, soft_wrap=True)
    console.print()
    for line in assemble.describe_processes(config, run_dir):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(dump_config(config), markup=False, soft_wrap=True)


def print_not_checked(console: Console, checks: Sequence[Check]) -> None:
    """The end of a dry run: what the run will check, before its first stage, that could not be checked from here."""
    lines = not_checked(checks)
    if lines:
        console.print("[bold]not checked from here[/], but by the run before its first stage:")
    for line in lines:
        console.print(f"{'':12}{line}", markup=False, soft_wrap=True)


@app.command()
def train(
    config: Path,
    run_dir: Annotated[Path, typer.Option("--run-dir")],
    overrides: SetOption = [],  # noqa: B006  typer reads the default, nobody changes it
    fuse: Annotated[bool, typer.Option("--fuse", help="decode while converting: no BF16 directory")] = False,
    resume: bool = False,
    from_step: FromStepOption = None,
    fresh: bool = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be done, touch nothing")] = False,
    ray_address: Annotated[str | None, typer.Option("--ray-address")] = None,
    cache_dir: CacheOption = None,
) -> None:
    """All five stages of a configuration, ending in a trained model."""
    how = {"fuse": fuse, "resume": resume, "fresh": fresh, "dry_run": dry_run, "cache_dir": cache_dir}
    pipeline(config, run_dir, overrides=overrides, from_step=from_step, ray_address=ray_address, **how)


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="where the run is kept")] = Path("runs/demo"),
    overrides: SetOption = [],  # noqa: B006  typer reads the default, nobody changes it
    resume: bool = False,
    fresh: bool = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be done, touch nothing")] = False,
) -> None:
    """Train the tiny model on two CPU cores: all five stages, with the configuration and data that are installed."""
    pipeline(DEMO, run_dir, overrides=overrides, resume=resume, fresh=fresh, dry_run=dry_run)


@app.command()
def dequantize(hf_dir: Path, out_dir: Path) -> None:
    """A quantized Hugging Face directory as BF16."""
    with one_sentence():
        typer.echo(f"{assemble.dequantize(hf_dir, out_dir):,} bytes -> {out_dir}")


@app.command()
def quantize(
    hf_dir: Path,
    out_dir: Path,
    format: Annotated[str, typer.Option("--format", help=FORMATS)] = "fp8",
    scope: Annotated[
        str | None, typer.Option("--scope", help="all or experts; of 4 bits the default is experts")
    ] = None,
    block: Annotated[str | None, typer.Option("--block", help="rows x columns of an FP8 block, as 128x128")] = None,
    group: Annotated[int | None, typer.Option("--group", help="columns of an INT4 group: 32, 64, 128")] = None,
    convention: Annotated[
        str | None, typer.Option("--convention", help="deepseek, sglang, compressed-tensors or modelopt")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="modules kept out, as layers.0.self_attn or re:..."),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="measure what is lost: a table, a file, plots")] = False,
) -> None:
    """A BF16 Hugging Face directory in a low-precision format."""
    with one_sentence():
        how = {"format": format, "scope": scope, "block": block, "group": group, "convention": convention}
        written = assemble.quantize(hf_dir, out_dir, Console(), report=report, ignore=ignore or (), **how)
        typer.echo(f"{written:,} bytes -> {out_dir}")


MemoryOption = Annotated[
    str, typer.Option("--memory-limit", help="resident memory of all processes of this machine, such as 4GiB")
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="processes on each machine")]
RayOption = Annotated[str | None, typer.Option("--ray-address", help="share the work with this Ray cluster's nodes")]


@convert.command("to-megatron")
def to_megatron(
    hf_dir: Path,
    out_dir: Path,
    tp: Annotated[int, typer.Option("--tp", min=1, help="cut so that such ranks read only their own bytes")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1)] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1)] = 1,
    etp: Annotated[int, typer.Option("--etp", min=1, help="as --tp, of the experts")] = 1,
    memory_limit: MemoryOption = "4GiB",
    workers: WorkersOption = 1,
    ray_address: RayOption = None,
) -> None:
    """A BF16 or quantized Hugging Face directory as Megatron torch_dist shards that load in any layout."""
    with one_sentence():
        work = assemble.ConvertWork(parse_bytes(memory_limit), workers, ray_address)
        try:
            typer.echo(assemble.to_megatron(hf_dir, out_dir, work, tp=tp, pp=pp, ep=ep, etp=etp))
        finally:
            assemble.shut_down()


@convert.command("to-hf")
def to_hf(
    megatron_dir: Path,
    out_dir: Path,
    format: Annotated[str, typer.Option("--format", help=f"bf16, {FORMATS}")] = "bf16",
    hf_config: Annotated[
        Path | None, typer.Option("--hf-config", help="Hugging Face directory of a checkpoint that training saved")
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option("--lora-alpha", help="merge the checkpoint's adapters, as trained with this alpha")
    ] = None,
    memory_limit: MemoryOption = "4GiB",
    workers: WorkersOption = 1,
    ray_address: RayOption = None,
) -> None:
    """Megatron torch_dist shards, converted or saved by training in any layout, as a Hugging Face directory."""
    with one_sentence():
        work = assemble.ConvertWork(parse_bytes(memory_limit), workers, ray_address)
        try:
            how = {"format": format, "hf_config": hf_config, "lora_alpha": lora_alpha}
            typer.echo(assemble.to_hf(megatron_dir, out_dir, work, **how))
        finally:
            assemble.shut_down()


@convert.command("check")
def check_converted(directory: Path, memory_limit: MemoryOption = "4GiB", workers: WorkersOption = 1) -> None:
    """Every tensor and file of a converted directory against its manifest."""
    with one_sentence():
        typer.echo(assemble.check(directory, memory_limit=parse_bytes(memory_limit), workers=workers))


def parse_bytes(text: str) -> int:
    """`4GiB`, `512 MiB` or a plain number of bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no amount of memory: write it as 4GiB or 512MiB")
    unit = (found[2] or "B").upper()[0]
    amount = float(found[1]) * 1024 ** "BKMGT".index(unit)
    if amount >= 2**63:
        raise ValueError(f"{text[:40]!r} is more memory than any machine addresses: write it as 4GiB or 512MiB")
    return int(amount)


KeyFileOption = Annotated[
    Path | None, typer.Option("--key-file", help="of mode 0600, with the server's key; else MILES_LIKE_SERVER_KEY")
]


@app.command()
def serve(
    hf_dir: Path,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)],
    host: Annotated[str, typer.Option("--host", help="beyond loopback only with a key")] = "127.0.0.1",
    threads: Annotated[int, typer.Option("--threads", min=1, max=1024)] = 2,
    key_file: KeyFileOption = None,
    routed_experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts/--no-return-routed-experts",
            help="return the experts of each token to requests that ask for them",
        ),
    ] = True,
) -> None:
    """The embedded engine behind SGLang's HTTP surface."""
    with one_sentence():
        how = {"host": host, "port": port, "threads": threads, "key_file": key_file}
        assemble.serve(hf_dir, **how, routed_experts=routed_experts)


@app.command()
def verify(
    config: Annotated[Path, typer.Option("--config")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="logs and pictures")] = Path("runs/verify"),
    json: Annotated[Path | None, typer.Option("--json", help="the figures and verdicts")] = None,
    rollouts: Annotated[
        Path | None, typer.Option("--rollouts", help="a rollouts/step_N.jsonl of a run, in place of new samples")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="a checkpoints/step_N of a run, in place of its beginning")
    ] = None,
    server: Annotated[
        list[str] | None, typer.Option("--server", metavar="URL", help="a running server, in place of starting one")
    ] = None,
    key_file: KeyFileOption = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="publish the trainer's weights to the servers named by --server, once hashed"),
    ] = False,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="how many are sampled, in place of 32")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer reads the default, nobody changes it
    ray_address: Annotated[str | None, typer.Option("--ray-address")] = None,
) -> None:
    """Compare trainer and rollout and say what the gap is made of; status 1 where it is not the precision's."""
    console = Console()
    with one_sentence(run_dir / "logs"):
        loaded = load_config(config, overrides)
        for url in server or ():
            server_url(url)
        try:
            servers = {"attached": server or (), "key_file": key_file, "overwrite": overwrite}
            how = {"rollouts": rollouts, "checkpoint": checkpoint, "prompts": prompts, **servers}
            found, pictures = assemble.verify(loaded, run_dir, console, ray_address, **how)
        finally:
            assemble.shut_down()
        console.print(found.table())
        for path in pictures:
            console.print(f"-> {path}", soft_wrap=True)
        if json is not None:
            found.write_json(json)
        if server and found.differing:
            done = "published the trainer's weights to" if overwrite else "did not change"
            rest = "" if overwrite else "; --overwrite publishes the trainer's weights to them"
            console.print(f"This command {done} {', '.join(server)}{rest}.", markup=False, soft_wrap=True)
    out = Console(stderr=not found.ok, soft_wrap=True)
    out.print(found.conclusion(), markup=False, highlight=False)
    if not found.ok:
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    hf_dir: Path,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]FILE", help="prompts and answers, in place of the config's"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="a run's: its columns, template, sampling, reward and sets")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="k of avg@k and pass@k; 1: greedy")] = None,
    greedy: Annotated[bool | None, typer.Option("--greedy/--no-greedy", help="one such answer each")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="of the sampled answers")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    max_prompts: Annotated[int | None, typer.Option("--max-prompts", min=1, help="the first of each set")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="a name or an import path")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="of the embedded server")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="of the server; any free one when left out")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="a running server, in place of starting one")
    ] = None,
    key_file: KeyFileOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="the figures")] = None,
    answers: Annotated[Path | None, typer.Option("--answers", help="every answer, a JSON object a line")] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="the server's log")] = Path("runs/eval"),
    overrides: SetOption = [],  # noqa: B006  typer reads the default, nobody changes it
) -> None:
    """Let a Hugging Face directory, BF16 or quantized, answer held-out prompts, and score it."""
    given = {
        "eval.samples": samples,
        "eval.greedy": greedy,
        "eval.temperature": temperature,
        "rollout.max_new_tokens": max_new_tokens,
        "eval.max_prompts": max_prompts,
        "reward.name": reward,
        "seed": seed,
        "rollout.embedded.threads": threads,
        "rollout.port": port,
    }
    short = [f"{key}={str(v).lower() if v is True or v is False else v}" for key, v in given.items() if v is not None]
    console = Console()
    with one_sentence(run_dir / "logs"):
        if server is not None:
            server_url(server)
        for option, value in (("--threads", threads), ("--port", port)):
            if server is not None and value is not None:
                raise ValueError(f"{option} {value} does nothing with --server, which runs already: remove one of them")
        for path in (json, answers):
            if path is not None:
                check_writable(path)
        how = {"config": config, "overrides": [*overrides, *short], "data": data or (), "server": server}
        how["key_file"] = key_file
        found = assemble.evaluate(hf_dir, run_dir, console, **how)
        console.print(found.table())
        if json is not None:
            found.write_json(json)
        if answers is not None:
            found.write_answers(answers)


@app.command()
def report(run_dir: Path) -> None:
    """report.html and plots of a run directory."""
    with one_sentence():
        typer.echo(f"-> {assemble.report(run_dir)}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()

"""The command line. Errors that a user can fix end in one sentence on stderr and exit status 2."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich.console import Console
from rich.markup import escape

from miles_like.check_results import CheckResult, describe_unchecked, raise_failures
from miles_like.checkpoint.run_state import check_kept
from miles_like.command_errors import one_sentence
from miles_like.commands.convert import convert
from miles_like.commands.options import (
    FORMATS,
    CacheOption,
    DryRunOption,
    ForceOption,
    FreshOption,
    FromStepOption,
    FuseOption,
    RayOption,
    ResumeOption,
    RunDirOption,
    SetOption,
    check_writable,
)
from miles_like.commands.plan import plan
from miles_like.commands.simulate import simulate
from miles_like.config.load import dump_config, load_config
from miles_like.config.run import RunConfig
from miles_like.pipeline.dequantize import dequantize_checkpoint
from miles_like.pipeline.quant_report import QuantReport
from miles_like.pipeline.quantize import quantize_checkpoint, spec_of
from miles_like.pipeline.run_directory import Mode, check_run_dir
from miles_like.pipeline.stages import (
    STAGES,
    Stage,
    describe_cache,
    parse_stages,
    plan_stages,
    run_stages,
    stages_to_do,
)
from miles_like.preflight.describe import describe_plan
from miles_like.run import assemble
from miles_like.run.setup.model_plan import PlannedModel
from miles_like.run.setup.run_cluster import RunCluster, on_every_node
from rollout.server_key import given_key
from rollout.server_url import server_url

# otherwise the interpreter's last collection visits a million imported objects: 0.3 s of every command
atexit.register(gc.freeze)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(convert, name="convert")
app.command("plan")(plan)

DEMO = Path(__file__).resolve().parent / "demo_files" / "tiny.toml"


@app.command("train")
def pipeline(
    config: Path,
    run_dir: RunDirOption,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    fuse: FuseOption = False,
    resume: ResumeOption = False,
    from_step: FromStepOption = None,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
    ray_address: RayOption = None,
    cache_dir: CacheOption = None,
    force: ForceOption = False,
    stages: Annotated[str, typer.Option("--stages", hidden=True)] = ",".join(STAGES),  # of scripts/run_deepseek.py
) -> None:
    """Run all five stages of a configuration, which ends in a trained model."""
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
        loaded = load_config(config, [*overrides, *given])
        model = assemble.known_model(loaded)
        address = ray_address or os.environ.get("RAY_ADDRESS") or None
        run_dir = on_every_node(run_dir, address)
        cluster = RunCluster(loaded, run_dir, console, address)
        functions = assemble.stage_functions(loaded, model, console, cluster, force=force)
        mode: Mode = "resume" if resume else "fresh" if fresh else "auto"
        planned = plan_stages(loaded, run_dir, functions, mode=mode, from_step=from_step)
        selected = parse_stages(stages, fuse=loaded.convert.fuse)
        if "train" in (to_do := stages_to_do(planned, selected, fresh=fresh)):
            check_run_dir(run_dir, mode)
        if dry_run:
            checks = functions.preflight(planned, to_do, False).run()
            raise_failures(checks)
            joins = functions.joins_cluster
            lines = describe_plan(loaded, functions.sizes, planned, to_do, joins_cluster=joins)
            for line in [*lines, *assemble.describe_memory(loaded, model)]:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            console.print()
            print_stages(console, loaded, model, planned, selected, run_dir)
            print_not_checked(console, checks)
            return
        console.print(f"[bold]{'cache':>10}[/]  {escape(describe_cache(loaded, run_dir))}", soft_wrap=True)
        try:
            run_stages(
                planned,
                selected,
                console,
                fresh=fresh,
                preflight=lambda names: functions.preflight(planned, names, True),
            )
        finally:
            assemble.shut_down()


def print_stages(
    console: Console,
    config: RunConfig,
    model: PlannedModel | None,
    planned: list[Stage],
    selected: list[str],
    run_dir: Path,
) -> None:
    """Print each stage's state, directory and bytes; processes and commands; the resolved configuration."""
    console.print(f"[bold]{'cache':>10}[/]  {escape(describe_cache(config, run_dir))}", soft_wrap=True)
    for stage in planned:
        state = "not selected" if stage.name not in selected else stage.why_not_done()
        unknown = "grows with the steps" if stage.name == "train" else "size known once fetched"
        size = unknown if stage.size is None else f"{stage.size:,} bytes"
        console.print(f"[bold]{stage.name:>10}[/]  {stage.what}", soft_wrap=True)
        done = state or "complete, would be skipped"
        console.print(f"{'':12}{size} -> {stage.directory}  [{done}]", markup=False, soft_wrap=True)
    console.print()
    for line in assemble.describe_processes(config, run_dir, model):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(dump_config(config), markup=False, soft_wrap=True)


def print_not_checked(console: Console, checks: Sequence[CheckResult]) -> None:
    """Print the checks that a dry run cannot make and the run makes before its first stage."""
    lines = describe_unchecked(checks)
    if lines:
        console.print("[bold]not checked from here[/], but by the run before its first stage:")
    for line in lines:
        console.print(f"{'':12}{line}", markup=False, soft_wrap=True)


@app.command()
def demo(
    run_dir: RunDirOption = Path("runs/demo"),
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train the tiny model on two CPU cores: all five stages, with the configuration and data that are installed."""
    pipeline(DEMO, run_dir, overrides=overrides, resume=resume, fresh=fresh, dry_run=dry_run)


@app.command()
def dequantize(hf_dir: Path, out_dir: Path) -> None:
    """Convert a quantized Hugging Face directory to BF16."""
    with one_sentence():
        typer.echo(f"{dequantize_checkpoint(hf_dir, out_dir):,} bytes -> {out_dir}")


@app.command()
def quantize(
    hf_dir: Path,
    out_dir: Path,
    format: Annotated[str, typer.Option("--format", help=FORMATS)] = "fp8",
    scope: Annotated[
        str | None, typer.Option("--scope", help="all or experts; default for 4-bit formats: experts")
    ] = None,
    block: Annotated[str | None, typer.Option("--block", help="rows x columns of an FP8 block, e.g. 128x128")] = None,
    group: Annotated[int | None, typer.Option("--group", help="columns of an INT4 group: 32, 64, 128")] = None,
    convention: Annotated[
        str | None, typer.Option("--convention", help="deepseek, sglang, compressed-tensors or modelopt")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="modules to leave unquantized: layers.0.self_attn or re:..."),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="measure the error: a table, a file, plots")] = False,
) -> None:
    """Convert a BF16 Hugging Face directory to a low-precision format."""
    with one_sentence():
        spec = spec_of(format, scope=scope, block=block, group=group, convention=convention, ignore=ignore or ())
        measured = QuantReport(spec) if report else None
        written = quantize_checkpoint(hf_dir, out_dir, spec, report=measured)
        if measured is not None:
            Console().print(measured.table())
        typer.echo(f"{written:,} bytes -> {out_dir}")


KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="file of mode 0600 with the key; default: MILES_LIKE_SERVER_KEY"),
]


@app.command()
def serve(
    hf_dir: Path,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)],
    host: Annotated[str, typer.Option("--host", help="addresses other than loopback need a key")] = "127.0.0.1",
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
    """Serve a model with the embedded engine and SGLang's HTTP API."""
    with one_sentence():
        from rollout.embedded.server import app as server

        arguments = ["--model-path", str(hf_dir), "--host", host, "--port", str(port), "--threads", str(threads)]
        arguments += ["--enable-return-routed-experts"] if routed_experts else []
        server.serve(server.parse(arguments), given_key(key_file))


@app.command()
def verify(
    config: Annotated[Path, typer.Option("--config")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="logs and plots")] = Path("runs/verify"),
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
    layers: Annotated[
        bool, typer.Option("--layers", help="name the first layer whose residual stream differs")
    ] = False,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="to sample, 32 by default")] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    ray_address: RayOption = None,
) -> None:
    """Compare trainer and rollout and attribute the gap; status 1 if the precision does not explain it."""
    console = Console()
    with one_sentence(run_dir / "logs"):
        loaded = load_config(config, overrides)
        for url in server or ():
            server_url(url)
        try:
            from miles_like.run.verify import VerifyOptions

            key = given_key(key_file)
            options = VerifyOptions(
                rollouts=rollouts,
                checkpoint=checkpoint,
                attached=server or (),
                key=key,
                overwrite=overwrite,
                layers=layers,
                prompts=prompts,
            )
            found, plots = assemble.verify(loaded, run_dir, console, ray_address, options)
        finally:
            assemble.shut_down()
        console.print(found.table())
        for path in plots:
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


def check_running(server: str, options: Mapping[str, int | None]) -> None:
    """Raises ValueError for a malformed URL of a running server, and for options of a server that is started."""
    server_url(server)
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} {value} does nothing with --server, which runs already: remove one of them")


@app.command(name="eval")
def evaluate(
    hf_dir: Path,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]FILE", help="prompts and answers, in place of the config's"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="a run's: columns, template, sampling, reward and sets"),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="k of avg@k and pass@k; 1: greedy")] = None,
    greedy: Annotated[bool | None, typer.Option("--greedy/--no-greedy", help="one greedy answer per prompt")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="of the sampled answers")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    max_prompts: Annotated[int | None, typer.Option("--max-prompts", min=1, help="number of prompts per set")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="a name or an import path")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="of the embedded server")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="of the server; by default any free one")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="a running server, in place of starting one")
    ] = None,
    key_file: KeyFileOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="the figures")] = None,
    answers: Annotated[Path | None, typer.Option("--answers", help="every answer, one JSON object per line")] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="the server's log")] = Path("runs/eval"),
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Evaluate a Hugging Face directory, BF16 or quantized, on held-out prompts."""
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
            check_running(server, {"--threads": threads, "--port": port})
        for path in (json, answers):
            if path is not None:
                check_writable(path)
        from miles_like.run.evaluate import EvalAlone, read_evaluation_config

        settings = read_evaluation_config(config, [*overrides, *short], data or ())
        found = EvalAlone(hf_dir, settings, run_dir, console, server, given_key(key_file)).run()
        console.print(found.table())
        if json is not None:
            found.write_json(json)
        if answers is not None:
            found.write_answers(answers)


@app.command()
def doctor(
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="a Ray cluster, all nodes of which are examined")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="a run's, to whose nodes, GPUs, ports and disks they are held")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="that run's, examined with the other disks")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="everything that was found and measured")] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Examine the nodes of a Ray cluster, or this machine: a table, and a remedy for each fault; status 1 with one."""
    console = Console()
    with one_sentence():
        from miles_like.doctor.report import print_examination, write_examination
        from miles_like.preflight.examination import examine_nodes

        loaded = None if config is None else load_config(config, overrides)
        of_run = [*(f"--set {one}" for one in overrides), *([] if run_dir is None else [f"--run-dir {run_dir}"])]
        if config is None and of_run:
            raise ValueError(f"{of_run[0]} does nothing without --config: give the run's configuration")
        if json is not None:
            check_writable(json)
        try:
            address = ray_address or os.environ.get("RAY_ADDRESS") or None
            found = examine_nodes(loaded, address, console, None if run_dir is None else run_dir.resolve())
        finally:
            assemble.shut_down()
        print_examination(console, found)
        if json is not None:
            write_examination(json, found)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def report(run_dir: Path) -> None:
    """Write report.html and the plots of a run directory."""
    with one_sentence():
        from miles_like.report.html import write_report

        write_report(run_dir)
        typer.echo(f"-> {run_dir / 'report.html'}")


app.command()(simulate)


def main() -> None:
    app()


if __name__ == "__main__":
    main()

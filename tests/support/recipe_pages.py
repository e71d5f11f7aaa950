"""docs/recipes: a page for each shipped configuration with GPUs, one for those that run on CPU, and chains of runs.

    python -m tests.support.recipe_pages            # which pages differ from what the configurations plan
    python -m tests.support.recipe_pages --write    # writes them again

A page's head (`head`) is made of the configuration alone, its other figures by what `miles-like plan` computes. Pages
of chains are written by hand; the list has their titles.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from rich.console import Console

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.planning.memory.parts import GIB, PHASES, gib, total
from miles_like.planning.plan import Plan
from miles_like.run import assemble
from miles_like.run.setup.model_plan import PlannedModel
from miles_like.run.step_time import Asked, not_timed, predicted
from miles_like.timing.published.models import published_shapes
from miles_like.timing.published.nemo_rl import nemo_rl
from miles_like.timing.published.others import prime_rl
from tests.support.planned import planned as stages_of
from tests.support.plans import CONFIGS, model_of, path_of
from tests.support.plans import shipped as names_of_shipped

README = Path(__file__).parents[2] / "README.md"
FOLDER = README.parent / "docs" / "recipes"
CPU = "tiny"  # the page of configurations without GPUs
CHAINS = {  # pages of several runs, one from the other's checkpoint, written by hand: name -> what each is for
    "chain_reward_model": "answers are learnt from examples, then judged by a model of preferences",
    "chain_preferences": "preferences are learnt directly, then a verifier rewards",
    "chain_reasoning": "a large model learns to think aloud, and a small one from it",
}
INDEX = "index"
MADE = "<!-- made by: python -m tests.support.recipe_pages --write -->"
END_OF_HEAD = "## Memory"
BEGIN, END = "<!-- where: python -m tests.support.recipe_pages --write -->", "<!-- end of where -->"
IN_README = {  # configuration -> how README names its hardware
    "qwen3_0_6b": "one GPU of 80 GB",
    "qwen3_30b_a3b_fp8_node": "one node of 8 GPUs",
    "deepseek_v3_fp8": "16 nodes of 8 GPUs",
}
LINK = "../configuration_keys.md"
WIDTH = 120  # columns of prose
INTRODUCTION = (
    "A page for each configuration in `configs/`: hardware, planned memory and step time, published figures of other "
    "projects for the same model, and the configuration on CPU with the same keys. Configurations with GPUs are "
    "planned and have not yet run on GPUs; those of [tiny](tiny.md) run on a laptop."
)
OF_CHAINS = (
    "Several runs, each from the former's checkpoint: whole on the tiny model, with the command that writes the "
    "figures of a run, and the "
    "configurations and keys for a model of 4 B parameters, which have not been run."
)
TWINS = (
    "A twin has the keys of its configuration (algorithm, precision, replay, loop) on CPU ranks with a random model of "
    "the same family and a small batch. It shows that these keys work together, not that a task is learnt: the warm-up "
    "is left out (`model.make.max_steps = 0`)."
)
TRUST = (
    "The same formulas are within 25 % of the published figure in 41 of 48 runs of other projects "
    "([calibration](../plan.md#calibration))."
)
SOURCES = {
    "NeMo-RL v0.6": "NeMo-RL v0.6.0, docs/about/performance-summary.md",
    "prime-rl": "prime-rl, benchmarks/results/BENCHMARKS.md of 2026-02-07",
}


@cache
def shipped() -> tuple[str, ...]:
    return tuple(names_of_shipped())


def pages() -> dict[str, str]:
    """Page name -> text, of all of docs/recipes but CHAINS."""
    return {INDEX: index(), CPU: cpu_page(), **{name: page(name) for name in shipped()}}


def page(name: str) -> str:
    """Of a configuration with GPUs."""
    config, path = load_config(path_of(name)), path_of(name)
    model = model_of(config)
    with tempfile.TemporaryDirectory() as run_dir:
        stages = stages_of(config, Path(run_dir) / "run")
        plan = assemble.memory_plan(config, model, stages)
    body = [*_memory(plan), *_time(config, model, plan), *_published(path), *_twin(name)]
    return "\n".join([head(name), *body]) + "\n"


def head(name: str) -> str:
    """Title, description and the tables that need no plan; ends before `END_OF_HEAD`."""
    config = load_config(path_of(name))
    rows = [*_hardware(config), *_run(config)]
    return "\n".join(
        [
            f"# {name}.toml",
            "",
            MADE,
            "",
            *textwrap.wrap(description(path_of(name)), WIDTH),
            "",
            "Planned, not yet run on GPUs.",
            "",
            "| part | value |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in rows),
            "",
            "```",
            f"miles-like plan configs/{name}.toml",
            f"miles-like train configs/{name}.toml --run-dir runs/{name} --dry-run",
            f"miles-like train configs/{name}.toml --run-dir runs/{name}",
            "```",
            "",
        ]
    )


def index() -> str:
    """The list of all pages, smallest hardware first."""

    def size(name: str) -> tuple[int, int, str]:
        cluster = load_config(path_of(name)).cluster
        return cluster.nodes, cluster.gpus_per_node, name

    rows = []
    for name in sorted(shipped(), key=size):
        config = load_config(path_of(name))
        rows.append(f"| {_gpus(config)} | [{name}]({name}.md) | {_model(config)} | {_formats(config)} |")
    return "\n".join(
        [
            "# Recipes",
            "",
            MADE,
            "",
            *textwrap.wrap(INTRODUCTION, WIDTH),
            "",
            "| hardware | recipe | model | rollout weights |",
            "|---|---|---|---|",
            f"| two CPU cores | [tiny]({CPU}.md) | random models of 1 to 2 M parameters | all formats |",
            *rows,
            "",
            "For other hardware or another model: `miles-like plan CONFIG --search` ([the plan](../plan.md#search)).",
            "",
            "## Chains",
            "",
            *textwrap.wrap(OF_CHAINS, WIDTH),
            "",
            *(f"- [{_title(name)}]({name}.md): {purpose}" for name, purpose in CHAINS.items()),
            "",
        ]
    )


def _title(name: str) -> str:
    """Of a page of CHAINS, without the word before the colon."""
    head = (FOLDER / f"{name}.md").read_text("utf-8").partition("\n")[0]
    return head.removeprefix("# Chain: ")


def cpu_page() -> str:
    """Of configurations without GPUs, and of the twins."""
    own = [path for path in sorted(CONFIGS.glob("*.toml")) if path.stem not in shipped()]
    twins = sorted((CONFIGS / "cpu").glob("*.toml"))
    used = {twin(name): name for name in reversed(shipped()) if twin(name)}
    return "\n".join(
        [
            "# Configurations that run on a laptop",
            "",
            MADE,
            "",
            "Two CPU cores, no GPU, no download: the run makes its model and warms it up.",
            "",
            "| configuration | what it shows |",
            "|---|---|",
            *(f"| `configs/{path.name}` | {description(path)} |" for path in own),
            "",
            "```",
            "miles-like train configs/tiny.toml --run-dir runs/demo",
            "miles-like train configs/tiny_qwen.toml --run-dir runs/qwen --set train.steps=20",
            "```",
            "",
            "## Twins of configurations with GPUs",
            "",
            *textwrap.wrap(TWINS, WIDTH),
            "",
            "| twin | of |",
            "|---|---|",
            *(f"| `configs/cpu/{path.name}` | [{used[path.stem]}]({used[path.stem]}.md) |" for path in twins),
            "",
        ]
    )


def readme(text: str) -> str:
    """`text` of README with the table of what runs where, whose figures are those of the pages. Raises ValueError
    without the table's markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no lines {BEGIN!r} and {END!r}: add them")
    rows = [
        "| hardware | model | state | command |",
        "|---|---|---|---|",
        "| laptop, two CPU cores | DeepSeek-V3 with 1.1 M parameters | proved by tests | `make demo` |",
    ]
    for name, hardware in IN_README.items():
        seen = (FOLDER / f"{name}.md").read_text("utf-8")
        (used,), (seconds,) = (
            re.findall(r": ([\d.]+) of [\d.]+ GiB\)", seen),
            re.findall(r"\*\*([\d,.]+) s\*\* a step", seen),
        )
        planned = f"configured and planned, not yet run on GPUs: {used} GiB a GPU, {seconds} s a step"
        command = f"`miles-like train configs/{name}.toml --run-dir runs/{name}`"
        model = load_config(path_of(name)).model.path.rpartition("/")[2]
        rows.append(f"| [{hardware}](docs/recipes/{name}.md) | {model} | {planned} | {command} |")
    return "\n".join([f"{before}{BEGIN}", "", *rows, "", f"{END}{after}"])


def twin(name: str) -> str:
    """The configuration in configs/cpu with the keys of `name`; "": none."""
    names = {path.stem for path in (CONFIGS / "cpu").glob("*.toml")}
    parent = re.search(r'^extends = "(\w+)\.toml"$', path_of(name).read_text("utf-8"), re.MULTILINE)
    return name if name in names else twin(parent[1]) if parent else ""


@cache
def description(path: Path) -> str:
    """The comment at the head of a configuration, as one paragraph."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).replace("(docs/first_launch.md)", "([first launch](../first_launch.md))")


def _hardware(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "model", _model(config)
    yield "hardware", _gpus(config)
    at = config.parallel
    sizes = (
        ("TP", at.tp),
        ("PP", at.pp),
        ("VPP", at.vpp),
        ("CP", at.cp),
        ("DP", at.dp),
        ("EP", at.ep),
        ("ETP", at.etp),
    )
    yield "trainer", " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"
    yield "rollout", f"{config.rollout.servers} {config.rollout.engine} server{'s'[: config.rollout.servers > 1]}"
    if config.cluster.colocate:
        yield "placement", "trainer and servers take turns on the same GPUs ([turns](../turns.md))"


def _run(config: RunConfig) -> Iterator[tuple[str, str]]:
    train = config.train
    yield "rollout weights", _formats(config)
    yield (
        "algorithm",
        f"`{config.algorithm.name}`, {train.groups_per_step} prompts x {train.samples_per_group} samples a step",
    )
    yield "answers", f"up to {config.rollout.max_new_tokens:,} tokens"
    yield "routing replay", f"`{config.replay.mode}`"
    if config.kernels.offload_optimizer:
        yield "optimizer on the host", f"{config.kernels.offload_optimizer:.0%}"
    yield "all keys", f"[configuration keys]({LINK})"


def _model(config: RunConfig) -> str:
    layers = f", its first {config.model.first_layers} layers" if config.model.first_layers else ""
    path = Path(config.model.path)
    name = f"./{path.relative_to(CONFIGS)}" if path.is_relative_to(CONFIGS) else config.model.path
    return f"`{name}`{layers}"


def _gpus(config: RunConfig) -> str:
    cluster = config.cluster
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.gpus_per_node} {cluster.device}"


def _formats(config: RunConfig) -> str:
    precision = config.precision
    return f"{precision.format}{', QAT' if precision.qat else ''}"


def _memory(plan: Plan) -> Iterator[str]:
    phases = [phase for phase in PHASES if any(phase in row.phases for row in plan.stages)]
    yield from (END_OF_HEAD, "")
    yield f"Planned GiB of one GPU, of {gib(plan.device.memory)} that a process can use:"
    yield ""
    yield f"| GPUs | layers | {' | '.join(phases)} |"
    yield "|---" * (2 + len(phases)) + "|"
    for row in plan.stages:
        sums = [gib(total(row.phases[phase])) if phase in row.phases else "" for phase in phases]
        roles = " + ".join((row.name, *row.shared_with))
        yield f"| {row.gpus}: {roles} | {row.layers} | {' | '.join(sums)} |"
    yield ""
    yield f"The plan {plan.verdict()}."
    yield f"Host memory of the fullest node: {gib(plan.host.total)} of {gib(plan.host.memory)} GiB."
    if plan.disk is not None:
        shared, node = sum(plan.disk.shared.values()), sum(plan.disk.node.values())
        yield f"Disk: {shared / GIB:,.0f} GiB on the shared file system, {node / GIB:,.0f} GiB on each node."
    yield ""


def _time(config: RunConfig, model: PlannedModel, plan: Plan) -> Iterator[str]:
    yield from ("## Step time", "")
    found = predicted(config, model, plan, Asked(prompt=None, response=None, reward_s=0.0))
    if found is not None:
        setup, time = found
        load = setup.load
        text = (
            f"Planned, not measured: **{_seconds(time.seconds)} s** a step, {time.tokens_per_s:,.0f} tokens/s, for "
            f"{load.samples:,} samples with prompts of {load.prompt:,.0f} and responses of {load.responses.mean:,.0f} "
            f"tokens on average. {TRUST}"
        )
        yield from textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
        yield from ("", "| phase | s | decided by |", "|---|---|---|")
        for phase, spent in time.phases.items():
            if spent.seconds:
                yield f"| {phase} | {_seconds(spent.seconds)} | {spent.decides} |"
        yield ""
    if (line := not_timed(config, model, plan)) is not None:
        yield from (f"{line[0].upper()}{line[1:]}.", "")


def _published(path: Path) -> Iterator[str]:
    """Rows of other projects with the same model, where there are some."""
    rows = [row for row in _rows() if row[0] == _shape_name(path)]
    yield from ("## Published figures", "")
    if not rows:
        yield from ("None of this model are known to this project.", "")
        return
    yield "Of other projects with this model, with their own settings and lengths; none is a run of this configuration:"
    yield from ("", "| run | published | source |", "|---|---|---|")
    for _, run, seen, source in rows:
        yield f"| {run} | {seen} | {source} |"
    yield ""


def _shape_name(path: Path) -> str:
    """The folder of config.json, which is the model's name in `miles_like/timing/published`."""
    config = load_config(path)
    return "" if config.model.first_layers or config.model.config is None else Path(config.model.config).parent.name


@cache
def _rows() -> Sequence[tuple[str, str, str, str]]:
    """(model, run, figure, source)."""
    shapes = published_shapes(CONFIGS)
    found = []
    for row in (*nemo_rl(shapes), *prime_rl(shapes), *prime_rl(shapes, more=True)):
        model, _, run = row.name.partition(", ")
        if "SFT" in run:
            continue
        seen = f"{row.seen:,.4g} s a step" if row.unit == "s" else f"{row.seen:,.0f} {row.unit}, trainer alone"
        found.append((model, run, seen, SOURCES[row.source]))
    return found


def _twin(name: str) -> Iterator[str]:
    yield from ("## On a laptop", "")
    found = twin(name)
    yield f"`configs/cpu/{found}.toml` has these keys on CPU ranks, with a random model ([twins](tiny.md)):"
    yield from (
        "",
        "```",
        f"miles-like train configs/cpu/{found}.toml --run-dir runs/{found} --set train.steps=2",
        "```",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def main() -> int:
    out = Console(highlight=False)
    found = pages()
    stale = [p for p in FOLDER.glob("*.md") if p.stem not in found.keys() | CHAINS.keys()]
    changed = [
        name for name, text in found.items() if not (p := FOLDER / f"{name}.md").exists() or p.read_text() != text
    ]
    if "--write" in sys.argv[1:]:
        for name in changed:
            (FOLDER / f"{name}.md").write_text(found[name], encoding="utf-8")
        for path in stale:
            path.unlink()
        README.write_text(readme(README.read_text("utf-8")), encoding="utf-8")
        return 0
    out.print("\n".join([*changed, *(p.stem for p in stale)]) or "all pages agree with their configurations")
    return int(bool(changed or stale))


if __name__ == "__main__":
    sys.exit(main())

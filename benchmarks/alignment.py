"""What `miles-like verify` says of every precision: the gap between trainer and rollout, without and with R3.

Two tiny models, DeepSeek-V3-shaped and Qwen3-MoE-shaped, after a short supervised warm-up. In every row both sides
start from the model's one BF16 checkpoint, and of configs/tiny.toml's prompts as many are sampled, from the first, as
give 1000 response tokens or more:

- plain: the trainer in bf16 (stock megatron-core, one rank), the embedded engine in fp32, with the same weights: those
  that the trainer rounds (QAT) are those that are served;
- trainer BF16: the rollout's weights are rounded, the trainer's are not;
- deterministic: alignment.deterministic. Goal: every difference is exactly 0, and no set of experts differs;
- stock SGLang (with --sglang): BF16 on both sides, and a third program's kernels, on CPU.

Goal of the plain rows: k3 <= 1e-3 with R3.

    python benchmarks/alignment.py [--quick] [--sglang .venv-sglang]

--sglang: a virtual environment as `make test-sglang` makes it. The rows are printed as Markdown too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from figures import write_block
from rich.console import Console
from rich.table import Table

from miles_like.alignment.report import Report
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.run import assemble
from miles_like.run.verify import VerifyOptions
from quant.spec import QuantFormat
from rollout.sglang.ports import free_port
from rollout.sglang.servers import start

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"DeepSeek": "tiny.toml", "Qwen": "tiny_qwen.toml"}
MODELS = {"DeepSeek": "model.json", "Qwen": "qwen_moe.json"}
ROUNDED = tuple(f for f in QuantFormat if f is not QuantFormat.BF16)
SIDES = {
    "plain": ("precision.qat=true",),
    "trainer BF16": ("precision.qat=false", "precision.allow_without_qat=true"),
    "deterministic": ("precision.qat=true", "alignment.deterministic=true"),
}
GOALS = {"deterministic_abs_diff_max": 0.0, "deterministic_sets_differ": 0.0, "plain_k3_max": 1e-3}
TOKENS = 1000  # at least, of responses in a row
HEAD = (
    *("model", "weights", "sides", "tokens", "sets differ"),
    *(f"{what}{of}" for of in (", own routes", ", R3") for what in ("mean", "k3", "max")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One comparison. figures: `sets_differ`, and `mean`, `k3`, `max` of the gap, without and with `_r3`."""

    shape: str
    weights: str
    sides: str
    figures: dict[str, float]
    verdict: str

    def row(self) -> list[str]:
        f = self.figures
        gap = [of_gap(f[k]) for k in ("mean", "k3", "max", "mean_r3", "k3_r3", "max_r3")]
        return [
            self.shape,
            self.weights,
            self.sides,
            f"{f['tokens']:.0f}",
            f"{f['sets_differ']:.2%}",
            *gap,
            self.verdict,
        ]


def of_gap(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def cell(shape: str, weights: str, sides: str, found: Report) -> Cell:
    report = found.to_json()
    figures = {
        "tokens": float(found.initial_gap.tokens),
        "sets_differ": 1 - float(str(report["routing/agreement"])),
        "mean_r3": found.initial_gap.mean,
        "k3_r3": found.initial_gap.kl,
        "max_r3": found.initial_gap.largest,
    }
    names = {"mean": "logprob_abs_diff", "k3": "kl", "max": "logprob_abs_diff_max"}
    figures |= {k: float(str(report[f"verify/own_routes/{name}"])) for k, name in names.items()}
    verdict = "; ".join(f"{c.value} ({step})" for step, c, _ in found.causes) or "agrees"
    return Cell(shape=shape, weights=weights, sides=sides, figures=figures, verdict=verdict)


def configured(shape: str, weights: QuantFormat, sides: Sequence[str], steps: int) -> RunConfig:
    plain = weights is QuantFormat.BF16
    settings = [
        *(f"model.make.max_steps={steps}", "model.make.format=bf16", f"precision.format={weights.value}"),
        *("parallel.dp=1", "parallel.ep=1", "rollout.max_new_tokens=12"),
        *(x for x in sides if not (plain and x.startswith("precision."))),
        *(("precision.qat=false",) if plain else ()),
    ]
    return load_config(ROOT / "configs" / SHAPES[shape], settings)


def every_layer_routed(shape: str, home: Path) -> Path:
    """config.json without Qwen's dense layer, which SGLang 0.5.23 does not know: its row is of another checkpoint."""
    hf = json.loads((ROOT / "configs" / "tiny" / MODELS[shape]).read_text())
    path = home / f"{shape}.json"
    path.write_text(json.dumps(hf | {"mlp_only_layers": []} if "mlp_only_layers" in hf else hf))
    return path


@contextmanager
def stock_server(venv: Path, model: Path, log: Path) -> Iterator[str]:
    port = free_port()
    command = [str(venv.absolute() / "bin" / "python"), str(ROOT / "tests" / "sglang_cpu" / "serve.py")]
    command += ["--model-path", str(model), "--port", str(port)]
    with start(command, url=f"http://127.0.0.1:{port}", log=log) as server:
        server.await_ready(300)
        yield server.url


class Study:
    """Cells of one home, which keeps the checkpoints."""

    def __init__(self, home: Path, *, steps: int, prompts: int, console: Console) -> None:
        self.home, self.steps, self.prompts, self.console = home, steps, prompts, console
        self.cells: list[Cell] = []

    def compare(self, shape: str, weights: QuantFormat, sides: str, more: Sequence[str], *servers: str) -> None:
        """Samples again with twice the prompts while there are too few tokens."""
        config, prompts = configured(shape, weights, more, self.steps), self.prompts
        while True:
            run = self.home / f"{shape}-{weights.value}-{sides}".replace(" ", "-").lower()
            quiet = Console(quiet=True)
            found, _ = assemble.verify(config, run, quiet, None, VerifyOptions(attached=servers, prompts=prompts))
            if found.initial_gap.tokens >= TOKENS:
                break
            prompts *= 2
        self.cells.append(cell(shape, weights.value, sides, found))
        self.console.print(" | ".join(self.cells[-1].row()), markup=False, soft_wrap=True)

    def of(self, shape: str, formats: Sequence[QuantFormat], venv: Path | None) -> None:
        bf16 = QuantFormat.BF16
        for sides, more in SIDES.items():
            for weights in formats if sides == "trainer BF16" else (bf16, *formats):
                self.compare(shape, weights, sides, more)
        if venv is not None:
            model = f"model.make.config={every_layer_routed(shape, self.home)}"
            more = ("rollout.engine=sglang", "rollout.request_timeout_s=600", model)
            root = assemble.staged(configured(shape, bf16, more, self.steps), self.home / "served", self.console, None)
            with stock_server(venv, root / "hf", self.home / f"sglang_{shape}.log") as url:
                self.compare(shape, bf16, "stock SGLang", more, url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, BF16 and FP8, after fewer steps")
    parser.add_argument("--write", action="store_true", help="put the table into docs/alignment.md")
    parser.add_argument("--sglang", type=Path, metavar="VENV", help="stock SGLang as a third side")
    given = parser.parse_args()
    console = Console(width=200)
    with tempfile.TemporaryDirectory() as home:
        study = Study(Path(home), steps=50 if given.quick else 200, prompts=256, console=console)
        try:
            for shape in list(SHAPES)[: 1 if given.quick else None]:
                study.of(shape, (QuantFormat.FP8,) if given.quick else ROUNDED, given.sglang)
        finally:
            assemble.shut_down()
    report(study.cells, console, write=given.write)


def report(cells: Sequence[Cell], console: Console, *, write: bool) -> None:
    table = Table(*HEAD, "verify", title="trainer against rollout")
    for c in cells:
        table.add_row(*c.row())
    console.print(table)
    cells_of = [[*HEAD, "verify"], ["---"] * (len(HEAD) + 1), *(c.row() for c in cells)]
    lines = [f"| {' | '.join(line)} |" for line in cells_of]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if write:
        write_block(ROOT / "docs" / "alignment.md", "benchmarks/alignment.py", lines)
    exact = [c.figures for c in cells if c.sides == "deterministic"]
    plain = [c.figures for c in cells if c.sides in ("plain", "stock SGLang")]
    figures = {
        "deterministic_abs_diff_max": max(max(f["max"], f["max_r3"]) for f in exact),
        "deterministic_sets_differ": max(f["sets_differ"] for f in exact),
        "plain_k3_max": max(f["k3_r3"] for f in plain),
    }
    figures |= {
        f"{k}_{c.shape}_{c.weights}_{c.sides}".replace(" ", "_").lower(): v for c in cells for k, v in c.figures.items()
    }
    holds = all(figures[k] <= goal for k, goal in GOALS.items())
    print(json.dumps({"name": "alignment", "figures": figures, "goals": GOALS, "holds": holds}))


if __name__ == "__main__":
    main()

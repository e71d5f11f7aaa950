"""What traces cost a run of configs/tiny.toml, as shares of its iteration: on, and off.

One traced run gives the number of spans of an iteration, of all its processes together, and the iteration's seconds:
the median between two rows of metrics.jsonl. In the same process, beside it: the processor time of a span while nothing
is recorded (`off`), of one that is recorded and written to its file with arguments as those of the run (`on`), and of
the driver's thread that reads the files and writes a window (`window`). Each share is what all processes spend, over
one iteration: where they run beside each other, the iteration loses less.

Goals: on <= 1 % of the iteration; off <= 0.01 %, which is nothing that a clock could tell.

    python benchmarks/tracing.py [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import add_write, finish
from iteration import ROOT
from rich.console import Console
from rich.table import Table

from miles_like import spans
from miles_like.config.load import load_config
from miles_like.nodes.session import start_ray
from miles_like.report.traces.chrome import read_trace, write_trace
from miles_like.report.traces.parts import Parts, TracedSpan
from miles_like.report.traces.writer import trace_files
from miles_like.run import assemble
from miles_like.run.setup.launcher import freeze_gc
from miles_like.run.setup.model_plan import model_plan
from miles_like.run.train import train

GOALS = {"on_share_max": 0.01, "off_share_max": 0.0001}
WARM, WINDOW = 3, 10
MANY = 200_000  # spans that are timed while nothing is recorded


def traced_run(home: Path, steps: int) -> tuple[float, list[TracedSpan]]:
    """(seconds of an iteration, spans of the steps after WARM) of a traced run."""
    settings = ["model.make.max_steps=0", "eval.every=0", "eval.max_prompts=8", "checkpoint.every=0"]
    settings += [f"train.steps={steps}", "trace.on=true", f"trace.window={WINDOW}"]
    config, console = load_config(ROOT / "configs" / "tiny.toml", settings), Console(quiet=True)
    run_dir = home / "run"
    run_dir.mkdir()
    start_ray(None)
    root = assemble.staged(config, run_dir, console, None)
    train(model_plan(config, run_dir, root / "hf", root / "megatron"), console, resume=False)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    walls = [row["wall_s"] for row in rows if "wall_s" in row][WARM:]
    found = [span for path in trace_files(run_dir) for span in read_trace(path)]
    ends = sorted(s.end for s in found if s.name == "step" and s.process == "driver")
    inside = [s for s in found if ends[WARM - 1] <= s.start < ends[-1]]
    return statistics.median(b - a for a, b in itertools.pairwise(walls)), inside


def processor_s(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def off_s() -> float:
    """Of a span while nothing is recorded, beyond an empty loop."""

    def empty() -> None:
        for _ in range(MANY):
            pass

    def work() -> None:
        for _ in range(MANY):
            with spans.span("train", step=1, version=0):
                pass

    return max(processor_s(work) - processor_s(empty), 0.0) / MANY


def on_s(found: list[TracedSpan], folder: Path) -> float:
    """Of a span that is recorded and written, with the arguments of `found`."""
    spans.begin(folder, "driver")

    def work() -> None:
        for span in found:
            with spans.span(span.name, **span.args):
                pass
        spans.flush()

    took = processor_s(work)
    spans.end()
    return took / len(found)


def window_s(folder: Path) -> float:
    """Of reading the spans in `folder` and writing them as one file, for each span."""
    count = 0

    def work() -> None:
        nonlocal count
        read = Parts(folder, lambda host: 0).new()
        count = len(read)
        write_trace(folder / "window.json", read, {})

    took = processor_s(work)
    return took / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    steps = 12 if parser.parse_args().quick else 60
    with tempfile.TemporaryDirectory() as home:
        try:
            iteration_s, found = traced_run(Path(home), steps)
        finally:
            assemble.shut_down()
        each = len(found) / (steps - WARM)
        freeze_gc()  # as a run has done before its first step
        folder = Path(home) / "parts"
        off, on, window = off_s(), on_s(found, folder), window_s(folder)
    figures = {
        "iteration_s": iteration_s,
        "spans_of_an_iteration": each,
        "off_span_s": off,
        "on_span_s": on,
        "window_span_s": window,
        "off_share": each * off / iteration_s,
        "on_share": each * (on + window) / iteration_s,
    }
    table = Table("figure", "value", title="traces of configs/tiny.toml")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)
    holds = figures["on_share"] <= GOALS["on_share_max"] and figures["off_share"] <= GOALS["off_share_max"]
    finish("tracing", figures, GOALS, holds)


if __name__ == "__main__":
    main()

"""Share of an iteration of configs/tiny.toml that the loop's own parts take: buffer, packing, ledger and checkpoint.

The real run, synchronous and with max_staleness = 2. Every function of the parts is wrapped from outside; of a
coroutine only the seconds in which it runs count, not those in which it waits, and of a part that calls another one the
outer one alone: what the ledger writes down while a group is put into the buffer is the buffer's, and "boundary" is the
state of all parts between two steps, with the ledger's check and its file, whether or not it is saved. An iteration is
the time between two rows of metrics.jsonl. Shares of what each step has are medians over steps without a checkpoint;
the checkpoint's is its mean cost over CHECKPOINT_EVERY iterations.

The loop's part of a checkpoint is run_state.json and the samples that wait; beside it stands what making the trainer's
shards durable takes (writing, fsync, checksums), which is not of the loop. Goal: the loop's parts together <= 3 %.

    python benchmarks/loop_overhead.py [--quick]
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import statistics
import sys
import tempfile
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import add_write, finish
from iteration import ROOT
from rich.console import Console
from rich.table import Table

from miles_like.batch import packer
from miles_like.checkpoint import ledger, saved_groups
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.config.load import load_config
from miles_like.loop import buffer, producer
from miles_like.loop import state as loop_state
from miles_like.nodes.session import start_ray
from miles_like.protocols import MetricSink
from miles_like.report.sinks import MultiSink
from miles_like.run import assemble
from miles_like.run import train as train_module
from miles_like.run.setup.model_plan import model_plan
from miles_like.run.setup.trainer_side import RunFiles
from miles_like.storage import checkpoint_files

GOALS = {"share_max": 0.03}
CHECKPOINT_EVERY, WARM = 10, 3
SHARDS = "shards"
# part -> what is called in it: functions, and classes with all of theirs
PARTS: dict[str, tuple[Any, ...]] = {
    "buffer": (buffer.DataBuffer, producer.Producer._admitted, producer.Producer._decide),
    "packing": (packer.Packer.steps,),
    "ledger": (ledger.Ledger,),
    "boundary": (loop_state.LoopState.snapshot,),
    "checkpoint": (saved_groups.write_groups, checkpoint_files.write_text),
    SHARDS: (RayTrainer.save, RayTrainer.finish_save, checkpoint_files.sync_tree, checkpoint_files.file_facts),
}
EACH_STEP = ("buffer", "packing", "ledger", "boundary")


class Clock:
    """Seconds of each part, of the outermost one that is running in a thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = threading.local()

    @contextmanager
    def within(self, part: str) -> Generator[None]:
        if getattr(self._inside, "any", False):
            yield
            return
        self._inside.any, began = True, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began
            self._inside.any = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if part == SHARDS:
            return self._waited_for(function)
        if inspect.iscoroutinefunction(function):

            async def waits(*args: Any, **kwargs: Any) -> Any:
                return await self._driven(part, function(*args, **kwargs))

            return waits

        def runs(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        return runs

    def _waited_for(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Whether it runs here or on the ranks, until it is done."""

        @contextmanager
        def clock() -> Generator[None]:
            began = time.perf_counter()
            yield
            self.seconds[SHARDS] += time.perf_counter() - began

        async def waits(*args: Any, **kwargs: Any) -> Any:
            with clock():
                return await function(*args, **kwargs)

        def runs(*args: Any, **kwargs: Any) -> Any:
            with clock():
                return function(*args, **kwargs)

        return waits if inspect.iscoroutinefunction(function) else runs

    @types.coroutine
    def _driven(self, part: str, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """`work`, timed from each time it goes on until it next waits."""
        value, error = None, None
        while True:
            with self.within(part):
                try:
                    waits_for = work.send(value) if error is None else work.throw(error)
                except StopIteration as e:
                    return e.value
            try:
                value, error = (yield waits_for), None
            except BaseException as e:
                value, error = None, e

    def watch(self, part: str, what: Any) -> None:
        """Puts the timed function wherever it is looked up; of a class, all of its functions."""
        if inspect.isclass(what):
            for name, member in list(vars(what).items()):
                if inspect.isfunction(member):
                    setattr(what, name, self.timed(part, member))
            return
        owners: list[Any] = [m for m in list(sys.modules.values()) if getattr(m, what.__name__, None) is what]
        if "." in what.__qualname__:
            owners = [getattr(sys.modules[what.__module__], what.__qualname__.split(".")[0])]
        assert owners, f"no module looks up {what.__qualname__}"
        for owner in owners:
            setattr(owner, what.__name__, self.timed(part, what))


class Marks:
    """A sink that notes, at each row, when it is and what the clock has."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.rows: list[tuple[float, dict[str, float]]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((time.perf_counter(), defaultdict(float, self._clock.seconds)))

    def close(self) -> None:
        """Nothing is open."""


class Watched(RunFiles):
    """Files of a run whose rows are marked."""

    marks: Marks

    def sink(self, first: int = 0, *more: MetricSink) -> MultiSink:
        return MultiSink([super().sink(first, *more), self.marks])


def measure(clock: Clock, home: Path, staleness: int, steps: int, every: int) -> dict[str, float]:
    settings = ["model.make.max_steps=0", "eval.every=0", "eval.max_prompts=8", f"train.steps={steps}"]
    settings += [f"buffer.max_staleness={staleness}", f"checkpoint.every={every}"]
    config, console = load_config(ROOT / "configs" / "tiny.toml", settings), Console(quiet=True)
    run_dir = home / f"run-{staleness}"
    run_dir.mkdir()
    start_ray(None)
    root = assemble.staged(config, run_dir, console, None)
    Watched.marks = Marks(clock)
    vars(train_module).update(RunFiles=Watched)
    train_module.train(model_plan(config, run_dir, root / "hf", root / "megatron"), console, resume=False)
    rows = Watched.marks.rows
    # step s is between rows s - 1 and s; its checkpoint comes after row s, so it is in the next one
    found = [
        (step, (b - a, defaultdict(float, {part: s - before[part] for part, s in after.items()})))
        for step, ((a, before), (b, after)) in enumerate(itertools.pairwise(rows), 1)
        if WARM < step < steps
    ]
    plain = [of for step, of in found if (step - 1) % every]
    saving = [of for step, of in found if (step - 1) % every == 0]
    figures = {"iteration_s": statistics.median(s for s, _ in plain)}
    figures |= {f"{part}_share": statistics.median(took[part] / s for s, took in plain) for part in EACH_STEP}
    for part in ("checkpoint", SHARDS):
        figures[f"{part}_s"] = statistics.fmean(took[part] for _, took in saving)
    figures["checkpoint_share"] = figures["checkpoint_s"] / (CHECKPOINT_EVERY * figures["iteration_s"])
    figures["share"] = sum(figures[f"{part}_share"] for part in (*EACH_STEP, "checkpoint"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    steps, every = (13, 4) if parser.parse_args().quick else (60, CHECKPOINT_EVERY)
    clock = Clock()
    for part, functions in PARTS.items():
        for what in functions:
            clock.watch(part, what)
    with tempfile.TemporaryDirectory() as home:
        try:
            found = {k: measure(clock, Path(home), k, steps, every) for k in (0, 2)}
        finally:
            assemble.shut_down()
    table = Table("figure", *(f"max_staleness = {k}" for k in found), title="the loop's own parts")
    for name in found[0]:
        table.add_row(name, *(f"{of[name]:.5f}" for of in found.values()))
    Console().print(table)
    figures = {f"{name}_of_{k}": value for k, of in found.items() for name, value in of.items()}
    holds = max(of["share"] for of in found.values()) <= GOALS["share_max"]
    finish("loop_overhead", figures, GOALS, holds)


if __name__ == "__main__":
    main()

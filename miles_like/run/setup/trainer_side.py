"""The trainer side of a run: how samples are packed, which files the run writes, and where it resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from megatron_bridge.plan.flops import forward_flops, train_flops
from megatron_bridge.weights.checkpoint_sums import DamagedFileError
from miles_like.batch.packer import Packer
from miles_like.checkpoint import run_state
from miles_like.checkpoint.best import KeptBest
from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.random_state import RANDOM, set_random_state
from miles_like.checkpoint.resume_check import resume_differences
from miles_like.checkpoint.run_state import RunState
from miles_like.checkpoint.writer import CONFIG, FILES, KEPT, RunCheckpoints
from miles_like.config.load import store_config
from miles_like.experience.token_columns import HeldLogprobs, TrainerLogprobs
from miles_like.limits.regular_files import replace_bytes
from miles_like.page.words import TOKENIZER
from miles_like.page.write import write_report
from miles_like.protocols import MetricSink, TrainerRanks
from miles_like.report.aliases import Aliased
from miles_like.report.console import ConsoleSink
from miles_like.report.paired.history import EvalHistory
from miles_like.report.provenance import note_start
from miles_like.report.rows import read_metrics
from miles_like.report.sinks import JsonlSink, MultiSink, TensorboardSink
from miles_like.report.speed import SpeedMeter
from miles_like.report.traces.writer import Export, TraceWriter
from miles_like.report.trackers.beside import Trackers
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.worker_side import workers_of
from miles_like.storage.appended_file import AppendedFile, replace_by_copy, truncate_all
from miles_like.storage.checkpoint_files import DamagedError
from miles_like.types import Aggregation

METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"


def packer(
    plan: ModelPlan,
    dp_size: int,
    *,
    replayed: bool,
    balanced: bool = False,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
    constant: int | None = None,
    steps: int = 1,
) -> Packer:
    """The packer of samples into batches of `dp_size` rows. balanced: balance rows by `train.balance`; otherwise by
    tokens."""
    c, hf = plan.config, plan.hf.config
    flops = balanced and c.train.balance == "flops"
    return Packer(
        dp_size=dp_size,
        max_tokens=c.max_pack_tokens,
        micro_multiple=c.parallel.micro_multiple,
        cost=(lambda n: forward_flops(hf, [n])) if flops else None,
        replayed=replayed,
        aggregation=aggregation,
        constant=constant,
        steps_per_rollout=steps,
    )


def speed_meter(plan: ModelPlan) -> SpeedMeter:
    """The meter of tokens per second and, if cluster.peak_tflops is set, of model FLOPs utilization (perf/mfu)."""
    c, hf = plan.config, plan.hf.config
    depths = plan.model.family.mtp_layers(hf) if c.train.mtp_coefficient else 0
    peak = c.cluster.peak_tflops
    return SpeedMeter(
        flops=lambda lengths, labels: train_flops(hf, lengths, head_rows=labels, mtp_depths=depths),
        peak=peak and 1e12 * peak * c.parallel.world_size,
    )


def trainer_logprobs(
    plan: ModelPlan, ranks: TrainerRanks, packs: Packer, held: HeldLogprobs | None
) -> TrainerLogprobs | None:
    """What scores the tokens of every train.token_logprobs_every-th step; None where it is 0. held: as of
    TrainerLogprobs."""
    c = plan.config
    if not (every := c.train.token_logprobs_every):
        return None
    replay = c.replay.mode == "r3"
    return TrainerLogprobs(
        every=every, ranks=ranks, packer=packs, temperature=c.rollout.temperature, replay=replay, held=held
    )


def _otlp(plan: ModelPlan) -> Export | None:
    if plan.config.trace.otlp is None:
        return None
    from miles_like.report.traces.otlp import otlp_export

    return otlp_export(plan.run_dir, plan.config.trace.otlp)


class Resumed(NamedTuple):
    """The checkpoint that a run resumes from."""

    folder: Path
    state: RunState

    async def load(self, models: Mapping[str, TrainerRanks]) -> None:
        """Loads the shards of every trained model and the driver's random state. Raises ValueError naming what is
        damaged and the checkpoint before it."""
        for name, ranks in models.items():
            with run_state.suggesting_earlier_checkpoint(self.folder):
                try:
                    await ranks.load(self.folder / name, version=self.state.weight_version)
                except DamagedFileError as e:
                    raise DamagedError(str(e)) from e
        set_random_state(self.state.parts[RANDOM])


class RunFiles:
    """Files that a training run appends to, its checkpoints, and which of these is the best."""

    def __init__(self, plan: ModelPlan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.best = KeptBest(plan.config.checkpoint.keep_best)
        self.appended: dict[str, AppendedFile] = {}  # name -> file: cut back where a run resumes
        self.earlier: Sequence[Mapping[str, float]] = ()  # rows of metrics.jsonl before the checkpoint of `resume`
        self.first = 0  # the step of that checkpoint; 0: there is none
        # step -> when this process reached its boundary or began there, by time.perf_counter
        self.boundaries: dict[int, float] = {}
        self.trackers = Trackers(plan.config.trackers, plan.run_dir, self._say)
        self.traces = TraceWriter(plan.config.trace, plan.run_dir, self._say, _otlp(plan))
        self.ends = True  # with this process; False: its sinks are closed, and opened again

    @property
    def earlier_s(self) -> float:
        """`wall_s` of the checkpoint that the run resumes from."""
        return next((row["wall_s"] for row in reversed(self.earlier) if "wall_s" in row), 0.0)

    def resume(self) -> Resumed | None:
        """The latest checkpoint; None where there is none: the run then begins from its first step.

        Removes unfinished checkpoints, truncates the run's files to their length in the checkpoint, and prints a line
        for each changed configuration key (`resume_differences`). Raises ValueError as `load_latest` does, and for a
        configuration key that may not change on resume.
        """
        plan = self.plan
        began = run_state.load_latest(plan.checkpoints, groups=not workers_of(plan))
        run_state.clear_unfinished(plan.checkpoints)
        self.best, self.earlier, self.first = KeptBest(plan.config.checkpoint.keep_best), (), 0
        if began is None:
            for name in (METRICS, LEDGER):
                (plan.run_dir / name).unlink(missing_ok=True)
            return None
        resumed = Resumed(*began)
        parts = resumed.state.parts
        with run_state.suggesting_earlier_checkpoint(resumed.folder):
            run_state.require_parts(resumed.state, CONFIG, KEPT, FILES, RANDOM)
        for line in resume_differences(parts[CONFIG], plan.config.model_dump(mode="json")):
            self.console.print(line, markup=False, soft_wrap=True)
        self.best.restore(parts[KEPT])
        truncate_all(plan.run_dir, parts[FILES])
        for events in (plan.run_dir / "tensorboard").glob("events.*"):  # a stopped process may be about to write
            replace_by_copy(events, events.stat().st_size)
        self.first = resumed.state.step
        if (rows := plan.run_dir / METRICS).exists() and rows.stat().st_size:
            self.earlier = read_metrics(rows)
        return resumed

    def begin(self) -> None:
        """Stores the configuration, a line about this start and the tokenizer; prints where the curves will be. Raises
        ValueError where the disk is full, StaleEpochError."""
        run_dir = self.plan.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        if self.plan.fence is not None:
            self.plan.fence.begins(self.first)
        store_config(self.plan.config, run_dir / "config.toml")
        note_start(run_dir)
        tokenizer = self.plan.served / TOKENIZER
        if tokenizer.is_file() and not (run_dir / TOKENIZER).exists():
            replace_bytes(run_dir / TOKENIZER, tokenizer.read_bytes())
        self.trackers.start()
        self.traces.start()
        self._say(f"Curves: tensorboard --logdir {run_dir / 'tensorboard'}")

    def end(self) -> None:
        """Writes the report, and prints its URL. Raises StaleEpochError."""
        if self.plan.fence is not None:
            self.plan.fence.check()
        self._say(f"Report: {write_report(self.plan.run_dir).resolve().as_uri()}")

    def close(self) -> None:
        """Ends what runs beside the run, for `trackers.exit_s` seconds at most."""
        self.traces.end()
        self.trackers.end()

    def _say(self, text: str) -> None:
        self.console.print(f"{'':12}{text}", markup=False, highlight=False, soft_wrap=True)

    def sink(self, first: int = 0, *more: MetricSink) -> MultiSink:
        """The sinks of a run that begins at step `first`: metrics.jsonl, TensorBoard, the trackers and traces, the
        best checkpoint, the console, and `more`."""
        rows = JsonlSink(self.plan.run_dir / METRICS, self.plan.fence)
        self.appended[METRICS] = rows.file
        curves = TensorboardSink(self.plan.run_dir / "tensorboard", first=first, fence=self.plan.fence)
        return MultiSink(
            [
                Aliased(MultiSink([rows, curves, self.trackers]), self.plan.config.report.aliases),
                self.traces,
                self.best,
                ConsoleSink(
                    steps=self.plan.config.train.steps,
                    console=self.console,
                    rows=self.earlier,
                    run_dir=self.plan.run_dir,
                    ends=lambda: self.ends,
                ),
                *more,
            ]
        )

    def evaluations(self) -> EvalHistory:
        return EvalHistory(self.plan.run_dir, self.plan.fence, self.earlier)

    def ledger(self) -> Ledger:
        path = self.plan.run_dir / LEDGER
        ledger = Ledger(path, self.plan.fence)
        if ledger.file is not None:
            self.appended[LEDGER] = ledger.file
        return ledger

    def checkpoints(self, models: Mapping[str, TrainerRanks], resumed: Resumed | None) -> RunCheckpoints:
        """models: every model that is trained, by its folder in a checkpoint."""
        c = self.plan.config.checkpoint
        return RunCheckpoints(
            directory=self.plan.checkpoints,
            models=models,
            config=self.plan.config.model_dump(mode="json"),
            files=self.appended,
            best=self.best,
            keep=c.keep,
            keep_every=c.keep_every,
            asynchronous=c.asynchronous,
            console=self.console,
            saved=None if resumed is None else resumed.state.step,
            fence=self.plan.fence,
            boundaries=self.boundaries,
        )

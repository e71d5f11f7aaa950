"""What every training run is made of, from its configuration: trainer ranks, packing, sinks, checkpoints.

Everything is made on demand; nothing runs before it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bridge.checkpoint_sums import DamagedFileError
from megatron_bridge.families.base import Family
from megatron_bridge.families.registry import family_of
from megatron_bridge.flops import forward_flops, train_flops
from megatron_bridge.layout import check_layout
from megatron_bridge.precision import served_spec
from megatron_bridge.resolve import resolve
from miles_like import run_state
from miles_like.appended_file import AppendedFile, cut_all_back, positions
from miles_like.checkpoint_files import DamagedError
from miles_like.config import RunConfig
from miles_like.driver_random import RANDOM, random_state, set_random_state
from miles_like.factories import MegatronFactory
from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.keep_policy import KeptBest
from miles_like.metrics import speed_metrics
from miles_like.placement import plan_placement
from miles_like.protocols import LossFn
from miles_like.rank_configs import trainer_config
from miles_like.resume_differences import resume_differences
from miles_like.run_state import RunState
from miles_like.sinks import ConsoleSink, JsonlSink, MultiSink, TensorboardSink
from miles_like.stopping import Deadline, StopRequest, command_began
from miles_like.tokenizer import load_tokenizer
from miles_like.types import Json, SampleGroup
from miles_like.workers import RayTrainer
from quant.hf_config import spec_from_hf
from quant.spec import QuantSpec

METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
KEPT, CONFIG, FILES = "keep_best", "config", "files"  # parts of a run's state that are of every training run


class TrainerParts:
    """The trainer's side of one job."""

    def __init__(self, config: RunConfig, run_dir: Path, served: Path, weights: Path, console: Console) -> None:
        self.config = config
        self.run_dir = run_dir
        self.served = served
        self.weights = weights
        self.console = console
        self.checkpoints = run_dir / "checkpoints"
        self.hf = HFCheckpoint(served)
        self.family: Family = family_of(self.hf.config)
        check_layout(config.parallel, self.hf.config)
        self.spec = self._spec()
        self.trainer = trainer_config(config, served)
        cuda = config.cluster.gpus_per_node > 0
        resolve(self.trainer, self.hf.config, cuda=cuda, te=cuda)  # refuses before anything is started
        self.tokenizer = load_tokenizer(served)
        self.plan = plan_placement(config.cluster, config.parallel, config.servers)
        self.tokens_total = 0
        self.stop = StopRequest()
        self.deadline = Deadline(self.stop, config.checkpoint.deadline_s, began=command_began())
        self.kept_best = KeptBest(config.checkpoint.keep_best)
        self.saved: int | None = None  # step of the last whole checkpoint
        self._saving: RunState | None = None  # of a checkpoint that is not whole yet
        self._saving_since = 0.0  # by time.perf_counter
        self.files: dict[str, AppendedFile] = {}  # of the run directory, by name: cut back where a run resumes

    def _spec(self) -> QuantSpec | None:
        """How the weights that are served are stored. Raises ValueError when the run's configuration disagrees."""
        spec, want = spec_from_hf(self.hf.config), served_spec(self.config.precision, self.hf.config)
        if spec != want:
            stored = "BF16" if spec is None else spec.format.value
            raise ValueError(
                f"precision.format = {self.config.precision.format.value!r}, but {self.served} holds {stored} weights: "
                "run the stage that makes it again (--stages stage,train)"
            )
        return spec

    def started(self, loss: LossFn) -> RayTrainer:
        """The ranks, on the weights that the run begins with."""
        factory = MegatronFactory(self.trainer, self.weights, loss, 2 * self.config.cluster.timeout_s)
        slots, logs = self.plan.of("trainer"), self.run_dir / "logs"
        return RayTrainer(
            factory, slots, dp_size=self.config.parallel.dp, log_dir=logs, timeout_s=self.config.cluster.timeout_s
        )

    def trained(self, trainer: RayTrainer) -> dict[str, RayTrainer]:
        """Every model that is trained, by its folder in a checkpoint."""
        return {"trainer": trainer}

    def rows(self, dp_size: int) -> dict[str, Any]:
        c = self.config
        return {"dp_size": dp_size, "max_tokens": c.max_pack_tokens, "micro_multiple": c.parallel.micro_multiple}

    @property
    def cost(self) -> Callable[[int], float] | None:
        """What a sample's length weighs when rows are balanced."""
        return (lambda n: forward_flops(self.hf.config, [n])) if self.config.train.balance == "flops" else None

    def sink(self, first: int = 0) -> MultiSink:
        """Of a run that begins at step `first`."""
        rows = JsonlSink(self.run_dir / METRICS)
        self.files[METRICS] = rows.file
        return MultiSink(
            [
                rows,
                TensorboardSink(self.run_dir / "tensorboard", first=first),
                self.kept_best,
                ConsoleSink(steps=self.config.train.steps, console=self.console),
            ]
        )

    def speed(
        self, groups: Sequence[SampleGroup], *, train_s: float, rollout_s: float | None = None
    ) -> dict[str, float]:
        tflops, ranks = self.config.cluster.peak_tflops, self.config.parallel.world_size
        depths = self.family.mtp_layers(self.hf.config) if self.config.train.mtp_coefficient else 0
        return speed_metrics(
            groups,
            rollout_s=rollout_s,
            train_s=train_s,
            flops=lambda lengths, labels: train_flops(self.hf.config, lengths, head_rows=labels, mtp_depths=depths),
            peak=tflops and 1e12 * tflops * ranks,
        )

    async def save(
        self,
        trainer: RayTrainer,
        step: int,
        parts: Mapping[str, Json],
        groups: Mapping[str, SampleGroup] | None = None,
    ) -> None:
        """A checkpoint after `step`, where `parts` stood so and `groups` were not trained yet; it may still be under
        way when this returns."""
        await self.finish_save(trainer, True)
        self._saving_since = time.perf_counter()
        folder = run_state.empty_folder(self.checkpoints, step)
        for name, ranks in self.trained(trainer).items():
            await ranks.save(folder / name, asynchronous=self.config.checkpoint.asynchronous)
        best = self.kept_best.decide(step)
        if best is not None:
            self.console.print(best, markup=False, soft_wrap=True)
        ours: dict[str, Json] = {
            KEPT: self.kept_best.state(),
            CONFIG: self.config.model_dump(mode="json"),
            FILES: positions(self.files),
            RANDOM: random_state(),
        }
        self._saving = RunState(
            step=step, weight_version=step, tokens_total=self.tokens_total, parts={**ours, **parts}, groups=groups or {}
        )
        await self.finish_save(trainer, not self.config.checkpoint.asynchronous)

    async def finish_save(self, trainer: RayTrainer, wait: bool) -> None:
        """`latest` moves on when every rank has written; the state is the one of the step that was saved. The deadline
        is told how long it took, from its beginning to here."""
        if self._saving is None:
            return
        if all([await ranks.finish_save(wait=wait) for ranks in self.trained(trainer).values()]):
            c = self.config.checkpoint
            run_state.save(self.checkpoints, self._saving, keep=c.keep, every=c.keep_every, best=self.kept_best.step)
            self.saved, self._saving = self._saving.step, None
            self.deadline.note(save_s=time.perf_counter() - self._saving_since)

    def resumed(self) -> tuple[Path, RunState] | None:
        """The latest checkpoint, where this configuration may go on from it. Half-written ones are removed, and what
        was appended to the run's files since it was saved.

        Says in a line what makes the run another one than it was. Raises ValueError as `load_latest` does, and for a
        configuration that cannot go on from it.
        """
        began = run_state.load_latest(self.checkpoints)
        run_state.clear_unfinished(self.checkpoints)
        if began is None:  # stopped before its first checkpoint: it begins anew
            for name in (METRICS, LEDGER):
                (self.run_dir / name).unlink(missing_ok=True)
            return None
        state = began[1]
        with run_state.or_an_earlier_one(began[0]):
            run_state.require_parts(state, CONFIG, KEPT, FILES, RANDOM)
        for line in resume_differences(state.parts[CONFIG], self.config.model_dump(mode="json")):
            self.console.print(line, markup=False, soft_wrap=True)
        self.tokens_total, self.saved = state.tokens_total, state.step
        self.kept_best.restore(state.parts[KEPT])
        cut_all_back(self.run_dir, state.parts[FILES])
        return began

    async def load(self, trainer: RayTrainer, folder: Path, state: RunState) -> None:
        """All that is trained, as it was. Raises ValueError naming what is damaged and the checkpoint before it."""
        for name, ranks in self.trained(trainer).items():
            with run_state.or_an_earlier_one(folder):
                try:
                    await ranks.load(folder / name, version=state.weight_version)
                except DamagedFileError as e:
                    raise DamagedError(str(e)) from e
        set_random_state(state.parts[RANDOM])

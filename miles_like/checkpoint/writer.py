"""Writes the checkpoints of a run: the shards of every trained model, then `run_state.json` (run_state.py)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from miles_like.checkpoint import run_state
from miles_like.checkpoint.best import KeptBest
from miles_like.checkpoint.random_state import RANDOM, random_state
from miles_like.checkpoint.run_state import RunState
from miles_like.protocols import Fencing, Trainer
from miles_like.storage.appended_file import AppendedFile, positions
from miles_like.types import Json, SampleGroup

KEPT, CONFIG, FILES = "keep_best", "config", "files"  # keys of `parts` that every run has


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of the loop at the boundary of two steps: what a checkpoint holds beside the ranks' files."""

    parts: Mapping[str, Json] = field(default_factory=dict)  # by the name of the part
    groups: Mapping[str, SampleGroup] = field(default_factory=dict)  # not trained yet
    tokens_total: int = 0  # response tokens trained
    # writes groups that are held elsewhere into the checkpoint's folder: name of a file there -> SHA-256
    write: Callable[[Path], Awaitable[Mapping[str, str]]] | None = None


@dataclass(slots=True, kw_only=True)
class RunCheckpoints:
    """The checkpoints of one run. keep, keep_every: as `keep` and `every` of `run_state.save`. asynchronous: `begin`
    returns while ranks still write."""

    directory: Path
    models: Mapping[str, Trainer]  # every model that is trained, by its folder in a checkpoint
    config: Json  # of the whole run
    files: Mapping[str, AppendedFile]  # of the run directory, cut back where a run resumes
    best: KeptBest
    keep: int
    keep_every: int | None
    asynchronous: bool
    console: Console
    saved: int | None = None  # step of the last complete checkpoint
    fence: Fencing | None = None  # of the run directory, checked before each write
    # step of a checkpoint -> when its boundary was reached, by time.perf_counter
    boundaries: dict[int, float] = field(default_factory=dict)
    _saving: RunState | None = field(default=None, init=False)  # of a checkpoint that is not complete yet
    _models_of: int | None = field(default=None, init=False)  # step whose models `save_models` has saved last
    _models_s: float = field(default=0.0, init=False)  # seconds that it took
    _since: float = field(default=0.0, init=False)  # by time.perf_counter

    async def save_models(self, step: int) -> None:
        """Starts the shards of all models for the checkpoint after `step` steps, which `begin` then completes. An
        earlier checkpoint must be finished."""
        self._check_fence()
        began = time.perf_counter()
        folder = run_state.empty_folder(self.directory, step)
        for name, model in self.models.items():
            await model.save(folder / name, asynchronous=self.asynchronous)
        self._models_of, self._models_s = step, time.perf_counter() - began

    async def begin(self, step: int, snapshot: Snapshot) -> None:
        """Starts the checkpoint after `step` steps; the models too, unless `save_models` has. `finish` completes it; an
        earlier one must be finished."""
        if self._models_of != step:
            await self.save_models(step)
        self._check_fence()
        self._since = time.perf_counter() - self._models_s
        self.boundaries[step] = self._since
        best = self.best.decide(step)
        if best is not None:
            self.console.print(best, markup=False, soft_wrap=True)
        own: dict[str, Json] = {
            KEPT: self.best.state(),
            CONFIG: self.config,
            FILES: positions(self.files),
            RANDOM: random_state(),
        }
        if snapshot.write is not None:
            folder = run_state.step_folder(self.directory, step)
            own[run_state.HELD] = dict(await snapshot.write(folder))
        self._saving = RunState(
            step=step,
            weight_version=step,
            tokens_total=snapshot.tokens_total,
            parts={**own, **snapshot.parts},
            groups=snapshot.groups,
            epoch=None if self.fence is None else self.fence.epoch,
        )

    async def finish(self, *, wait: bool) -> float | None:
        """Completes the checkpoint and points `latest` at it if every rank has written its files; with `wait`, waits
        for the ranks. Returns the seconds that the checkpoint took, or None where none was completed."""
        if self._saving is None or not all([await m.finish_save(wait=wait) for m in self.models.values()]):
            return None
        self._check_fence()
        run_state.save(self.directory, self._saving, keep=self.keep, every=self.keep_every, best=self.best.step)
        self.saved, self._saving = self._saving.step, None
        return time.perf_counter() - self._since

    def _check_fence(self) -> None:
        if self.fence is not None:
            self.fence.check()

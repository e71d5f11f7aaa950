"""One rank of a shipped configuration on a CUDA device, through the phases of its life: what torch's allocator holds at
the peak of each, and how long a step takes.

Real weights have no part in either: they are random, as the model is built.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.fake.substitutes.facts import Pack, RankCounts, RankRun

TIMED = 3  # steps, after the one whose peak is measured
SHORT = 64  # tokens of a micro-batch whose kernels take less time than their launches


@dataclass(slots=True)
class MeasuredRank:
    """Bytes and seconds of one rank on this device."""

    counts: RankCounts = field(default_factory=RankCounts)
    reserved: dict[str, int] = field(default_factory=dict)
    """Phase -> bytes that the caching allocator had taken from the device at the phase's peak."""
    outside: int = 0
    """Bytes of the device that this process has and the allocator does not: the CUDA context, libraries."""
    step_s: float = 0.0
    """Median of `TIMED` steps of the planned micro-batches."""
    short_s: float = 0.0
    """The same of one micro-batch of `SHORT` tokens: the host's time."""
    tokens: int = 0
    """Of a step."""
    micro_batches: int = 0
    pack: Pack | None = None
    turns_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the first and a later sleep and wake."""


class Allocated:
    """Has the interface of LiveBytes and asks the CUDA allocator: one part, and steps at full speed."""

    def __init__(self, found: MeasuredRank) -> None:
        self._found, self._peaks = found, 0

    def begin_phase(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> dict[str, int]:
        torch.cuda.synchronize()
        self._found.reserved[str(self._peaks)] = torch.cuda.max_memory_reserved()
        self._peaks += 1
        return {"allocated": torch.cuda.max_memory_allocated()}

    @property
    def device(self) -> dict[str, int]:
        return {"allocated": torch.cuda.memory_allocated()}

    @property
    def host_peak(self) -> dict[str, int]:
        return {}

    @contextmanager
    def part(self, name: str, *, unless: Iterable[str] = ()) -> Iterator[None]:
        yield

    @contextmanager
    def on_host(self) -> Iterator[None]:
        yield

    def assign(self, tensors: Iterable[Any], part: str) -> None: ...

    def measure(self, storage: Any) -> None: ...


def measure(rank: int, world: int, port: int, path: Path, overrides: Sequence[str]) -> MeasuredRank:
    """The only rank of `path` with `overrides`. Imports megatron, for CUDA ranks."""
    import megatron_bridge.trainer  # noqa: F401  first: it chooses the device
    from megatron_bridge.fake.phases import built, slept_and_published, trained
    from miles_like.commands.execute import Ranks

    found = MeasuredRank()
    with tempfile.TemporaryDirectory() as where:
        run = Ranks(path, Path(where), overrides).run(0)
        found.micro_batches, found.pack = run.micro_batches, run.pack
        found.tokens = run.micro_batches * run.pack.tokens
        live: Any = Allocated(found)
        batches, loss_tokens = _step(run)
        trainer = built(run, live, found.counts, address=("127.0.0.1", port))
        try:
            trained(run, trainer, batches, loss_tokens, live, found.counts)
            if run.config.trains:  # TransformerEngine's optimizer makes its state in the first step
                trained(run, trainer, batches, loss_tokens, live, found.counts)
                del found.reserved["1"]
            found.outside = _of_this_process() - torch.cuda.memory_reserved()
            found.step_s = _seconds(trainer, batches, loss_tokens)
            short = replace(run, pack=Pack(lengths=(SHORT,)), micro_batches=1)
            found.short_s = _seconds(trainer, *_step(short))
            slept_and_published(run, trainer, lambda: [trainer.export()], live, found.counts)
            if run.colocated:
                found.turns_s = _turns(trainer)
        finally:
            trainer.close()
    found.reserved = dict(zip(found.counts.peaks, found.reserved.values(), strict=True))
    return found


def _of_this_process() -> int:
    """Bytes of the device that this process has, as the driver counts them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(",") for line in lines if line.split(",")[0].strip() == str(os.getpid())]
    return sum(int(mib) for _, mib in rows) << 20


def _step(run: RankRun) -> tuple[list[Any], int]:
    """Micro-batches, and the number of their tokens with loss."""
    from megatron_bridge.fake.phases import batches_of
    from miles_like.hf.checkpoint import read_config

    batches = batches_of(run, read_config(Path(run.config.hf_config)))
    return batches, sum(int(batch.loss_mask.sum()) for batch in batches)


def _seconds(trainer: Any, batches: list[Any], loss_tokens: int) -> float:
    steps = range(2, TIMED + 2)
    return statistics.median(_timed(partial(trainer.train, [batches], [loss_tokens], i)) for i in steps)


def _turns(trainer: Any) -> dict[str, float]:
    """Of a rank that has slept before: its host memory is there."""
    return {"sleep": _timed(trainer.sleep), "wake": _timed(trainer.wake)}


def _timed(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began

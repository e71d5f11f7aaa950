"""Simulates a run: its attempts between faults, and its result.

A fault ends the run at once. It resumes from its last complete checkpoint, as docs/resume.md describes: what was
sampled and trained since is lost, and the time passes.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_like.simulation.clock.timeline import ServerTimeline, TrainerInterval, TrainerTimeline
from miles_like.simulation.clock.virtual_time import now, run_virtual
from miles_like.simulation.inputs.assumptions import Assumptions, FaultAssumptions
from miles_like.simulation.inputs.lengths import AnswerSource, Purpose, stream
from miles_like.simulation.inputs.settings import Capacity, LoopSettings
from miles_like.simulation.loop.attempt import Attempt, SimState

STUCK = 100  # lives in a row that end at the checkpoint that they began with


@dataclass(kw_only=True)
class Outcome:
    """The result of a simulated run. generated: tokens that the servers sampled, including those of lost steps."""

    settings: LoopSettings
    assumed: Assumptions
    state: SimState = field(default_factory=SimState)
    trainer: Sequence[TrainerInterval] = ()
    servers: Sequence[ServerTimeline] = ()
    wall_s: float = 0.0
    generated: int = 0
    core_seconds: float = 0.0
    turns: int = 0  # changes between servers and trainer
    faults: int = 0  # that ended the run
    restarts: int = 0  # of a server alone
    lost_steps: int = 0  # trained, and not in the checkpoint that the run resumed from


def simulate(settings: LoopSettings, assumed: Assumptions, answers: AnswerSource) -> Outcome:
    """Simulate a run; the same arguments give the same outcome. Raises ValueError for a cache that cannot hold one
    sample, and RuntimeError for a run that cannot fill a step, or that does not reach its next checkpoint between two
    faults."""
    _check_cache(settings, assumed, answers)
    return run_virtual(_history(settings, assumed, answers))


def _check_cache(settings: LoopSettings, assumed: Assumptions, answers: AnswerSource) -> None:
    """Raises ValueError for a server whose cache is smaller than its largest sample, which no server could run."""
    capacity = Capacity.of(settings, assumed.engine)
    needed = max(capacity.reserved(prompt, answer) for prompt, answer in answers.longest())
    if needed > capacity.kv_tokens:
        key = "simulation.engine.kv_tokens" if assumed.engine.kv_tokens else "rollout.embedded.max_total_tokens"
        raise ValueError(
            f"{key} = {capacity.kv_tokens} is less than the {needed} tokens of the longest sample with its prompt: "
            f"raise it to at least {needed}, or lower rollout.max_new_tokens"
        )


async def _history(settings: LoopSettings, assumed: Assumptions, answers: AnswerSource) -> Outcome:
    out = Outcome(settings=settings, assumed=assumed)
    out.servers = [ServerTimeline() for _ in range(settings.servers)]
    trainer, random = TrainerTimeline(), stream(settings.seed, Purpose.FAULTS)
    state, stuck = SimState(), 0
    while True:
        began = state.step
        attempt = Attempt(
            settings=settings,
            assumed=assumed,
            answers=answers,
            state=state,
            trainer=trainer,
            timelines=out.servers,
            resumed=out.faults > 0,
        )
        ended = await _life(attempt, out, random)
        out.generated += sum(server.generated for server in attempt.servers)
        out.core_seconds += attempt.processors.used
        out.turns += attempt.turns.changes
        for timeline in out.servers:
            timeline.close(now())
        if ended:
            break
        out.faults += 1
        out.lost_steps += attempt.state.step - attempt.saved.step
        state = copy.deepcopy(attempt.saved)
        stuck = stuck + 1 if state.step == began else 0
        if stuck == STUCK:
            raise RuntimeError(_no_progress(settings, assumed.faults, began))
        with trainer.phase("restart"):
            await asyncio.sleep(assumed.faults.resume_s)
    trainer.close()
    out.state, out.trainer, out.wall_s = state, trainer.intervals, now()
    return out


async def _life(attempt: Attempt, out: Outcome, random: np.random.Generator) -> bool:
    """Whether the run reached its end. False: a fault ended it."""
    faults, servers = attempt.assumed.faults, attempt.settings.servers
    alone = faults.server_restart_s is not None
    rate = 1 / faults.trainer_s if faults.trainer_s else 0.0
    rate += servers / faults.server_s if faults.server_s and not alone else 0.0
    body = asyncio.create_task(attempt.run())
    others = [asyncio.create_task(_server_faults(attempt, out, random))] if alone and faults.server_s else []
    try:
        timeout = random.exponential(1 / rate) if rate else None
        await asyncio.wait({body, *others}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            body.result()
            return True
        return False
    finally:
        for task in (body, *others):
            task.cancel()
        await asyncio.gather(body, *others, return_exceptions=True)


async def _server_faults(attempt: Attempt, out: Outcome, random: np.random.Generator) -> None:
    """Faults of servers that are restarted while the run continues. Does not end."""
    faults = attempt.assumed.faults
    assert faults.server_s is not None and faults.server_restart_s is not None
    while True:
        await asyncio.sleep(random.exponential(faults.server_s / len(attempt.servers)))
        server = attempt.servers[int(random.integers(len(attempt.servers)))]
        out.restarts += 1
        await server.fail(faults.server_restart_s)


def _no_progress(settings: LoopSettings, faults: FaultAssumptions, step: int) -> str:
    means = [
        f"simulation.faults.{key} = {value:g}"
        for key, value in (("server_s", faults.server_s), ("trainer_s", faults.trainer_s))
        if value
    ]
    every = settings.save_every or settings.steps
    return (
        f"{STUCK} faults in a row occurred before the checkpoint after step {step}, with {' and '.join(means)} "
        f"and checkpoint.every = {every}: save more often, or raise the mean time between faults"
    )

"""The ranks of all roles of a run, started and ended together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.protocols import LossFn
from miles_like.run.setup.launcher import Launcher
from miles_like.run.setup.model_plan import ModelPlan


class RunRanks(NamedTuple):
    """The ranks of a run by their role. None: the run has none of that role."""

    trainer: RayTrainer
    critic: RayTrainer | None = None
    reference: RayTrainer | None = None

    @property
    def all(self) -> tuple[RayTrainer, ...]:
        return tuple(one for one in self if one is not None)

    def end(self) -> None:
        """Kills all processes and waits until they have ended. Raises RuntimeError naming those that have not."""
        if left := [name for one in self.all for name in one.end()]:
            raise RuntimeError(
                f"{', '.join(left)} could not be killed, and may still write to the run directory: end them, "
                "then run again with --resume"
            )


def start_ranks(launcher: Launcher, plan: ModelPlan, loss: LossFn, life: int = 0) -> RunRanks:
    """Starts trainer, critic and reference ranks with the run's initial weights. life: how often ranks were rebuilt
    before. Raises as `RayTrainer`; no rank is left then."""
    started: list[RayTrainer] = []

    def begun(start: Callable[[], RayTrainer | None]) -> RayTrainer | None:
        if (one := start()) is not None:
            one.life = life
            started.append(one)
        return one

    try:
        trainer = begun(lambda: launcher.trainer(plan, loss))
        assert trainer is not None, "every run has a trainer"
        return RunRanks(trainer, begun(lambda: launcher.critic(plan)), begun(lambda: launcher.reference(plan, loss)))
    except BaseException:
        for one in started:
            one.end()
        raise

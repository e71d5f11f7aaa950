"""Another loop of the same objects: two optimizer passes over each replayed batch, scored again in between.

    python docs/examples/two_passes.py CONFIG RUN_DIR

The second pass trains the same samples on the same expert routes, scored again under the weights of the first pass.
The run makes CONFIG's checkpoint if it is not there, saves as `miles-like train` does, and resumes if it has saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from miles_like.loop.controller import Controller
from miles_like.loop.recorder import StepRecord
from miles_like.types import SampleGroup


class TwoPasses(Controller):
    async def step(self, record: StepRecord, groups: Sequence[SampleGroup]) -> None:
        with record.timed("checks"):
            await self.checks.before_training(record.step)
        for number in (1, 2):
            with record.timed("experience"):
                scored = await self.experience.score(groups)
                advantages = await self.experience.advantages(record.step, scored)
            with record.timed("train"):
                report = await self.trainer.train(self.packer.steps(scored, advantages))
                record.trained(report)
                record.metrics |= await self.experience.learn(scored)
            if number == 1:
                first = {f"first_pass/{key}": value for key, value in record.metrics.items()}
        record.metrics |= first
        self.recorder.check(record)
        await self.publish(record)


def main(config_file: str, run_dir: str) -> None:
    from miles_like.config.load import load_config
    from miles_like.nodes.session import start_ray
    from miles_like.run.assemble import staged
    from miles_like.run.setup.model_plan import model_plan
    from miles_like.run.train import train

    config, console, where = load_config(Path(config_file)), Console(), Path(run_dir)
    made = staged(config, where, console, None)
    start_ray(None)
    plan = model_plan(config, where, made / "hf", made / "megatron")
    train(plan, console, resume=(where / "checkpoints" / "latest").exists(), controller=TwoPasses)


if __name__ == "__main__":
    main(*sys.argv[1:])

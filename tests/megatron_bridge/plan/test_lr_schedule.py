"""The learning rate, step by step beside transformers' schedules and Megatron's own scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from megatron_bridge.config import OptimizerConfig, TrainerConfig
from megatron_bridge.device.device import init_device
from megatron_bridge.plan.lr_schedule import learning_rate
from tests.support import toy
from tests.support.refusals import Facts, refuses

init_device()

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

DECAY, STEPS = 30, 40


def _config(schedule: str, **more: Any) -> OptimizerConfig:
    if schedule != "constant":
        more = {"decay_steps": DECAY} | more
    if schedule == "wsd":
        more = {"wsd_decay_steps": 8} | more
    return OptimizerConfig(lr=3e-4, schedule=schedule, **more)


def _transformers(config: OptimizerConfig) -> list[float]:
    """Its learning rates of steps 0, 1, ...: a warm-up from 0, a decay to 0 (wsd: to a share of lr)."""
    name = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}.get(config.schedule, config.schedule)
    more: dict[str, Any] = {}
    if config.schedule == "wsd":
        assert config.decay_steps and config.wsd_decay_steps
        more = {"num_decay_steps": config.wsd_decay_steps, "decay_type": "linear", "min_lr_ratio": 0.0}
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = get_scheduler(name, adam, config.warmup_steps, config.decay_steps, scheduler_specific_kwargs=more)
    rates = []
    for _ in range(STEPS):
        rates.append(adam.param_groups[0]["lr"])
        adam.step()
        scheduler.step()
    return rates


def _megatron(config: OptimizerConfig) -> list[float]:
    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        init_lr=config.min_lr,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or STEPS,
        lr_decay_style="WSD" if config.schedule == "wsd" else config.schedule,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=config.wsd_decay_steps,
        lr_wsd_decay_style="linear",
    )
    rates = []
    for _ in range(STEPS):
        rates.append(group["lr"])
        scheduler.step(1)
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("oracle", [_transformers, _megatron])
def test_each_step_has_the_rate_of_other_peoples_schedules(schedule: str, warmup: int, oracle: Any) -> None:
    """The warm-up is theirs one step early, since theirs spends step 0 on the lowest rate; the decay is theirs.
    transformers decays to 0, so min_lr is compared with Megatron's alone, and after its end its cosine rises again."""
    for min_lr in (0.0,) if oracle is _transformers else (0.0, 1e-4):
        if schedule == "constant" and min_lr and not warmup:
            continue  # refused: it would do nothing
        config = _config(schedule, warmup_steps=warmup, min_lr=min_lr)
        theirs = oracle(config)
        want = theirs[1 : warmup + 1] + theirs[warmup:]
        got = [learning_rate(config, step) for step in range(STEPS)]
        end = DECAY + 1 if oracle is _transformers else STEPS
        assert got[:end] == pytest.approx(want[:end], rel=1e-12, abs=1e-18)


def test_no_step_of_a_run_is_spent_on_the_lowest_rate() -> None:
    """Step 0 already moves, the last warm-up step has the full rate, the last step is still above min_lr."""
    for schedule in ("linear", "cosine", "wsd"):
        config = _config(schedule, warmup_steps=4)
        rates = [learning_rate(config, step) for step in range(STEPS)]
        assert min(rates[:DECAY]) > 0 and rates[3] == rates[4] == config.lr and rates[DECAY:] == [0.0] * (STEPS - DECAY)


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"min_lr": 2.0}, ("min_lr", 2.0, 1.0)),
        ({"min_lr": 0.5}, ("min_lr", 0.5)),
        ({"decay_steps": 10}, ("decay_steps", 10)),
        ({"wsd_decay_steps": 3}, ("constant", "wsd_decay_steps", 3)),
        ({"schedule": "wsd"}, ("wsd", "None")),
        ({"schedule": "linear", "warmup_steps": 10, "decay_steps": 10}, ("warmup_steps", 10, "decay_steps", 10)),
        (
            {"schedule": "wsd", "warmup_steps": 5, "wsd_decay_steps": 6, "decay_steps": 10},
            ("warmup_steps", 5, 6, "decay_steps", 10),
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(keys: dict[str, Any], facts: Facts) -> None:
    """One sentence with the numbers that disagree, before anything starts."""
    with refuses(ValueError, *facts):
        OptimizerConfig(**{"lr": 1.0, **keys})


def test_a_decay_ends_with_the_run_unless_told() -> None:
    """The run sets decay_steps from its length; a trainer without it is refused."""
    open_ended = OptimizerConfig(schedule="cosine", warmup_steps=5)
    assert open_ended.over(20).decay_steps == 20 and _config("cosine").over(20).decay_steps == 30
    assert OptimizerConfig(warmup_steps=5).over(3).decay_steps is None
    with refuses(ValueError, "decay_steps", 5):
        open_ended.over(5)
    base = toy.config("")
    with refuses(ValueError, "optimizer.decay_steps"):
        TrainerConfig.model_validate(base.model_dump() | {"optimizer": open_ended.model_dump()})

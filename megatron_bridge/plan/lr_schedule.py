"""The learning rate as a pure function of the step number, so that there is no state to save."""

from __future__ import annotations

import math

from megatron_bridge.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The learning rate of step `step` (from 0); decay_steps must be set unless the schedule is constant.

    Linear from min_lr to lr over warmup_steps, so that step warmup_steps - 1 has lr; then, with x the fraction of
    [warmup_steps, decay_steps] before `step`, min_lr + (lr - min_lr) * f(x), and min_lr from decay_steps on:

        constant  f = 1, without end
        linear    f = 1 - x
        cosine    f = (1 + cos(pi x)) / 2                                          (SGDR, arXiv:1608.03983)
        wsd       f = 1, then linearly to 0 over the last wsd_decay_steps          (MiniCPM, arXiv:2404.06395)

    The warm-up is that of Megatron and transformers shifted by one step, since theirs has a rate of 0 at the first
    step. The decay is theirs: shifting it too would spend the last step on min_lr.
    """
    span = config.lr - config.min_lr
    if step < config.warmup_steps:
        return config.min_lr + span * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    assert config.decay_steps is not None, "OptimizerConfig.over(steps) sets decay_steps"
    if step >= config.decay_steps:
        return config.min_lr
    left = config.decay_steps - step
    if config.schedule == "wsd":
        assert config.wsd_decay_steps is not None
        return config.min_lr + span * min(1.0, left / config.wsd_decay_steps)
    share = left / (config.decay_steps - config.warmup_steps)
    return config.min_lr + span * (share if config.schedule == "linear" else (1 - math.cos(math.pi * share)) / 2)

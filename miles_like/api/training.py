"""`miles_like.train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from miles_like.api.calls import Config, Overrides, console_of, from_python, override_list, source_of
from miles_like.api.results import RunResult

if TYPE_CHECKING:
    from miles_like.config.load import Override

Reward: TypeAlias = str | Callable[..., Any]


@from_python
def train(
    config: Config,
    *,
    run_dir: str | Path,
    reward: Reward | None = None,
    overrides: Overrides = (),
    resume: bool = False,
    from_step: int | None = None,
    fresh: bool = False,
    fuse: bool = False,
    ray_address: str | None = None,
    cache_dir: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Run all stages of a configuration, from the model's checkpoint to a trained one, as `miles-like train` does.

    Works in a script and in a notebook, where it blocks until the run has ended. Rewards run in this process.

    Args:
        config: path of a TOML file, a dict of the same form (with "extends" for what it begins with), or the name of
            a configuration that is installed, such as "tiny".
        run_dir: directory of the run; its metrics, samples, checkpoints and report are written there.
        reward: `def reward(sample) -> float`, any of the signatures of docs/rewards.md, sync or async, or the name or
            import path of one. It replaces the configuration's rewards. A lambda, or a function of a notebook or
            script, is known to this process alone: a resumed run needs it again.
        overrides: settings over the configuration's: {"train.steps": 3}, {"train": {"steps": 3}}, or a list of texts
            as --set has them.
        resume: go on from the last checkpoint of `run_dir`.
        from_step: resume from the checkpoint of this step.
        fresh: redo complete stages, and replace a run in `run_dir`.
        fuse: decode quantized weights while they are converted, without a BF16 directory.
        ray_address: join this Ray cluster. By default Ray is started for this run, unless this process uses it already.
        cache_dir: directory of the stages before training; by default `cache` beside `run_dir`.
        force: start a run that by its plan does not fit the memory of its devices.
        quiet: print nothing.

    Returns:
        The run's metrics, samples and checkpoint.

    Raises:
        UserError: one sentence about a setting, a file, the reward, or a process that failed.
        Stopped: the run has saved its state and ended before its last step, on SIGTERM or at checkpoint.deadline_s.
    """
    from miles_like.run.pipeline import PipelineOptions, run_pipeline
    from miles_like.stopping import call_begins

    options = PipelineOptions(
        overrides=[*reward_overrides(reward), *override_list(overrides)],
        fuse=fuse,
        resume=resume,
        from_step=from_step,
        fresh=fresh,
        ray_address=ray_address,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        force=force,
    )
    call_begins()
    run_pipeline(source_of(config), Path(run_dir), options, console_of(quiet))
    return RunResult(run_dir)


def reward_overrides(reward: Reward | None) -> list[Override]:
    """The overrides that make `reward` the only one of a run."""
    if reward is None:
        return []
    from miles_like.config.sections.reward import BUILT_IN, has_options
    from miles_like.plugins import name_of

    removed = {name: False for name in ("parts", *BUILT_IN) if name == "parts" or has_options(name)}
    if isinstance(reward, str):  # the options of a built-in reward stay
        removed.pop(reward, None)
        return [{"reward": removed}, {"reward": {"name": reward}}]
    from miles_like.rewards.styles import recognised

    found = recognised(reward)
    style = {"style": "sample" if found is None else found[0]} if found or _takes_one(reward) else {}
    return [{"reward": removed}, {"reward": {"name": name_of(reward), **style}}]


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument alone, as `lambda s: ...`."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True

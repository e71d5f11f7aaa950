"""`miles_like.evaluate`, `verify` and `plan`: questions about a model or a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_like.api.calls import Config, Overrides, console_of, from_python, override_list, source_of
from miles_like.api.training import Reward, reward_overrides

if TYPE_CHECKING:
    from miles_like.alignment.report import Report
    from miles_like.planning.plan import Plan
    from miles_like.run.evaluate import Found, SearchOptions

_KEYS = (  # of the settings that are parameters of `evaluate`
    "eval.samples",
    "eval.greedy",
    "eval.temperature",
    "rollout.max_new_tokens",
    "seed",
    "eval.max_prompts",
    "rollout.embedded.threads",
    "rollout.port",
)


@from_python
def evaluate(
    model: str | Path,
    *,
    data: str | Path | Sequence[str] | Mapping[str, str | Path] = (),
    config: Config | None = None,
    reward: Reward | None = None,
    samples: int | None = None,
    greedy: bool | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    max_prompts: int | None = None,
    threads: int | None = None,
    port: int | None = None,
    server: str | None = None,
    search: SearchOptions | None = None,
    key_file: str | Path | None = None,
    run_dir: str | Path = "runs/eval",
    overrides: Overrides = (),
    quiet: bool = False,
) -> Found:
    """Evaluate a Hugging Face directory, BF16 or quantized, on held-out prompts, as `miles-like eval` does.

    Args:
        model: the Hugging Face directory.
        data: files of prompts and answers in place of the configuration's: one path, a list of "[NAME=]FILE", or a
            dict of name and path.
        config: a run's configuration: its columns, template, sampling, reward and held-out sets.
        reward: as for `train`.
        samples, greedy: k of avg@k and pass@k; whether one greedy answer is taken to each prompt.
        temperature, max_new_tokens, seed: of the sampling.
        max_prompts: number of prompts of each set.
        threads, port: of the server that is started.
        server: URL of a running server of this model, in place of starting one.
        search: best of N answers, or a beam search, by a reward; then `samples` is N.
        key_file: file of mode 0600 with that server's key.
        run_dir: directory of the server's log.
        overrides: as for `train`; of the sections data, reward, rollout, eval, and seed.
        quiet: print nothing.

    Returns:
        `figures()`: metric -> value; `answers`: of each set; `write_json(path)`, `write_answers(path)`.

    Raises:
        UserError: a directory without a model, prompts that cannot be read, a server that fails.
    """
    from miles_like.run.evaluate import EvalAlone, read_evaluation_config
    from rollout.server_key import given_key

    if server is not None:
        _check_running(server, {"threads": threads, "port": port})
    values = (samples, greedy, temperature, max_new_tokens, seed, max_prompts, threads, port)
    short = {key: value for key, value in zip(_KEYS, values, strict=True) if value is not None}
    layers = [*override_list(overrides), short, *reward_overrides(reward)]
    settings = read_evaluation_config(None if config is None else source_of(config), layers, _files(data))
    key = given_key(None if key_file is None else Path(key_file))
    return EvalAlone(Path(model), settings, Path(run_dir), console_of(quiet), server, key, search).run()


def _files(data: str | Path | Sequence[str] | Mapping[str, str | Path]) -> list[str]:
    """As --data has them."""
    if isinstance(data, str | Path):
        return [str(data)]
    return [f"{name}={path}" for name, path in data.items()] if isinstance(data, Mapping) else list(data)


def _check_running(server: str, options: Mapping[str, int | None]) -> None:
    """Raises ValueError for a malformed URL of a running server, and for options of a server that is started."""
    from rollout.server_url import server_url

    server_url(server)
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"--{option} {value} has no effect with --server, which is already running: remove one of them"
            )


@dataclass(frozen=True, slots=True)
class Verified:
    """The comparison of a trainer and its rollout servers."""

    report: Report
    plots: tuple[Path, ...]
    checkpoint: Path | None
    """The checkpoint whose weights were compared; None: the initial ones."""

    @property
    def ok(self) -> bool:
        """Whether the precision explains the difference."""
        return self.report.ok

    @property
    def conclusion(self) -> str:
        """The result in one sentence, with the KL divergence and its bound."""
        return self.report.conclusion()


@from_python
def verify(
    config: Config,
    *,
    run_dir: str | Path = "runs/verify",
    rollouts: str | Path | None = None,
    checkpoint: str | Path | None = None,
    servers: Sequence[str] = (),
    key_file: str | Path | None = None,
    overwrite: bool = False,
    layers: bool = False,
    prompts: int | None = None,
    overrides: Overrides = (),
    ray_address: str | None = None,
    quiet: bool = False,
) -> Verified:
    """Compare the log-probabilities of trainer and rollout and attribute the difference, as `miles-like verify` does.

    Args:
        config: as for `train`.
        run_dir: directory of logs and plots.
        rollouts: a rollouts/step_N.jsonl of a run, in place of new samples.
        checkpoint: a checkpoints/step_N of a run. None: the last one in `run_dir`, or without one, with `rollouts` and
            with `servers` the initial weights.
        servers: URLs of running servers, in place of starting one.
        key_file: file of mode 0600 with those servers' key.
        overwrite: publish the trainer's weights to `servers`, once their own are hashed.
        layers: name the first layer whose residual stream differs.
        prompts: number of prompts to sample; None: 32.
        overrides, ray_address, quiet: as for `train`.

    Returns:
        `ok`, `conclusion`, the whole `report`, the paths of its `plots` and the `checkpoint` that was compared.

    Raises:
        UserError: options that exclude each other, a server of another model, a process that failed.
    """
    from miles_like.config.load import load_config

    loaded = load_config(source_of(config), override_list(overrides))
    from miles_like.run import assemble
    from miles_like.run.verify import VerifyOptions
    from rollout.server_key import given_key
    from rollout.server_url import server_url

    for url in servers:
        server_url(url)
    try:
        options = VerifyOptions(
            rollouts=None if rollouts is None else Path(rollouts),
            checkpoint=None if checkpoint is None else Path(checkpoint),
            attached=tuple(servers),
            key=given_key(None if key_file is None else Path(key_file)),
            overwrite=overwrite,
            layers=layers,
            prompts=prompts,
        ).of_run(Path(run_dir))
        found, plots = assemble.verify(loaded, Path(run_dir), console_of(quiet), ray_address, options)
        return Verified(found, tuple(plots), options.checkpoint)
    finally:
        assemble.shut_down()


@from_python
def plan(
    config: Config,
    *,
    device: str | None = None,
    imbalance: float | None = None,
    prompt: float | None = None,
    response: float | None = None,
    reward_seconds: float = 0.0,
    overrides: Overrides = (),
) -> Plan:
    """Plan the memory, disk and step time of a run without its devices, as `miles-like plan` does.

    Args:
        config: as for `train`.
        device: name of a GPU, such as "H100", in place of cluster.device.
        imbalance: rows of the busiest rank's experts over the average; None: 1.25.
        prompt, response: mean tokens of a prompt and of a response; None: a share of the configuration's limits.
        reward_seconds: seconds of one score.
        overrides: as for `train`.

    Returns:
        `fits`, `verdict()` in one sentence, `stages` with the bytes of each phase, `step_s` by part.

    Raises:
        UserError: an invalid setting, or a model whose config.json is not here.
    """
    from miles_like.config.load import load_config
    from miles_like.run.plan import Predictions, make_plan

    loaded = load_config(source_of(config), override_list(overrides))
    asked = Predictions(device=device, imbalance=imbalance, prompt=prompt, response=response, reward_s=reward_seconds)
    return make_plan(loaded, asked, console_of(True))

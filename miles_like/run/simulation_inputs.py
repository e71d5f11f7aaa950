"""What `miles-like simulate` reads: the loop's settings of a configuration, assumptions of a run or of options."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_like.config.load import parse_override
from miles_like.config.run import RunConfig
from miles_like.simulation.calibration import calibrated, is_synchronous, read_answers, read_run
from miles_like.simulation.inputs.assumptions import Assumptions, missing
from miles_like.simulation.inputs.lengths import Answers, AnswerSource, RecordedAnswers
from miles_like.simulation.inputs.settings import LoopSettings


def loop_settings(config: RunConfig, assumed: Assumptions) -> LoopSettings:
    """Raises ValueError for a run without a rollout."""
    rollout, embedded = config.servers, config.rollout.engine == "embedded"
    if rollout is None:
        raise ValueError(
            f"algorithm.name = {config.algorithm.name!r} trains without a rollout, so there is no loop to "
            "simulate: choose a configuration with a rollout"
        )
    if rollout.engine == "vllm":
        raise ValueError(
            "rollout.engine = 'vllm': the simulation supports only the schedulers of SGLang and of the embedded "
            "engine: pass --set rollout.engine=sglang"
        )
    flags = rollout.embedded if embedded else rollout.sglang
    return LoopSettings(
        seed=config.seed,
        steps=config.train.steps,
        groups=config.train.groups_per_step,
        samples=config.train.samples_per_group,
        max_staleness=config.buffer.max_staleness,
        lockstep=config.in_lockstep,
        over_sampling=config.buffer.over_sampling,
        mask_old_tokens=config.buffer.old_tokens == "mask",
        in_flight_at_publication=config.in_flight_at_publication,
        max_rounds=rollout.max_rounds,
        servers=rollout.servers,
        slots=flags.max_running_requests,
        kv_tokens=rollout.embedded.max_total_tokens if embedded else None,
        reserves_limit=embedded,
        prompts_per_request=rollout.prompts_per_request,
        limit=rollout.longest_answer,
        slow_reward=assumed.reward.mean_s > 0,
        pause_mode=config.publish.pause_mode,
        ranks=config.parallel.world_size,
        shards=config.parallel.dp,
        micro_batch_tokens=config.max_pack_tokens,
        eval_every=config.eval.every,
        save_every=config.checkpoint.every,
        save_asynchronous=config.checkpoint.asynchronous,
        takes_turns=config.takes_turns,
    )


def assumed_tree(
    config: RunConfig, run: Path | None, overrides: Sequence[str], lengths_from: Path | None = None
) -> tuple[dict[str, Any], AnswerSource | None]:
    """The assumptions of the run in `run`, with the overrides, and the answers that it, or the samples in
    `lengths_from`, recorded. Raises ValueError."""
    tree: dict[str, Any] = {}
    recorded: list[Answers] = []
    if run is not None:
        if not is_synchronous(run):
            raise ValueError(
                f"{run} is an asynchronous run, in which sampling and training overlap, so neither can be timed: "
                "pass a run with buffer.max_staleness = 0 as --from"
            )
        steps, embedded = read_run(run), config.rollout.engine == "embedded"
        tree = calibrated(steps, servers=config.rollout.servers, shards=config.parallel.dp, one_pass=embedded)
        if not config.cluster.gpus_per_node:  # ranks and servers share this machine's processors
            tree["cores"] = float(len(os.sched_getaffinity(0)))
            tree["engine"]["cores"] = float(config.rollout.embedded.threads)
        recorded = [group for step in steps for group in step.groups]
    if lengths_from is not None:
        tree["lengths"], recorded = {"kind": "recorded"}, read_answers(lengths_from)
    for text in overrides:
        _merge(tree, parse_override(text)["simulation"])
    lengths = tree.get("lengths")
    kind = lengths.get("kind", "recorded") if isinstance(lengths, Mapping) else "recorded"
    if lengths_from is not None and kind != "recorded":
        raise ValueError(
            f"--lengths-from {lengths_from} gives recorded lengths, but simulation.lengths.kind = {kind!r} draws "
            "lengths: remove one of the two"
        )
    if not recorded or kind != "recorded":
        return tree, None
    return tree, RecordedAnswers(recorded=recorded, limit=config.rollout.longest_answer)


def read_assumptions(tree: Mapping[str, Any]) -> Assumptions:
    """Raises ValueError with one sentence for each key that is missing, unknown or wrong."""
    problems: list[tuple[str, str]] = []  # kind of the error, sentence
    found: Assumptions | None = None
    try:
        found = Assumptions.model_validate(tree)
    except ValidationError as e:
        problems = [(error["type"], _problem(error["loc"], error["type"], error["msg"])) for error in e.errors()]
    if unknown := [text for kind, text in problems if kind == "extra_forbidden"]:
        raise ValueError("; ".join(unknown))
    if lacking := missing(tree):
        raise ValueError(
            f"{', '.join(lacking)} must be set: pass a synchronous run as --from, or --set "
            "simulation.engine.step_s=..., simulation.train.token_s=..., simulation.publish.seconds=..., "
            "simulation.lengths.mean=... and simulation.lengths.prompt_tokens=..."
        )
    if found is None:
        raise ValueError("; ".join(text for _, text in problems))
    return found


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _problem(loc: Sequence[int | str], kind: str, message: str) -> str:
    key = ".".join(["simulation", *map(str, loc)])
    if kind == "extra_forbidden":
        known = known_keys()
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        return f"unknown key {key!r}; the nearest known one is {near[0]!r}"
    if kind == "missing":
        return f"{key} is missing: set it"
    text = message.removeprefix("Value error, ")
    return text if "simulation." in text else f"{key}: {text}"


def known_keys() -> list[str]:
    """All keys `simulation.*`."""
    keys = []
    for name, field in Assumptions.model_fields.items():
        section = getattr(field.annotation, "model_fields", None)
        keys += [f"simulation.{name}"] if section is None else [f"simulation.{name}.{inner}" for inner in section]
    return keys

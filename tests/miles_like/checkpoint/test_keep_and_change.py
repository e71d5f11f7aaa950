"""Which checkpoints stay, what a resumed run may change, and the driver's generators.

Whole runs: tests/laws/test_supervised_resume.py."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.checkpoint.best import KeptBest
from miles_like.checkpoint.random_state import random_state, set_random_state
from miles_like.checkpoint.resume_check import REFUSED, SILENT, resume_differences
from miles_like.checkpoint.run_state import RunState, kept_steps, save
from miles_like.config.load import dotted_keys, load_config
from miles_like.config.run import RunConfig
from tests.support.refusals import Facts, check_refusal, refuses


def test_the_last_every_so_many_and_the_best_stay(tmp_path):
    for step in range(1, 10):
        state = RunState(step=step, weight_version=step, tokens_total=0)
        save(tmp_path, state, keep=2, every=4, best=3 if step >= 3 else None)
    assert kept_steps(tmp_path) == [3, 4, 8, 9]
    assert not list(tmp_path.glob("*.removed"))


@pytest.mark.parametrize(("metric", "best"), [("eval/a/avg@1", 2), ("eval/a/loss", 4)])
def test_the_best_follows_the_metrics_direction_and_is_known_after_a_resume(metric: str, best: int) -> None:
    first, later = KeptBest(metric), KeptBest(metric)
    for step, value in ((2, 0.9), (4, 0.1)):
        first.write(step, {metric: value})
        assert first.decide(step) is None
    assert first.step == best
    later.restore(json.loads(json.dumps(first.state())))
    later.write(6, {metric: 0.5})
    later.decide(6)
    assert later.step == best
    other = KeptBest("rollout/reward/mean")
    other.restore(first.state())
    assert other.step is None


def test_a_metric_that_is_not_there_is_said_once() -> None:
    best = KeptBest("eval/typo/avg@1")
    best.write(1, {"train/loss": 1.0})
    check_refusal(str(best.decide(1)), 1, "eval/typo/avg@1")
    assert best.decide(1) is None and best.step is None


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["checkpoint.keep_best=wall_s"], ("checkpoint.keep_best", "wall_s")),
        (["checkpoint.keep_best=eval/typo/avg@1"], ("checkpoint.keep_best", "eval/typo/avg@1", "typo")),
        (["checkpoint.keep_best=eval/"], ("checkpoint.keep_best", "eval/")),
        (["checkpoint.keep_best=rollout/reward/mean", "checkpoint.every=0"], ("checkpoint.every", 0)),
        (["checkpoint.keep_best=eval/heldout/avg@1", "eval.every=0"], ("eval.every", 0)),
        (["checkpoint.keep_best=eval/heldout/avg@1"], None),
        (["checkpoint.keep_best=rollout/reward/mean", "eval.every=0"], None),
    ],
)
def test_a_best_that_cannot_be_found_is_refused_when_the_configuration_is_read(
    settings: list[str], facts: Facts | None
) -> None:
    tiny = Path(__file__).parents[3] / "configs" / "tiny.toml"
    with contextlib.nullcontext() if facts is None else refuses(ValueError, *facts):
        load_config(tiny, ["checkpoint.every=5", *settings])


def config(**more: Any) -> dict[str, Any]:
    base = {"seed": 1, "train": {"steps": 4, "groups_per_step": 8}, "optimizer": {"lr": 0.1}, "new": {"key": None}}
    return {**base, **more}


def test_what_may_change_on_resume() -> None:
    assert resume_differences(config(), config(train={"steps": 9, "groups_per_step": 8}, eval={"every": 3})) == []
    warnings = resume_differences(config(), config(optimizer={"lr": 0.2}, new={"key": "x"}))
    assert warnings == [
        "new.key was not set and is x from here on: this changes the run",
        "optimizer.lr was 0.1 and is 0.2 from here on: this changes the run",
    ]
    with refuses(ValueError, "train.groups_per_step", 8, 4, "--set", "train.groups_per_step", 8):
        resume_differences(config(), config(train={"steps": 4, "groups_per_step": 4}))
    with refuses(ValueError, 1, 2):
        resume_differences(config(), config(seed=2, optimizer={"lr": 9}))
    before, after = config(buffer={"max_staleness": 2}), config(buffer={"max_staleness": 0})
    with refuses(ValueError, "buffer.max_staleness", 2, 0):  # what is in flight would be stale
        resume_differences(before, after)


def test_the_page_lists_what_may_and_may_not_change_as_the_code_does() -> None:
    """And every entry is a key, or matches some: the name of a removed key would allow or refuse nothing."""
    page = (Path(__file__).parents[3] / "docs" / "resume.md").read_text()
    rows = dict(re.findall(r"^\| (may[^|]*) \| (.*) \|$", page, re.MULTILINE))
    listed = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in rows.values()]
    assert listed == [SILENT, REFUSED, ("optimizer.lr",)]
    keys = [*dotted_keys(RunConfig), *(f"{table}.NAME" for table in ("rollout.env", "cluster.env"))]
    assert [one for one in (*SILENT, *REFUSED) if not fnmatch.filter(keys, one)] == []


def test_the_drivers_generators_come_back_through_json() -> None:
    def draws() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            float(torch.rand(1)),
        ]

    draws()  # both keep the second of a pair of normal numbers
    kept = json.loads(json.dumps(random_state()))
    want = draws()
    set_random_state(kept)
    assert draws() == want

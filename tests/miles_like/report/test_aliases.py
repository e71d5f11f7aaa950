"""Names of other frameworks beside the run's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from miles_like.config.sections.watched.report import OtherNames
from miles_like.report.aliases import ALIASES, Aliased, aliased
from miles_like.report.metrics import TIMINGS
from miles_like.report.rows import read_metrics
from miles_like.report.sinks import JsonlSink

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
ROW = {
    "rollout/reward/mean": 0.5,
    "train/entropy": 1.0,
    "perf/step_s": 9.0,
    "eval/a.b/avg@8": 0.25,
    "eval/a.b/pass@8": 1.0,
}


def test_an_alias_has_the_value_of_its_metric() -> None:
    assert aliased(3, ROW, ["verl"]) == {
        "training/global_step": 3.0,
        "critic/score/mean": 0.5,
        "actor/entropy": 1.0,
        "perf/time_per_step": 9.0,
        "val-core/a.b/reward/mean@8": 0.25,
    }
    assert aliased(3, ROW, ["slime"]) == {
        "rollout/raw_reward": 0.5,
        "train/entropy_loss": 1.0,
        "perf/step_time": 9.0,
        "eval/a.b": 0.25,
    }
    assert aliased(3, ROW, []) == {}


def test_a_run_has_them_on_request_beside_its_own(tmp_path: Path) -> None:
    sink = Aliased(JsonlSink(tmp_path / "metrics.jsonl"), ("verl", "slime"))
    sink.write(3, ROW)
    sink.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row == {"step": 3.0, **ROW, **aliased(3, ROW, ["verl", "slime"])}
    plain = Aliased(JsonlSink(tmp_path / "plain.jsonl"), ())
    plain.write(3, ROW)
    plain.close()
    assert json.loads((tmp_path / "plain.jsonl").read_text()) == {"step": 3, **ROW}


def test_aliases_are_of_documented_metrics_and_collide_with_none() -> None:
    assert set(ALIASES) == set(get_args(OtherNames))
    own = {key for names in ALIASES.values() for key in names}
    assert not [key for key in own if f"`{key}`" not in PAGE]
    for names in ALIASES.values():
        assert len(set(names.values())) == len(names)
        assert not [alias for alias in names.values() if f"`{alias}`" in PAGE]
        timed = {alias for key, alias in names.items() if key.startswith(TIMINGS)}
        assert all(alias.startswith(TIMINGS) for alias in timed), "they differ between two runs with the same bits"

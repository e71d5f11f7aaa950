"""Figures of groups, evaluation estimators and sinks.

A wrong figure misleads quietly, and a nan must stay visible. Not covered: how the console looks in a terminal.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles_like.config.sections.watched.metric_direction import better
from miles_like.loop.rollout_stats import RolloutStats
from miles_like.report.metrics import (
    brief,
    eval_metrics,
    pass_at_k,
    rollout_metrics,
    speed_metrics,
    write_rollouts,
)
from miles_like.report.paired.scores import scores_of
from miles_like.report.sinks import JsonlSink, MultiSink, TensorboardSink
from miles_like.types import Finish
from tests.support.made_samples import group, rewarded, sample
from tests.support.refusals import refuses


def test_rollout_figures_by_hand():
    groups = [
        rewarded([1, 0, 0, 0], version=3),
        rewarded([1, 1], version=5),
        group([sample(response_len=9, reward=0.0, finish=Finish.LENGTH, version=5)]),
        group([sample(response_len=0, reward=0.0, finish=Finish.ABORT, version=5)]),
    ]
    assert rollout_metrics(groups, version=5) == pytest.approx(
        {
            "rollout/reward/mean": 3 / 8,
            "rollout/reward/std": math.sqrt(15 / 64),
            "rollout/accuracy": 3 / 8,
            "rollout/len/mean": (6 * 3 + 9) / 8,
            "rollout/empty_frac": 1 / 8,
            "rollout/truncated_frac": 1 / 8,
            "rollout/zero_std_group_frac": 3 / 4,
            "async/staleness/mean": 2 / 4,
            "async/staleness/max": 2.0,
        }
    )
    with refuses(ValueError, 0, 0):
        rollout_metrics([], version=0)


def test_an_episode_counts_once_whatever_rows_it_has():
    """Rewards 1 and 0 of two episodes, of which the first has two rows of 3 and of 0 response tokens."""
    rows = [sample(reward=1.0), dataclasses.replace(sample(reward=1.0, response_len=0), row=1)]
    groups = [group([*rows, sample(index=1, reward=0.0)])]
    found = rollout_metrics(groups, version=0)
    assert (found["rollout/reward/mean"], found["rollout/accuracy"], found["rollout/len/mean"]) == (0.5, 0.5, 3.0)
    assert found["rollout/empty_frac"] == 0.0
    assert eval_metrics(groups, name="x", k=2) == {"eval/x/avg@2": 0.5, "eval/x/pass@1": 0.5, "eval/x/pass@2": 1.0}
    lines = [{"set": "x", "mode": "sampled", **brief(groups[0], s)} for s in groups[0].samples]
    assert scores_of(lines) == {"x": {"p": 0.5}}
    stats = RolloutStats()
    stats.count(groups[0], None)
    assert (stats.samples, stats.tokens, stats.rewards) == (2, 6, [("p", (1.0, 0.0))])


def test_parts_are_averaged_over_the_samples_that_have_them():
    parts = [{"a": 1.0}, {"a": 0.0, "b/c": 2.0}, {}]
    samples = [dataclasses.replace(sample(index=i, reward=1.0), reward_parts=p) for i, p in enumerate(parts)]
    found = rollout_metrics([group(samples), group(samples)], version=0)
    assert found["rollout/reward/a/mean"] == 0.5 and found["rollout/reward/b/c/mean"] == 2.0


def test_utilization_by_hand():
    """Inputs of 4 and 4, 6 labels with loss, and an empty answer that is not trained: 10 x (16 + 16) + 6 = 326 FLOPs
    in 4 s, of 163 a second that the ranks could do."""
    groups = [rewarded([0, 1]), group([sample(response_len=0)])]
    flops = lambda lengths, labels: 10 * sum(n * n for n in lengths) + labels  # noqa: E731
    out = speed_metrics(groups, rollout_s=2.0, train_s=4.0, flops=flops, peak=163.0)
    assert out["perf/mfu"] == 0.5


def test_speeds_by_hand():
    """Two samples of 2 prompt and 3 response tokens: 6 sampled in 2 s, 8 inputs trained in 4 s."""
    assert speed_metrics([rewarded([0, 1])], rollout_s=2.0, train_s=4.0) == {
        "perf/tokens_per_s_rollout": 3.0,
        "perf/tokens_per_s_train": 2.0,
    }


@settings(deadline=None)
@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, data):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    want = sum(any(i < correct for i in s) for s in subsets) / len(subsets)
    assert pass_at_k(n=n, correct=correct, k=k) == pytest.approx(want)


def test_eval_figures():
    """pass@j of c right among n: with one right of two, one answer drawn is right half of the time."""
    groups = [rewarded([1, 0]), rewarded([0, 0]), rewarded([1, 1]), rewarded([0, 1])]
    assert eval_metrics(groups, name="gsm8k", k=2) == {
        "eval/gsm8k/avg@2": 0.5,
        "eval/gsm8k/pass@1": 0.5,
        "eval/gsm8k/pass@2": 0.75,
    }
    assert eval_metrics([rewarded([1]), rewarded([0])], name="x", k=1) == {"eval/x/avg@1": 0.5}
    of_six = eval_metrics([rewarded([1, 0, 0, 0, 0, 0.5])], name="x", k=6)
    assert of_six == pytest.approx(
        {"eval/x/avg@6": 0.25, **{f"eval/x/pass@{j}": j / 6 for j in (1, 2, 4, 6)}}  # j of 6 hold the one that is right
    )
    with refuses(ValueError, "pass@3", 2):
        pass_at_k(n=2, correct=1, k=3)
    for bad in ([], [rewarded([1, 0, 1])]):
        with refuses(ValueError, 2, "x"):
            eval_metrics(bad, name="x", k=2)


def test_answers_without_a_score_are_not_wrong_answers():
    """A prompt counts with the answers that were scored; a figure that nothing tells is left out, not 0."""
    groups = [rewarded([1, None, 0, 1]), rewarded([None] * 4), rewarded([0, 0, 0, 1])]
    assert eval_metrics(groups, name="x", k=4) == pytest.approx(
        {
            "eval/x/avg@4": (2 / 3 + 1 / 4) / 2,
            "eval/x/pass@1": (2 / 3 + 1 / 4) / 2,
            "eval/x/pass@2": (1 + 1 / 2) / 2,
            "eval/x/pass@4": 1.0,  # of the last alone
        }
    )
    assert eval_metrics([rewarded([None, None])], name="x", k=2) == {}


def test_rollouts_are_readable(tmp_path):
    path = tmp_path / "rollouts" / "step_1.jsonl"
    s = dataclasses.replace(sample(text="24 £", reward=1.0, version=7), reward_parts={"format": 0.5})
    write_rollouts(path, [group([s, sample(index=1, response_len=0, reward=0.0)], answer="24")])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert "£" in path.read_text()
    assert first.pop("logprob_mean") == pytest.approx(-0.003)
    assert first.pop("logprobs") == pytest.approx([-0.002, -0.003, -0.004])  # of the tokens under loss
    assert first.pop("token_ids") == [0, 1, 2, 3, 4] and first.pop("loss_mask") == [0, 0, 1, 1, 1]
    assert first == {
        "prompt_id": "p",
        "index": 0,
        "prompt": "what?",
        "response": "24 £",
        "answer": "24",
        "reward": 1.0,
        "reward_parts": {"format": 0.5},
        "finish": "stop",
        "tokens": 3,
        "versions": [[7, 0, 3]],
    }
    assert second["logprob_mean"] is None and second["tokens"] == 0


def test_jsonl_is_strict_json_flushed_at_once_and_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"a": 1.5, "b": math.nan, "c": math.inf})
    row = json.loads(path.read_text(), parse_constant=pytest.fail)  # before close: a kill must not lose it
    assert row == {"step": 1, "a": 1.5, "b": None, "c": None, "nonfinite_count": 2}
    sink.close()
    again = JsonlSink(path)
    again.write(2, {"a": 2.0})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_tensorboard_reads_back_what_was_written(tmp_path):
    sink = TensorboardSink(tmp_path)
    sink.write(1, {"rollout/reward/mean": 0.25})
    sink.write(2, {"rollout/reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_shows_no_point_of_a_resumed_run_twice(tmp_path: Path) -> None:
    """Killed before its first checkpoint it starts again from step 0; killed after step 3, from the checkpoint of 1."""
    for run, (first, steps) in enumerate(((0, (0, 1, 2)), (0, (0, 1, 2, 3)), (1, (2, 3, 4)))):
        sink = TensorboardSink(tmp_path, first=first)
        for step in steps:
            sink.write(step, {"train/loss": float(run)})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2)]


def test_multi_sink_reaches_all(tmp_path):
    sink = MultiSink([JsonlSink(tmp_path / "a"), JsonlSink(tmp_path / "b")])
    sink.write(1, {"x": 1.0})
    sink.close()
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() != ""


def test_which_way_is_better():
    assert [better(k) for k in ("rollout/reward/mean", "eval/x/avg@1", "mismatch/ess")] == [1, 1, 1]
    assert [better(k) for k in ("mismatch/kl", "perf/train_s", "routing/bytes")] == [-1, -1, -1]
    assert [better(k) for k in ("train/entropy", "rollout/len/mean", "rollout/reward/std")] == [0, 0, 0]
    assert [better(k) for k in ("mismatch/k1", "mismatch/chi2_sequence", "mismatch/ess_sequence")] == [0, 0, 1]

"""The evaluations of a run: what is kept of them, and what the next one is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.alerts.rows import best_steps
from miles_like.report.metrics import brief
from miles_like.report.paired.history import EvalHistory
from miles_like.report.paired.scores import eval_file, evaluated, read_answers, scores_of, write_answers
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses


def lines(rewards: list[float | None], *, name: str = "heldout", mode: str = "greedy") -> list[dict[str, object]]:
    """Of one answer to each problem."""
    groups = [group([sample(f"p{i}", reward=r, text=f"<{i}>")]) for i, r in enumerate(rewards)]
    return [{"set": name, "mode": mode, **brief(g, g.samples[0])} for g in groups]


def test_an_evaluation_is_compared_with_the_best_before_it(tmp_path: Path) -> None:
    history = EvalHistory(tmp_path)
    assert history.add(0, lines([1, 0, 0, 0])) == {}
    assert history.add(2, lines([1, 1, 1, 0]))["eval/heldout/regression"] < 0
    fallen = history.add(4, lines([0, 0, 1, 0]))["eval/heldout/regression"]
    assert fallen > 0 and history.best["heldout"][0] == 2
    again = history.add(6, lines([0, 0, 1, 0]))["eval/heldout/regression"]
    assert again == fallen


def test_a_resumed_run_compares_with_what_the_run_before_it_would(tmp_path: Path) -> None:
    whole = EvalHistory(tmp_path)
    rows = []
    for step, rewards in enumerate(([0, 0, 1, 0], [1, 0, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1])):
        whole.add(step, lines(list(map(float, rewards))))
        rows.append({"step": float(step), "eval/heldout/avg@1": sum(rewards) / 4})
    resumed = EvalHistory(tmp_path, rows=rows)
    assert resumed.best == whole.best and best_steps(rows) == {"heldout": 1}
    later = lines([0, 1, 0, 0])
    assert resumed.add(9, later) == whole.add(9, later)


def test_sampled_answers_are_compared_where_there_are_some_and_unscored_ones_count_in_none(tmp_path: Path) -> None:
    both = lines([0.0, 0.0]) + lines([1.0, None], mode="sampled") + lines([0.0, 1.0], mode="sampled")
    assert scores_of(both) == {"heldout": {"p0": 0.5, "p1": 1.0}}
    write_answers(tmp_path / "a.jsonl", both)
    assert list(read_answers(tmp_path / "a.jsonl")) == both


def test_a_stale_process_writes_no_evaluation(tmp_path: Path) -> None:
    class Stale:
        epoch = 1

        def check(self) -> None:
            raise RuntimeError("stale")

    with pytest.raises(RuntimeError, match="stale"):
        EvalHistory(tmp_path, Stale()).add(0, lines([1.0]))
    assert not (tmp_path / "evals").exists()


def test_a_run_a_checkpoint_and_a_file_of_answers_name_an_evaluation(tmp_path: Path) -> None:
    for step, right in ((0, 0.0), (20, 1.0), (100, 0.5)):
        write_answers(eval_file(tmp_path, step), lines([right, right]))
    kept = tmp_path / "checkpoints" / "step_20"
    kept.mkdir(parents=True)
    for path, step in ((tmp_path, 100), (kept, 20), (eval_file(tmp_path, 0), 0)):
        assert evaluated(path).path == eval_file(tmp_path, step)
    assert evaluated(kept).scores["heldout"]["p1"] == 1.0
    (missing := tmp_path / "checkpoints" / "step_40").mkdir()
    with refuses(ValueError, "step_40.jsonl does not exist", "eval.every", "--answers"):
        evaluated(missing)
    with refuses(ValueError, "has no evals/step_N.jsonl"):
        evaluated(kept.parent)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with refuses(ValueError, "line 1 is no answer of an evaluation"):
        evaluated(tmp_path / "metrics.jsonl")

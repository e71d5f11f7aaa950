"""The console of a run: the line of a step, the time that is left, the progress of a rollout, the summary.

Why it must hold: the console is what is looked at while a run costs money. Not covered: how it looks on a terminal.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from miles_like.commands import output
from miles_like.report.console import (
    HEADLINES,
    ConsoleSink,
    duration,
    headline_keys,
    remaining_s,
    step_line,
    summary_table,
)
from miles_like.report.progress import LINE_S, PhaseBar

FIGURES = {
    "rollout/reward/mean": 0.25,
    "rollout/accuracy": 0.125,
    "rollout/len/mean": 4.25,
    "rollout/truncated_frac": 0.31,
    "train/entropy": 0.5,
    "train/loss": 0.125,
    "train/grad_norm": 1.5,
    "eval/tiny/avg@1": 0.5,
    "eval/tiny/unscored_frac": 0.0,
    "mismatch/kl": 1e-6,
    "mismatch/logprob_abs_diff_max": 1e-3,
    "perf/tokens_per_s_rollout": 12345.0,
    "perf/tokens_per_s_train": 678.0,
    "perf/rollout_s": 1.0,
    "perf/train_s": 2.0,
    "perf/publish_s": 0.5,
    "perf/step_s": 4.0,
    "wall_s": 10.0,
}


def printed(sink_of: list[tuple[int, dict[str, float]]], width: int = 80, **options: object) -> list[str]:
    out = io.StringIO()
    sink = ConsoleSink(steps=20, console=Console(file=out, width=width, highlight=False), **options)
    for step, row in sink_of:
        sink.write(step, row)
    sink.close()
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def test_a_step_is_one_line_and_the_end_a_table() -> None:
    lines = printed([(0, {"eval/tiny/avg@1": 0.3}), (1, FIGURES)])
    assert lines[0] == "step  0/20  tiny/avg@1 0.300"
    assert lines[1] == (
        "step  1/20 00:10<01:16  reward 0.250  accuracy 0.125  length 4.2  truncated 31%  entropy 0.500  "
        "grad norm 1.5  tiny/avg@1 0.500"
    )
    (row,) = [line for line in lines[2:] if "eval/tiny/avg@1" in line]
    assert [c.strip() for c in row.split("│")[2:5]] == ["0.3", "0.5", "0.5"]


def test_mismatch_and_speed_are_printed_on_request() -> None:
    line = "".join(step_line([{"step": 1.0, **FIGURES}], steps=20, verbose=True))
    assert line.endswith(
        "mismatch kl 1.0e-06 max 1.0e-03  tok/s rollout 12.3k train 678  s rollout 1.00 train 2.00 publish 0.50"
    )


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, False), ({"verbose": True}, True), ({"log_level": "debug"}, True), ({"log_level": "error"}, False)],
)
def test_the_options_that_ask_for_it(options: dict[str, object], shown: bool) -> None:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        output.set_output(**{"quiet": False, "log_level": "warning", **options})
        assert any("mismatch" in line for line in printed([(1, FIGURES)])[:1]) == shown
    finally:
        output.set_output(quiet=False, log_level="warning")
        root.setLevel(level)
        root.handlers[:] = handlers


def test_a_run_without_rewards_shows_its_loss() -> None:
    (_, line) = step_line([{"step": 1.0, "train/loss": 1.25, "train/grad_norm": 2.0}], steps=2, verbose=False)
    assert line == "  loss 1.2500  grad norm 2"


def test_the_summary_has_ten_lines_of_all_sets_and_the_number_of_trained_steps() -> None:
    rows = [{"step": float(i), **FIGURES, "rollout/zero_std_group_frac": 0.5, "train/kl_ref": 0.1} for i in range(101)]
    many = {f"eval/{name}/{key}": 0.5 for name in "ab" for key in ("greedy", "avg@4", "pass@1", "pass@2", "pass@4")}
    keys = headline_keys([{**row, **many} for row in rows])
    assert len(keys) == HEADLINES and "train/loss" not in keys
    assert [k for k in keys if k.startswith("eval/")] == ["eval/tiny/avg@1", "eval/a/greedy", "eval/b/greedy"]
    lines = printed([(i, row) for i, row in enumerate(rows)])
    assert [line.strip() for line in lines if line.strip().endswith(" steps")] == ["100 steps"]


def test_the_whole_summary_has_every_metric_and_no_control_character() -> None:
    rows = [{"step": 1.0, **FIGURES, "\x1b[31mred": 1.0, "[bold]": 2.0}]
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(rows, whole=True))
    shown = out.getvalue()
    assert all(f" {key} " in shown for key in (*FIGURES, "[bold]")) and "\x1b" not in shown and "│ step " not in shown
    assert shown.splitlines()[0].strip() == "1 step"


def test_a_resumed_run_counts_its_steps_and_seconds_from_the_beginning() -> None:
    earlier = [{"step": float(i), "wall_s": 2.0 * i, "rollout/reward/mean": 0.1 * i} for i in range(5)]
    lines = printed([(5, {"wall_s": 10.0, "rollout/reward/mean": 0.9})], rows=earlier, run_dir=Path("runs/a"))
    assert lines[0] == "step  5/20 00:10<00:30  reward 0.900"
    assert "5 steps" in [line.strip() for line in lines] and lines[-1].endswith("miles-like report runs/a --all")
    (row,) = [line for line in lines if "rollout/reward/mean" in line]
    assert [c.strip() for c in row.split("│")[2:5]] == ["0", "0.9", "0.9"]


def test_remaining_time_follows_the_last_twenty_steps() -> None:
    rows = [{"step": 0.0}, {"step": 1.0, "wall_s": 100.0, "perf/step_s": 7.0}]
    assert remaining_s(rows[:1], steps=10) is None
    assert remaining_s(rows, steps=11) == 70.0  # what came before the first step does not count
    rows += [{"step": 1.0 + i, "wall_s": 100.0 + 9 * i} for i in range(1, 20)]
    rows += [{"step": 20.0 + i, "wall_s": 271.0 + 3 * i} for i in range(1, 21)]
    assert remaining_s(rows, steps=50) == pytest.approx(30.0)


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 130, 3725, 90061)] == [
        "00:00",
        "01:00",
        "02:10",
        "1:02:05",
        "1 d 01:01:01",
    ]


def test_a_long_rollout_prints_its_progress_once_a_minute() -> None:
    now = [0.0]
    out = io.StringIO()
    with PhaseBar(100, Console(file=out, width=40), clock=lambda: now[0]) as bar:
        bar.phase(2, "rollout")
        for second, complete in ((1, 0), (LINE_S, 130), (LINE_S + 1, 131), (2 * LINE_S, 300)):
            now[0] = second
            bar.groups(complete, 256)
        bar.phase(2, "train")
        now[0] += LINE_S - 1
        bar.groups(1, 256)
    assert out.getvalue().splitlines() == ["step   3/100 rollout 130/256 groups", "step   3/100 rollout 256/256 groups"]


def test_a_table_in_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At rich's 80 columns for a file, cells break within words and no program can read the lines."""
    from rich.table import Table

    monkeypatch.setenv("COLUMNS", "80")
    table = Table("name", "value")
    table.add_row("n" * 60, "8 B a token " * 20)
    output.console().print(table)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_warning_is_printed_once_with_its_link() -> None:
    cut = {"rollout/reward/mean": 0.0, "rollout/truncated_frac": 1.0}
    lines = printed([(i, cut) for i in range(1, 20)])
    assert [line for line in lines if "warning" in line] == [
        "            warning: step 5: 100% of the samples of the last 5 steps are truncated at rollout.max_new_tokens "
        "(see docs/troubleshooting.md#truncated-answers)"
    ]

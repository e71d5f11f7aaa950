"""A run in a terminal: what is due, the main figures, what is late, without control characters of a run's texts.

Not covered: how often rich redraws.
"""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from miles_like.cli import app
from miles_like.page.live_run import LiveRun
from miles_like.page.top import trend, view
from tests.support.cli_runner import CliRunner
from tests.support.page_data import write_rows


def shown(run_dir: Path, steps: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view(LiveRun(run_dir), steps))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(n: int) -> list[tuple[int, dict[str, float]]]:
    return [(s, {"rollout/reward/mean": s / 100, "wall_s": 2.0 * s, "perf/step_s": 2.0}) for s in range(1, n + 1)]


def test_a_pipe_gets_the_run_once(tmp_path: Path) -> None:
    write_rows(tmp_path, rows(60))
    (tmp_path / "config.toml").write_text("[train]\nsteps = 100\n")
    done = CliRunner().invoke(app, ["top", str(tmp_path), "--once"])
    assert done.exit_code == 0 and "step 60/100  02:00<01:20" in done.output and "\x1b" not in done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("rollout/reward/mean")]
    assert line.split()[1:3] == ["0.6", "0.505"] and line.split()[3].startswith("▁") and line.rstrip().endswith("█")
    assert len(line.split()[3]) == 40
    done = CliRunner().invoke(app, ["top", str(tmp_path / "none")])
    assert done.exit_code == 2 and "none is not a directory" in done.stderr


def test_a_late_run_is_marked_and_a_finished_one_is_not(tmp_path: Path) -> None:
    write_rows(tmp_path, rows(3))
    os.utime(tmp_path / "metrics.jsonl", times=(time.time() - 3600,) * 2)
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    for steps, late in ((10, True), (3, False)):
        out.print(view(LiveRun(tmp_path), steps))
        assert isinstance(out.file, io.StringIO)
        assert ("\x1b[1;31mlast row 1:00:00 ago" in out.file.getvalue()) == late
        out.file.truncate(0)


def test_alerts_are_shown_and_control_characters_are_not(tmp_path: Path) -> None:
    run = tmp_path / "a\x1b[2Jb"
    write_rows(run, [(step, {"mismatch/kl": kl}) for step, kl in enumerate((0.1, 0.1, 0.1, 1.0, 0.1, 9.0), 1)])
    text = shown(run)
    assert "\x1b" not in text and "a?[2Jb" in text
    assert "alert    step 6: kl_spike: 9, threshold 5; log\n" in text.replace(" \n", "\n")
    assert "alert    step 4: kl_spike: 10, threshold 5; log; over at step 5" in text
    (run / "config.toml").write_text('"\\u001b]0;x\\u0007" = [')
    text = shown(run)
    assert "\x1b" not in text and "\x07" not in text and "cannot be read" in text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    assert "no step yet" in shown(tmp_path)


@pytest.mark.parametrize(("values", "blocks"), [([1.0], "▄"), ([2.0, 2.0], "▄▄"), ([0.0, 0.5, 1.0], "▁▅█")])
def test_a_trend_is_between_its_lowest_and_its_highest(values: list[float], blocks: str) -> None:
    assert trend(values) == blocks

"""Rows of metrics as they are read back, from a run that was killed or resumed, and runs side by side.

What the page has of them: tests/miles_like/page.
"""

from __future__ import annotations

import json

from miles_like.page.write import write_report
from miles_like.report.rows import read_metrics
from tests.support.page_data import write_rows as write
from tests.support.refusals import refuses


def test_a_resumed_run_takes_the_later_value(tmp_path):
    write(tmp_path, [(0, {"a": 0.0}), (1, {"a": 1.0}), (2, {"a": 2.0, "b": 5.0}), (2, {"a": 3.0}), (1, {"a": 9.0})])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 0, "a": 0}, {"step": 1, "a": 9}, {"step": 2, "a": 3, "b": 5}]


def test_a_line_cut_by_a_kill_is_left_out_and_other_damage_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"step": 1, "a": 1.0}) + "\n"
    path.write_text(whole + '{"step": 2, "a')
    assert [r["step"] for r in read_metrics(path)] == [1]
    path.write_text('{"step": 0, "a\n' + whole)
    with refuses(ValueError, "metrics.jsonl", 1):
        read_metrics(path)
    path.write_text(whole + '{"a": 1}\n')
    with refuses(ValueError, 2, "metrics.jsonl"):
        read_metrics(path)


def test_nothing_to_report_is_one_clear_error(tmp_path):
    with refuses(ValueError, "metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with refuses(ValueError, "metrics.jsonl"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()

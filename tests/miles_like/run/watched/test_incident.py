"""`incidents/N.md`: one page for each incident, which says what fell and shows the answers, whatever they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miles_like.alerts.machine import Event
from miles_like.report.paired.scores import eval_file, write_answers
from miles_like.run.watched.incident import write_incident

HOSTILE = "```\n# Incident 9: forged\n<script>alert(1)</script>\n`````"
ROWS = [{"step": float(i), "eval/x/avg@1": 1 - i / 10, "train/entropy": 1.0, "perf/other": 1.0} for i in range(8)]


def event(step: int = 6, alert: str = "eval_regression") -> Event:
    return Event(kind="fired", alert=alert, step=step, since=5, reading=4.0, threshold=3.0, action="rollback")


def answers(run_dir: Path, step: int, rewards: list[float], response: str = "r") -> None:
    lines: list[dict[str, Any]] = [
        {"set": "x", "mode": "greedy", "prompt_id": f"p{i}", "prompt": f"<{i}>", "answer": str(i), "response": response}
        | {"reward": r}
        for i, r in enumerate(rewards)
    ]
    write_answers(eval_file(run_dir, step), lines)


def test_the_page_has_what_fell_since_when_what_was_done_and_the_answers_that_lost_most(tmp_path: Path) -> None:
    answers(tmp_path, 2, [1.0, 1.0, 0.5, 0.0])
    answers(tmp_path, 6, [0.9, 0.0, 0.5, 0.0])
    path = write_incident(tmp_path, event(), ROWS, best=2, done="it went back")
    page = path.read_text()
    assert path == tmp_path / "incidents" / "1.md"
    assert "since step 5" in page and "It went back." in page and "best checkpoint: step 2" in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert table[0] == "| metric | step 2 | step 5 | step 6 |" and "| `eval/x/avg@1` | 0.8 | 0.5 | 0.4 |" in table
    shown = re.findall(r"### x, (p\d): (\S+), then (\S+)", page)
    assert shown[:2] == [("p1", "1", "0"), ("p0", "1", "0.9")]
    assert page.index("Response, step 2, reward 1.0") < page.index("Response, step 6, reward 0.0")


def test_texts_that_hold_anything_stay_within_their_blocks(tmp_path: Path) -> None:
    """Read as CommonMark does: a block ends with a fence as long as the one that began it."""
    for step in (2, 6):
        answers(tmp_path, step, [1.0 - step / 10], HOSTILE)
    page = write_incident(tmp_path, event(), ROWS, best=2, done="x").read_text()
    outside, fence = [], None
    for line in page.splitlines():
        if fence is None and (found := re.match(r"(`{3,})text$", line)):
            fence = found[1]
        elif fence is not None and re.fullmatch(rf"`{{{len(fence)},}}", line):
            fence = None
        elif fence is None:
            outside.append(line)
    assert fence is None and "<script>" in page
    assert not [line for line in outside if "script" in line or "forged" in line]


def test_without_evaluations_samples_of_training_are_shown(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in (2, 6):
        rows = [f'{{"prompt": "q", "answer": "a", "response": "s{step} {r}", "reward": {r}}}' for r in (0.1, 0.9)]
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text("\n".join(rows) + "\n")
    page = write_incident(tmp_path, event(), ROWS, best=2, done="x").read_text()
    assert page.index("s2 0.9") < page.index("s2 0.1") < page.index("s6 0.1") < page.index("s6 0.9")
    bare = write_incident(tmp_path, event(7), ROWS, best=None, done="x").read_text()
    assert "best checkpoint: none yet" in bare and "compared by step 4" in bare and "no samples of step 7" in bare


def test_each_incident_has_a_number_and_one_that_comes_again_keeps_it(tmp_path: Path) -> None:
    first = write_incident(tmp_path, event(), ROWS, best=2, done="killed before it was done")
    other = write_incident(tmp_path, event(7), ROWS, best=2, done="x")
    again = write_incident(tmp_path, event(), ROWS, best=2, done="done now")
    assert (first.name, other.name, again.name) == ("1.md", "2.md", "1.md") and "Done now." in first.read_text()


def test_a_stale_process_writes_none(tmp_path: Path) -> None:
    class Stale:
        epoch = 1

        def check(self) -> None:
            raise RuntimeError("stale")

    with pytest.raises(RuntimeError, match="stale"):
        write_incident(tmp_path, event(), ROWS, best=2, done="x", fence=Stale())
    assert not (tmp_path / "incidents").exists()

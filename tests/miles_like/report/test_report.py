"""The report of a run directory, whole or in pieces.

It is read after a run that may have been killed or measured little, so it must stand what is missing and refuse what is
damaged. Not covered: how the plots look; that is for eyes.
"""

from __future__ import annotations

import base64
import json
import math
import re

import pytest

from miles_like.checkpoint.ledger import Ledger
from miles_like.cli import app
from miles_like.report.html import read_metrics, write_report
from miles_like.report.metrics import write_rollouts
from miles_like.report.sinks import JsonlSink
from tests.support.cli_runner import CliRunner
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

FULL = {
    "rollout/reward/mean": 0.5,
    "eval/tiny/avg@1": 0.25,
    "eval/tiny/loss": 0.75,
    "train/entropy": 1.0,
    "mismatch/logprob_abs_diff": 1e-4,
    "mismatch/logprob_abs_diff_max": 1e-2,
    "mismatch/kl": 0.0,
    "routing/agreement": 0.98,
    "routing/replay_coverage": 1.0,
    "perf/rollout_s": 1.0,
    "perf/train_s": 2.0,
    "perf/publish_s": 0.1,
    "perf/step_s": 3.5,
}


def write(folder, rows) -> None:
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, row in rows:
        sink.write(step, row)
    sink.close()


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    write(tmp_path, [(0, {"eval/tiny/avg@1": 0.125}), *((s, FULL | {"tokens_total": 1e4 * s}) for s in range(1, 40))])
    (tmp_path / "config.toml").write_text("seed = 0 # <b>")
    for step in (1, 9, 39):
        samples = [sample(index=i, text=f"<{step}>", reward=float(i)) for i in range(2)]
        write_rollouts(tmp_path / "rollouts" / f"step_{step}.jsonl", [group(samples)])
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--all"])
    assert done.exit_code == 0 and all(f" {key} " in done.output for key in (*FULL, "tokens_total"))
    page = (tmp_path / "report.html").read_text()
    names = ["reward", "accuracy", "loss", "entropy", "mismatch", "routing", "time"]
    assert plots(page) == names
    for name in names:
        data = (tmp_path / "plots" / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and base64.b64encode(data).decode() in page, "a page that is mailed has them"
    assert "39 optimizer steps · 390,000 response tokens" in page
    assert (
        '<code>eval/tiny/avg@1</code></td><td class="n">0.125</td><td class="n">0.25</td><td class="n">0.25</td>'
        in page
    )
    assert re.findall(r"Samples at step (\d+)", page) == ["1", "39"]
    assert "&lt;1&gt;" in page and "&lt;39&gt;" in page and "&lt;9&gt;" not in page
    assert "seed = 0 # &lt;b&gt;" in page and "<b>" not in page
    assert not re.search(r'http|src="(?!data:)|href=', re.sub(r'base64,[^"]*', "", page)), "something is fetched"
    assert re.findall(r"<summary>(\w+) \((\d+)\)", page) == [
        *(("eval", "2"), ("rollout", "1"), ("train", "1"), ("mismatch", "3"), ("routing", "2"), ("perf", "4")),
        ("tokens_total", "1"),
    ]


def plots(page):
    return re.findall(r'<img id="plot-(\w+)"', page)


def test_samples_of_high_and_low_rewards_are_shown(tmp_path):
    """Of many prompts; those without a score, which count as lowest, too."""
    write(tmp_path, [(1, {"a": 49612.4}), (2, {"a": 1e-9})])
    rewards = [*(i / 20 for i in range(18)), None, 0.3]
    groups = [group([sample(f"p{i}", text=f"t{i}", reward=r), sample(f"p{i}", 1)]) for i, r in enumerate(rewards)]
    write_rollouts(tmp_path / "rollouts" / "step_1.jsonl", groups)
    write_rollouts(tmp_path / "rollouts" / "step_2.jsonl", groups[:3])
    page = write_report(tmp_path).read_text()
    first, _, last = page.partition("<h2>Samples at step 2</h2>")
    assert re.findall(r"<code>t(\d+)</code>", first) == ["17", "16", "15", "14", "2", "1", "0", "18"]
    assert "20 prompts, the 4 of highest and the 4 of lowest reward" in first and "each of 3 prompts.<" in last
    assert re.findall(r"<code>t(\d+)</code>", last) == ["2", "1", "0"]
    assert '<td class="n">49,612</td><td class="n">1e-09</td>' in page


def kept_ledger(folder):
    """A row a step, as the loop writes them."""
    ledger, rows = Ledger(folder / "ledger.jsonl"), []
    for ticket in range(6):
        ledger.issue(ticket, "p", 2)
    for step in (1, 2):
        samples = [sample(index=i) for i in range(2)]
        ledger.train(step, 2 * step, group(samples))
        ledger.discard(2 * step - 1, "too <old>")
        ledger.flush(step)
        rows.append((step, ledger.metrics()))
    ledger.close()
    return rows


def test_the_ledger_of_a_run(tmp_path):
    write(tmp_path, kept_ledger(tmp_path))
    page = write_report(tmp_path).read_text()
    assert plots(page) == ["ledger"]
    assert "Every sample issued was trained once, discarded once, or is in flight." in page
    cells = re.findall(r'<tr><td>([^<]*)</td><td class="n">(\d+)</td><td class="n">([\d.]+%)', page)
    names = ("issued", "trained", "in flight", "discarded: too &lt;old&gt;")
    assert cells == list(zip(names, ["12", "4", "4", "4"], ["100.0%", "33.3%", "33.3%", "33.3%"], strict=True))
    path = tmp_path / "ledger.jsonl"
    path.write_text(path.read_text().replace('"ticket":4', '"ticket":2'))
    page = write_report(tmp_path).read_text()
    assert "line 5: group 2 is closed a second time" in page and "Nothing after it is counted here" in page
    assert "until step 1" in page
    path.write_text(path.read_text()[:-9].replace('"ticket":2', '"ticket":4').replace('"ticket":4', '"ticket":2', 1))
    assert "3 lines after the last complete step are of an unfinished step" in write_report(tmp_path).read_text()


def test_a_ledger_without_discarded_samples_is_a_sentence(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issue(0, "p", 2)
    ledger.train(1, 0, group([sample(index=i) for i in range(2)]))
    ledger.flush(1)
    write(tmp_path, [(1, ledger.metrics())])
    ledger.close()
    page = write_report(tmp_path).read_text()
    assert "none was discarded" in page and "<h2>Ledger" not in page and plots(page) == []


def test_missing_keys_are_skipped(tmp_path):
    write(tmp_path, [(1, {"train/entropy": 1.0, "rollout/reward/mean": math.nan}), (2, {"train/entropy": 0.5})])
    page = write_report(tmp_path).read_text()
    assert plots(page) == ["entropy"]
    assert "Samples" not in page and "Configuration" not in page and "Ledger" not in page


@pytest.mark.parametrize("value", [0.0, 1e-9])
def test_one_step_and_exact_zeros_draw(tmp_path, value):
    """The plot of the mismatch has a logarithmic axis; with exact zeros every other plot has one step too."""
    row = {k: value for k in FULL if k.startswith("mismatch/")}
    write(tmp_path, [(1, row if value else FULL | row)])
    write_report(tmp_path)
    assert (tmp_path / "plots" / "mismatch.png").exists()
    assert len(list((tmp_path / "plots").iterdir())) == (1 if value else 7)


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

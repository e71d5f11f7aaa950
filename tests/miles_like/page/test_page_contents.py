"""The page of a run directory, whole or in pieces: what it has of each file.

It is written after a run that may have been killed or measured little, so it must stand what is missing and refuse what
is damaged. That a browser draws it: test_browser.py. Not covered: how it looks.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from miles_like.checkpoint.ledger import Ledger
from miles_like.cli import app
from miles_like.page import samples as page_samples
from miles_like.page.panels import TABS
from miles_like.page.samples import TEXT, chosen_files, histograms
from miles_like.page.write import page_text, plotly_script, write_page, write_report
from miles_like.report.metrics import write_rollouts
from miles_like.types import Finish
from tests.support.cli_runner import CliRunner
from tests.support.made_samples import group, sample
from tests.support.page_data import page_data, write_rows
from tests.support.pages import ROOT, is_key
from tests.support.refusals import refuses

HOSTILE = '</script><img src=x onerror=alert(1)><!--\u2028"'


def data_of(run_dir: Path) -> dict[str, Any]:
    return page_data(write_report(run_dir).read_text())


class Elements(HTMLParser):
    """Elements of a page, and what their attributes would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "poster", "data")]


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    """Texts of a run stay inside the JSON of the page, whatever they are."""
    write_rows(tmp_path, [(1, {f"eval/{HOSTILE}/avg@1": 0.5, "rollout/reward/mean": 0.25})])
    (tmp_path / "config.toml").write_text(f"# {HOSTILE}\n[train]\nsteps = 7\n")
    write_rollouts(tmp_path / "rollouts" / "step_1.jsonl", [group([sample(text=HOSTILE, reward=1.0)])])
    page = write_report(tmp_path).read_text()
    elements = Elements()
    elements.feed(page)
    assert elements.links == ["data:,"] and elements.tags.count("script") == 4 and "img" not in elements.tags
    own = page.replace(plotly_script(), "")
    assert len(own) < len(page) and "<!--" not in own
    assert "default-src &#39;none&#39;" in own and "connect-src &#39;none&#39;" in own
    found = page_data(page)
    assert found["samples"][0]["samples"][0]["response"] == HOSTILE and found["runs"][0]["steps"] == 7
    assert f"eval/{HOSTILE}/avg@1" in found["runs"][0]["curves"]


def test_the_page_s_scripts_make_no_html_of_texts() -> None:
    folder = ROOT / "miles_like" / "page" / "files"
    text = "".join(path.read_text() for path in folder.glob("*.js"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function", text
    )
    assert text.count("JSON.parse(") == 1 and "createElement" in text


def test_samples_have_turns_and_values_of_their_tokens(tmp_path: Path) -> None:
    """A stretch that the policy did not sample, after its first one, is an environment's."""
    row = {
        "prompt_id": "p",
        "index": 3,
        "prompt": "2+2",
        "response": "4",
        "answer": "4",
        "reward": 0.5,
        "reward_parts": {"right": 1.0},
        "finish": "stop",
        "tokens": 3,
        "logprob_mean": -0.5,
        "versions": [[6, 0, 2], [8, 2, 3]],
        "token_ids": [0, 1, 2, 1, 0, 2],
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "logprobs": [-0.5, -1.0, -0.25],
        "trainer_logprobs": [-0.75, -1.0, -0.125],
        "advantages": 0.5,
        "routing_agreement": 0.875,
        "spans": [
            {"who": "policy", "start": 2, "end": 4, "what": "turn", "reward": 0.25, "seconds": 1.5},
            {"who": "policy", "start": 2, "end": 3, "what": "tool_call", "name": "add", "status": "ok"},
            {"who": "environment", "start": 4, "end": 5, "what": "turn", "reward": None, "seconds": 0.0},
            {"who": "policy", "start": "5", "what": "turn", "reward": 1},
            "span",
        ],
    }
    write_rows(tmp_path, [(9, {"a": 1.0})])
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_9.jsonl").write_text(json.dumps(row) + "\n")
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "<c>": 2}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (made,) = data_of(tmp_path)["samples"][0]["samples"]
    assert [turn["own"] for turn in made["turns"]] == [False, True, False, True]
    assert made["turns"][1] == {
        "own": True,
        "note": "reward 0.25, 1.5 s, tool call add ok",
        "ids": [2, 1],
        "words": ["<c>", "b"],
        "logprobs": [-0.5, -1],
        "gap": [-0.25, 0],
        "advantage": [0.5, 0.5],
        "age": [2, 2],
    }
    assert [bool(turn.get("note")) for turn in made["turns"]] == [False, True, False, False]
    assert made["turns"][3]["age"] == [0] and made["turns"][0] == {"own": False, "ids": [0, 1], "words": ["a", "b"]}
    of = data_of(tmp_path)["samples"][0]["ratios"]
    assert of["step"] == 9 and {b: n for b, n in zip(of["bins"], of["counts"], strict=True) if n} == {
        "0.5 to 0.8": 1,  # exp(-0.25)
        "0.99 to 1.01": 1,
        "1.1 to 1.25": 1,  # exp(0.125)
    }
    causes = {w["cause"]: w["figure"] for w in data_of(tmp_path)["samples"][0]["worst"]}
    assert causes == {
        "largest log-prob gap": 0.25,
        "routes that the trainer would not choose": 0.125,
        "least likely under the rollout": 0.5,
        "weight versions within a sample": 2,
    }
    (tmp_path / "tokenizer.json").write_text("{}")
    with refuses(ValueError, "tokenizer.json"):
        write_report(tmp_path)


def test_the_worst_samples_are_of_all_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the page has no room for most of them."""
    monkeypatch.setattr(page_samples, "SAMPLES", 12)
    made = [sample(f"p{i}", reward=1.0 - i / 50, text=f"t{i}") for i in range(100)]
    made[7] = sample("p7", reward=None, text="t7")
    made[8] = sample("p8", reward=1.0, finish=Finish.LENGTH, response_len=9, text="t8")
    write_rows(tmp_path, [(1, {"a": 1.0})])
    write_rollouts(tmp_path / "rollouts" / "step_1.jsonl", [group([one]) for one in made])
    (found,) = data_of(tmp_path)["samples"]
    assert len(found["samples"]) == max(12, len({w["sample"] for w in found["worst"]}))
    assert found["left_out"] == 100 - len(found["samples"]) and sum(found["rewards"]["counts"]["1"]) == 99
    worst = [(w["cause"], found["samples"][w["sample"]]["response"]) for w in found["worst"]]
    assert ("no score", "t7") in worst and ("truncated at the token limit", "t8") in worst
    low = [text for cause, text in worst if cause == "reward of 0 or less"]
    assert low == ["t99", "t98", "t97", "t96", "t95"]


def test_samples_are_of_the_first_the_last_and_some_steps_between(tmp_path: Path) -> None:
    for step in (*range(1, 400, 3), 400):
        (tmp_path / f"step_{step}.jsonl").touch()
    (tmp_path / "step_x.jsonl").touch()
    steps = [step for step, _ in chosen_files(tmp_path)]
    assert steps[0] == 1 and steps[-3:] == [394, 397, 400] and len(steps) == 8 and steps == sorted(steps)
    due = [step for step, _ in chosen_files(tmp_path, 50)]
    assert 250 in due and len(due) <= 8 and {1, 394, 397, 400} <= set(due), "the last of steps 100 and 250"


def test_long_texts_and_long_samples_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_samples, "TOKENS", 4)
    write_rows(tmp_path, [(1, {"a": 1.0})])
    write_rollouts(tmp_path / "rollouts" / "step_1.jsonl", [group([sample(text="x" * (TEXT + 5), response_len=9)])])
    (made,) = data_of(tmp_path)["samples"][0]["samples"]
    assert made["response"].startswith("x" * TEXT) and made["response"].endswith("… (5 characters more)")
    assert sum(len(turn["ids"]) for turn in made["turns"]) == 4 and made["turns"][-1]["more"] > 0


def test_rewards_of_two_values_have_two_bars() -> None:
    found = histograms({1: [0.0, 0.0, 1.0], 2: [0.5], 9: [1.0, 1.0]})
    assert found == {"centres": ["0", "1"], "counts": {"1": [2, 1], "9": [0, 2]}}
    many = histograms({1: [i / 100 for i in range(100)]})
    assert many is not None and len(many["centres"]) == 30 and sum(many["counts"]["1"]) == 100
    assert set(many["counts"]["1"]) <= {3, 4} and histograms({1: []}) is None


def kept_ledger(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """A row a step, as the loop writes them."""
    ledger, rows = Ledger(folder / "ledger.jsonl"), []
    for ticket in range(6):
        ledger.issue(ticket, "p", 2)
    for step in (1, 2):
        ledger.train(step, 2 * step, group([sample(index=i) for i in range(2)]))
        ledger.discard(2 * step - 1, "too <old>")
        ledger.flush(step)
        rows.append((step, dict(ledger.metrics())))
    ledger.close()
    return rows


def test_the_ledger_of_a_run(tmp_path: Path) -> None:
    write_rows(tmp_path, kept_ledger(tmp_path))
    run = data_of(tmp_path)["runs"][0]
    totals = {"step": 2, "groups": 6, "issued": 12, "trained": 4, "discarded": 4, "in_flight": 4}
    assert run["ledger"] == {"wrong": None, "unfinished": 0, "totals": totals, "reasons": [["too <old>", 4]]}
    assert run["curves"]["page/backlog"] == [[1, 2], [8, -4]] and run["curves"]["page/trained"] == [[1, 2], [2, 2]]
    path = tmp_path / "ledger.jsonl"
    path.write_text(path.read_text().replace('"ticket":4', '"ticket":2'))
    assert "line 5: group 2 is closed a second time" in data_of(tmp_path)["runs"][0]["ledger"]["wrong"]


SPIKES = [(step, {"mismatch/kl": kl}) for step, kl in enumerate((0.02, 0.02, 0.02, 0.1, 0.02, 0.02, 0.5), 1)]


def test_alerts_whose_rules_cannot_be_read_are_not_shown_and_a_warning_says_so(tmp_path: Path) -> None:
    write_rows(tmp_path, SPIKES)
    for text in ("[alerts.kl_spike]\nthreshold = -1", "[alerts", "alerts = 3"):
        (tmp_path / "config.toml").write_text(text)
        run = data_of(tmp_path)["runs"][0]
        assert run["alerts"] == [] and any("[alerts] of config.toml cannot be read" in text for text in run["warnings"])


def test_alerts_and_incidents_are_shown_the_last_first(tmp_path: Path) -> None:
    write_rows(tmp_path, [(1, {"a": 1.0})])
    run = data_of(tmp_path)["runs"][0]
    assert run["alerts"] == run["incidents"] == [] and not run["warnings"]
    write_rows(tmp_path, SPIKES)
    (tmp_path / "config.toml").write_text("[alerts.kl_spike]\nthreshold = 4.0\naction = 'notify'\n")
    (tmp_path / "incidents").mkdir()
    for n in (2, 10):
        (tmp_path / "incidents" / f"{n}.md").write_text(f"# incident {n}")
    run = data_of(tmp_path)["runs"][0]
    first = {"step": 4, "alert": "kl_spike", "value": 5, "threshold": 4, "action": "notify", "over": 5}
    assert run["alerts"] == [first | {"step": 7, "over": None}, first]
    assert [one["text"] for one in run["incidents"]] == ["# incident 10", "# incident 2"]


def test_evaluations_have_standard_errors_over_their_problems(tmp_path: Path) -> None:
    """The standard deviation of the problems' means, by n - 1, over sqrt(n): numpy's."""
    rewards = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.5]}
    rows = [
        {"set": "m", "mode": mode, "prompt_id": p, "index": i, "reward": r}
        for mode, n in (("sampled", 2), ("greedy", 1))
        for p, of in rewards.items()
        for i, r in enumerate(of[:n])
    ]
    write_rows(tmp_path, [(4, {"eval/m/avg@2": 0.5})])
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "step_4.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"set')
    errors = data_of(tmp_path)["runs"][0]["errors"]
    assert errors["eval/m/avg@2"]["4"] == pytest.approx(sem([0.5, 1.0, 0.25]), rel=1e-5)
    assert errors["eval/m/greedy"]["4"] == pytest.approx(sem([1.0, 1.0, 0.0]), rel=1e-5)


def sem(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def test_several_runs_are_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one name are numbered."""
    for name in ("a/run", "b/run", "c"):
        (tmp_path / name).mkdir(parents=True)
        write_rows(tmp_path / name, [(1, {"rollout/reward/mean": 0.25})])
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "a/run", "b/run"])
    assert done.exit_code == 0 and "-> runs.html" in done.output and "rollout/reward/mean" in done.output
    assert [run["name"] for run in page_data(Path("runs.html").read_text())["runs"]] == ["run (1)", "run (2)"]
    done = CliRunner().invoke(app, ["report", "c", "--all", "--out", "c.html"])
    assert done.exit_code == 0 and page_data(Path("c.html").read_text())["runs"][0]["name"] == "c"
    with refuses(ValueError, "no/where", "x.html"):
        write_page([Path("c")], Path("no/where/x.html"))


def test_a_run_that_has_little_has_little_to_show(tmp_path: Path) -> None:
    write_rows(
        tmp_path, [(1, {"train/entropy": 1.0, "rollout/reward/mean": float("nan")}), (2, {"train/entropy": 0.5})]
    )
    found = data_of(tmp_path)
    run, samples = found["runs"][0], found["samples"][0]
    assert run["curves"] == {"train/entropy": [[1, 2], [1, 0.5]], "nonfinite_count": [[1], [1]]}
    assert run["ledger"] is run["layers"] is run["config"] is run["steps"] is None
    assert samples == {"samples": [], "worst": [], "rewards": None, "ratios": None, "steps": [], "left_out": 0}
    assert run["figures"][0] == ["train/entropy", 1, 0.5, None, True]


def test_every_metric_of_a_panel_is_defined_and_every_key_that_turns_one_on_exists() -> None:
    """What the page asks a reader to set can be set."""
    defined = (ROOT / "docs" / "metrics.md").read_text()
    for panel in (panel for panels in TABS.values() for panel in panels):
        for name in panel.metrics:
            head = name.partition("*")[0]
            assert name.startswith("page/") or f"`{head}" in defined or panel.id in WRITTEN_ELSEWHERE, (panel.id, name)
        for key in re.findall(r"\b[a-z_]+\.[a-z_]+(?:\.[a-z_]+)*\b", panel.missing):
            assert is_key(key), (panel.id, key)


WRITTEN_ELSEWHERE = ("queues", "memory", "rewarding")


def test_a_page_of_a_server_may_ask_it(tmp_path: Path) -> None:
    write_rows(tmp_path, [(1, {"a": 1.0})])
    found = data_of(tmp_path)
    page = page_text(found["runs"], found["samples"], {"poll_s": 1})
    assert "connect-src &#39;self&#39;" in page and page_data(page)["live"] == {"poll_s": 1} and found["live"] is None

"""Alerts of a run: each fires on a fault that is planted into a run of at most 10 steps, and what it orders is done.

The runs are small and on plain processes (tests/support/local_run.py), all else is real. Two runs have all faults: one
whose rewards break, one that is resumed with other settings, which breaks the policy. Thresholds are those of such
runs: tests/miles_like/alerts/test_alerts.py has the silence of the defaults over recorded ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from miles_like.alerts.machine import events
from miles_like.config.load import load_config
from miles_like.config.sections.watched.alerts import AlertsConfig
from miles_like.report.rows import read_metrics
from miles_like.stopping import BY_ALERT
from tests.support.forked import tail
from tests.support.local_run import QUICK, TINY, Runs, untimed
from tests.support.planted import FROM, SLOW_AT

HERE = "tests/miles_like/run/watched/test_alerted_runs.py"

EVALUATED = ("eval.every=1", "eval.sets.other.path=" + str(TINY.parent / "tiny" / "heldout.jsonl"))
REWARDS = (  # of a run whose rewards break at version FROM, so in step FROM + 1
    *EVALUATED,
    "train.steps=7",
    "reward.name=tests.support.planted:breaking",
    "eval.sets.other.reward=tests.support.planted:falling",
    "alerts.reward_latency={threshold=4.0, window=1}",
    "alerts.stall={threshold=4.0, floor_s=1.0, window=5}",
    "alerts.dead_groups={window=2}",
    "alerts.reward_hacking={window=2, rise=1.0}",
)
POLICY = ("buffer.max_staleness=2", "train.steps_per_rollout=2", "algorithm.kl_coefficient=0.001")
BROKEN = (  # what the policy is resumed with
    "optimizer.lr=0.05",
    "mismatch.expert_agreement_min=0",
    "mismatch.layer_agreement_min=0",
    "rollout.temperature=0.02",
    "rollout.max_new_tokens=40",
)
POLICY_ALERTS = (
    "alerts.policy_lag={threshold=1.9, window=2}",
    "alerts.kl_spike={floor=1e-6}",
    "alerts.entropy_collapse={window=2, threshold=0.3}",
    "alerts.length_drift={window=2}",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("alerted")) as started:
        yield started


def alerts_of(settings: Sequence[str]) -> AlertsConfig:
    return load_config(TINY, [*QUICK, *settings]).alerts


def fired(run_dir: Path, settings: Sequence[str]) -> dict[str, int]:
    """Alert -> the step at which it first fired, as computed from the file; the driver printed each."""
    found = [e for e in events(read_metrics(run_dir / "metrics.jsonl"), alerts_of(settings)) if e.kind == "fired"]
    log = (run_dir / "driver.log").read_text()
    assert not [e for e in found if f"{e.alert} at step {e.step}" not in log]
    return {e.alert: e.step for e in reversed(found)}


def test_each_alert_about_rewards_fires_at_the_fault_and_changes_no_row(runs: Runs) -> None:
    where = runs.home / "rewards"
    assert runs.run(where, REWARDS) == 0, tail(where / "driver.log")
    found = fired(where, REWARDS)
    assert found["reward_latency"] == found["stall"] == SLOW_AT + 1
    assert found["dead_groups"] == FROM + 2
    assert found["eval_regression"] == FROM
    assert found["reward_hacking"] == FROM + 1, found


@pytest.mark.long(beside=HERE)
def test_each_alert_about_the_policy_fires_at_the_fault(runs: Runs) -> None:
    where, settings = runs.home / "policy", (*POLICY, *POLICY_ALERTS)
    assert runs.run(where, (*settings, "train.steps=5")) == 0, tail(where / "driver.log")
    assert set(fired(where, settings)) == {"policy_lag"}
    assert runs.run(where, (*settings, *BROKEN, "train.steps=10")) == 0, tail(where / "driver.log")
    found = fired(where, settings)
    assert {"policy_lag", "kl_spike", "entropy_collapse", "length_drift"} == set(found), found
    assert min(step for name, step in found.items() if name != "policy_lag") > 5


def test_an_alert_that_stops_a_run_saves_it_and_leaves_an_incident(runs: Runs) -> None:
    where = runs.home / "stopped"
    plainly = (*REWARDS, f"train.steps={FROM + 1}")
    settings = (*plainly, "alerts.eval_regression.action=stop")
    assert runs.run(where, settings) == BY_ALERT, tail(where / "driver.log")
    rows = read_metrics(where / "metrics.jsonl")
    assert rows[-1]["step"] == FROM and (where / "checkpoints" / f"step_{FROM}" / "run_state.json").exists()
    page = (where / "incidents" / "1.md").read_text()
    assert f"# Incident 1: eval_regression at step {FROM}" in page and "The run saves and ends." in page
    assert "| `eval/other/regression` |" in page and "Response, step" in page
    # the alert goes on, so that a resumed run ends as the same run without it does
    assert runs.run(where, settings) == 0, tail(where / "driver.log")
    plain = runs.home / "not-stopped"
    assert runs.run(plain, plainly) == 0, tail(plain / "driver.log")
    assert untimed(where / "metrics.jsonl") == untimed(plain / "metrics.jsonl")
    assert not (plain / "incidents").exists() and not (where / "incidents" / "2.md").exists()


@pytest.mark.long(beside=HERE)
def test_a_paused_run_goes_on_where_its_file_is_removed(runs: Runs) -> None:
    where = runs.home / "paused"
    flag, seen = where / "paused", list[str]()

    def release() -> None:
        end = time.monotonic() + 300
        while not flag.exists() and time.monotonic() < end:
            time.sleep(0.05)
        seen.append(flag.read_text())
        seen.append((where / "checkpoints" / "latest").read_text())
        flag.unlink()

    thread = threading.Thread(target=release)
    thread.start()
    assert runs.run(where, (*REWARDS, "alerts.eval_regression.action=pause")) == 0, tail(where / "driver.log")
    thread.join()
    assert "eval_regression" in seen[0] and seen[1].strip() == f"step_{FROM}"
    assert (where / "incidents" / "1.md").exists() and read_metrics(where / "metrics.jsonl")[-1]["step"] == 7

"""Alerts that could do nothing are refused when the configuration is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.config.sections.watched.alerts import AlertsConfig
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[5]
TINY = ROOT / "configs" / "tiny.toml"


def test_all_alerts_are_on_and_none_acts() -> None:
    rules = dict(AlertsConfig().rules())
    assert len(rules) == 9 and {rule.action for rule in rules.values()} == {"log"}
    assert load_config(TINY, []).alerts == AlertsConfig()


def test_going_back_needs_a_best_checkpoint() -> None:
    with refuses(ValueError, "alerts.stall.action = 'rollback'", "checkpoint.keep_best"):
        load_config(TINY, ["alerts.stall.action=rollback"])
    best = ("checkpoint.keep_best=eval/heldout/avg@1", "checkpoint.every=25")
    assert load_config(TINY, ["alerts.stall.action=rollback", *best]).alerts.stall.action == "rollback"


@pytest.mark.parametrize("name", ["eval_regression", "reward_hacking"])
def test_a_gate_needs_evaluations(name: str) -> None:
    with refuses(ValueError, f"alerts.{name}.action = 'stop'", "eval.every"):
        load_config(TINY, [f"alerts.{name}.action=stop", "eval.every=0"])
    load_config(TINY, [f"alerts.{name}.action=log", "eval.every=0"])


def test_a_run_without_rollout_has_no_alerts() -> None:
    with refuses(ValueError, "alerts.stall.action", "sft"):
        load_config(ROOT / "configs" / "tiny_sft.toml", ["alerts.stall.action=stop"])


@pytest.mark.parametrize("key", ["alerts.stall.threshold=0.5", "alerts.kl_spike.window=1", "alerts.stall.clear=0"])
def test_values_without_meaning_are_refused(key: str) -> None:
    name, _, value = key.partition("=")
    with refuses(ValueError, name, value):
        load_config(TINY, [key])

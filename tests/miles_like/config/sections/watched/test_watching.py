"""Settings of trackers and traces that contradict each other, or would write a password into the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.preflight.observers import check_packages
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[5] / "configs" / "tiny.toml"
USES = "trackers.use=['mlflow']"
WRONG: dict[str, tuple[tuple[str, ...], Facts]] = {
    "a password in a URI": (
        (USES, "trackers.mlflow_uri='https://me:planted@host'"),
        ("trackers.mlflow_uri", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    ),
    "a URI without its tracker": (("trackers.mlflow_uri='http://host'",), ("trackers.mlflow_uri", "'mlflow'")),
    "a URI offline": ((USES, "trackers.mlflow_uri='http://host'", "trackers.offline=true"), ("trackers.offline",)),
    "a space without its tracker": (("trackers.trackio_space='a/b'",), ("trackers.trackio_space", "'trackio'")),
    "a tracker twice": (("trackers.use=['wandb', 'wandb']",), ("trackers.use",)),
    "steps in reverse": (("trace.profile_steps='5:3'",), ("trace.profile_steps", "'5:3'")),
    "step 0": (("trace.profile_steps='0:3'",), ("trace.profile_steps", "'0:3'")),
    "steps as words": (("trace.profile_steps='all'",), ("trace.profile_steps", "'all'")),
    "a rank that is not there": (("trace.profile_steps='1'", "trace.profile_ranks=[7]"), ("trace.profile_ranks", 7)),
    "a rank below 0": (("trace.profile_ranks=[-1]",), ("trace.profile_ranks", -1)),
    "a password in a collector's address": (
        ("trace.otlp='https://me:planted@host/v1/traces'",),
        ("trace.otlp", "OTEL_EXPORTER_OTLP_HEADERS"),
    ),
    "a collector without traces": (("trace.otlp='http://host'",), ("trace.otlp", "trace.on")),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_without_effect_are_refused(case: str) -> None:
    settings, facts = WRONG[case]
    with refuses(ValueError, *facts) as raised:
        load_config(TINY, settings)
    assert "planted" not in str(raised.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_like.preflight.observers.find_spec", lambda name: None)
    config = load_config(TINY, ["trackers.use=['wandb']", "trace.on=true", "trace.otlp='http://host'"])
    with refuses(ValueError, "trackers.use", "'wandb'", "'miles-like[wandb]'"):
        check_packages(config.trackers, config.trace)
    with refuses(ValueError, "trace.otlp", "'miles-like[otel]'"):
        check_packages(load_config(TINY).trackers, config.trace)


def test_a_step_is_a_window_of_one() -> None:
    assert load_config(TINY, ["trace.profile_steps='4'"]).trace.profiled == range(4, 5)
    assert not load_config(TINY).trace.profiled

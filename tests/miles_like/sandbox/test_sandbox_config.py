"""The section [sandbox]: which keys fit which kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from miles_like.config.load import load_config
from miles_like.sandbox.config import SandboxConfig
from tests.support.refusals import refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"slots": 2}, ("sandbox.slots", "sandbox.kind")),
        ({"kind": "docker"}, ("'docker'", "sandbox.image")),
        ({"kind": "remote"}, ("'remote'", "sandbox.url")),
        ({"kind": "bwrap", "image": "a"}, ("sandbox.image", "'bwrap'", "'docker'")),
        ({"kind": "remote", "url": "http://127.0.0.1:1", "processes": 3}, ("sandbox.processes", "'remote'")),
        ({"kind": "bwrap", "read_only": ["data"]}, ("sandbox.read_only", "'data'")),
        ({"kind": "bwrap", "read_only": ["/a/../b"]}, ("sandbox.read_only", "'/a/../b'")),
        ({"kind": "bwrap", "memory_mb": 1}, ("memory_mb", 64)),
    ],
)
def test_what_is_refused(given: dict[str, object], facts: tuple[object, ...]) -> None:
    with refuses(ValidationError, *facts):
        SandboxConfig.model_validate(given)


def test_a_reward_that_runs_programs_needs_one() -> None:
    with refuses(ValueError, "'unit_tests'", "sandbox.kind"):
        load_config(TINY, ["reward.name=unit_tests"])
    assert load_config(TINY, ["reward.name=unit_tests", "sandbox.kind=bwrap"]).reward.unit_tests is not None

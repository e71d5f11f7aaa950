"""The tiers of the suite (tests/support/tiers.py), the snapshot of refusals (tests/support/refusals.py), and the
examples that hypothesis draws."""

from __future__ import annotations

import hypothesis
import pytest

from tests.support.refusals import ACCEPT, ONLY, RefusalSnapshot

pytest_plugins = ("tests.support.tiers",)

# The same examples in every run, so that a commit is green or red for all; `make test-all` draws others each time.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        ACCEPT, action="store_true", help="write the refusals of the tests that ran to tests/refusals.json"
    )
    parser.addoption(ONLY, action="store_true", help="run only the tests that record refusals")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RefusalSnapshot(config), "refusals")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The facts of a refusal, in the id of a test that takes them as a parameter."""
    return " ".join(map(str, val)) or None if argname == "facts" and isinstance(val, tuple) else None

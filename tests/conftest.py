"""The tiers of the suite (tests/support/tiers.py), the snapshot of refusals (tests/support/refusals.py), the installed
wheel (tests/support/installed.py), and the examples that hypothesis draws."""

from __future__ import annotations

import gc
import importlib.util
import platform
import signal
import sys
import threading
from types import FrameType

import hypothesis
import pytest

from tests.support.refusals import ACCEPT, ONLY, RefusalSnapshot

if importlib.util.find_spec("transformer_engine_torch") is None:
    # its Python alone is installed, for the processes of tests/support/te. Megatron, imported by a test before
    # `init_device` has hidden it, would fail at its import
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]

pytest_plugins = ("tests.support.installed", "tests.support.tiers")
pytest.register_assert_rewrite("tests.support.engine_contract")  # tests that several files have

# The same examples in every run, so that a commit is green or red for all; `make test-all` draws others each time.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        ACCEPT, action="store_true", help="write the refusals of the tests that ran to tests/refusals.json"
    )
    parser.addoption(ONLY, action="store_true", help="run only the tests that record refusals")


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.default_int_handler(number, frame)


def pytest_configure(config: pytest.Config) -> None:
    # with the default handler `asyncio.run` formats its task, and so the tensors of its result, twice for an error that
    # `signal` discards: a third of the time of some files
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    platform.processor()  # starts `uname` once: whichever test's library asked first would count as one with a process
    # imports make 1.5 million objects that stay: a quarter of the time of collecting tests was that of garbage
    gc.set_threshold(50_000, 20, 20)
    config.pluginmanager.register(RefusalSnapshot(config), "refusals")


def pytest_collection_finish() -> None:
    gc.freeze()  # a call of gc.collect, of which some tests have several, looks at what came since


def pytest_unconfigure() -> None:
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The facts of a refusal, in the id of a test that takes them as a parameter."""
    return " ".join(map(str, val)) or None if argname == "facts" and isinstance(val, tuple) else None

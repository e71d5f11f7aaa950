"""What the tests share: the environment of stock SGLang, and how commands of this project are run.

Commands are forked from a process that has imported what they import, and join one Ray: begun by themselves, the
comparisons of a checkpoint alone would take ten times five seconds of imports, and ten starts of Ray.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.sglang_cpu.served import PYTHON
from tests.support.command import Commands
from tests.support.own_ray import own_ray

LIMIT_S = 1500.0
LONGEST = ("test_stock_sglang.py", "test_checks_of_a_run.py", "test_stock_contract.py")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that neither worker begins one when the other is done."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: make test-sglang")


@pytest.fixture(scope="session")
def miles_like(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`miles-like` with the arguments that are given, or `script`, a file that Python runs."""
    with own_ray() as ray, Commands(tmp_path_factory.mktemp("commands")) as commands:

        def run(*arguments: object, script: object = "") -> subprocess.CompletedProcess[str]:
            variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **ray}
            return commands.run(str(script), [str(word) for word in arguments], variables, LIMIT_S)

        yield run

"""The bounded tier of a target: its corpus, and cases that hypothesis draws, in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.pool import Case, HangError, Outcome, corpus, watchdog

LIMIT_S = 60.0  # by the clock, on a machine that does other things too


def played(target: ModuleType, case: Case, folder: Path) -> Outcome:
    """The outcome of a case in an empty folder made below `folder`."""
    here = folder / f"case{len(list(folder.iterdir()))}"
    here.mkdir()
    try:
        with watchdog(LIMIT_S):
            return target.play(case, here)
    except HangError as e:
        return Outcome(kind="hang", words=str(e))


def check(target: ModuleType, case: Case, folder: Path) -> None:
    outcome = played(target, case, folder)
    assert outcome.good, f"{outcome.kind}: {outcome.words}\n{json.dumps(case)[:2000]}"


def check_corpus(name: str, target: ModuleType, folder: Path) -> None:
    for case in corpus(name):
        check(target, case, folder)


def drawn(target: ModuleType, folder: Path, examples: int) -> Callable[[], None]:
    """A hypothesis test of `examples` drawn cases."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def test(seed: int) -> None:
        check(target, json.loads(json.dumps(target.draw(random.Random(seed)))), folder)

    return test

"""benchmarks/gpu_program.py keeps what each step did: its report, its facts, and that it failed or did not end."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILE = """
import time

def test_holds():
    print('{"GiB": {"planned": 1.25, "held": [1.5, 2]}, "spec": "te"}')

def test_fails():
    assert 1 == 2
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_program", ROOT / "benchmarks" / "gpu_program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_program", module)  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def test_every_file_for_a_gpu_is_a_step(program: ModuleType) -> None:
    steps = [Path(step.script).name for step in program.STEPS if step.script.startswith("tests/")]
    assert sorted(steps) == sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.slow
def test_a_step_leaves_its_counts_its_facts_and_its_status(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(FILE)
    outcome = program.run(program.Step(name="two", script=str(tmp_path / "test_two.py")), tmp_path, 60.0)
    assert (outcome.status, outcome.counts) == (1, {"passed": 1, "failed": 1, "skipped": 0})
    assert outcome.facts == [{"GiB": {"planned": 1.25, "held": [1.5, 2]}, "spec": "te"}]
    (tmp_path / "sleep.py").write_text("import time\nprint('{\"a\": 1}')\ntime.sleep(60)")
    late = program.run(program.Step(name="late", script=str(tmp_path / "sleep.py")), tmp_path, 1.0)
    assert (late.status, late.facts) == (124, [{"a": 1}])


def test_the_page_has_a_row_for_each_step_and_for_each_figure(program: ModuleType) -> None:
    outcome = program.Outcome(
        name="rates", command="python x.py", status=1, seconds=3.2, facts=[{"a": {"b": [0.5, 2]}}]
    )
    results = {
        "device": "H200",
        "versions": {"torch": "2.11"},
        "steps": {"rates": json.loads(json.dumps(asdict(outcome)))},
    }
    assert program.rows(results)[-4:] == [
        "",
        "| step | figure | value |",
        "|---|---|---|",
        "| `rates` | a.b | 0.5, 2 |",
    ]
    assert "| `rates`: `benchmarks/gpu_rates.py` | **failed**, status 1 | 3 |" in program.rows(results)

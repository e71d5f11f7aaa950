"""When the loop on given examples evaluates. What it trains: tests/laws/test_supervised_resume.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_like import spans
from miles_like.report.traces.parts import Parts
from miles_like.supervised.steps import SupervisedLoop
from miles_like.types import StepReport


@pytest.mark.parametrize(("every", "evaluated"), [(0, []), (2, [0, 2, 3]), (5, [0, 3])])
def test_held_out_examples_are_evaluated_on_the_interval_and_never_with_zero(
    every: int, evaluated: list[int], tmp_path: Path
) -> None:
    """Each step and each evaluation is in the trace."""
    rows: dict[int, dict[str, float]] = {}

    async def train(batches: Any) -> StepReport:
        return StepReport(metrics={"train/loss": 1.0}, version=0)

    async def evaluate(batch: Any) -> dict[str, float]:
        await asyncio.sleep(0.2)
        return {"train/loss": 2.0}

    async def batches_of(examples: Any) -> Any:
        return examples

    async def end(steps: int) -> int:
        return steps

    async def nothing(*_: Any, **__: Any) -> None: ...

    fake: Any = SimpleNamespace(
        train=train,
        evaluate=evaluate,
        of=batches_of,
        take=list,
        tokens_total=0,
        metrics=lambda *_, **__: {},
        phase=lambda *_: None,
        write=lambda step, metrics: rows.update({step: dict(metrics)}),
        begin=lambda step: None,
        boundary=nothing,
        end=end,
        stop=SimpleNamespace(asked=False),
        deadline=SimpleNamespace(note=lambda **_: None),
    )
    parts = dict.fromkeys(("trainer", "feed", "batches", "speed", "sink", "saver", "progress"), fake)
    loop = SupervisedLoop(**parts, held_out={"held": fake}, eval_every=every, earlier_s=100.0)
    spans.begin(tmp_path, "driver")
    assert asyncio.run(loop.run(first=0, steps=3)) == 3
    spans.flush()
    spans.end()
    assert [step for step, row in rows.items() if "eval/held/loss" in row] == evaluated
    assert 100.0 <= rows[3]["wall_s"] < 200.0
    found = Parts(tmp_path, lambda host: 0).new()
    assert [s.args for s in found if s.name == "step"] == [{"step": n + 1, "version": n} for n in range(3)]
    assert [s.args["step"] for s in found if s.name == "train"] == [1, 2, 3]
    assert [s.args["version"] for s in found if s.name == "evaluate"] == evaluated
    assert all(row["perf/train_s"] <= row["perf/step_s"] < 0.2 for row in list(rows.values())[-3:])

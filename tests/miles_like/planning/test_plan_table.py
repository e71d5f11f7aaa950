"""A plan as text and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from miles_like.planning.memory.parts import GIB, total
from miles_like.planning.plan import Plan
from miles_like.planning.table import plan_json, print_plan, write_plan
from tests.support.plans import planned


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("deepseek_v3_fp8")


def _text(plan: Plan) -> str:
    out = io.StringIO()
    print_plan(Console(file=out, width=200), plan)
    return out.getvalue()


def test_the_json_has_every_number_of_the_plan(plan: Plan, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", plan)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found == plan_json(plan)
    assert found["fits"] is True and found["problems"] == [] and found["step_s"] is None
    assert found["device"] == "H100" and found["device_gib"] == pytest.approx(79.65, abs=0.01)
    for row, stage in zip(found["stages"], plan.stages, strict=True):
        assert (row["role"], row["stage"], row["gpus"]) == (stage.role, stage.stage, stage.gpus)
        for phase, parts in row["phases"].items():
            whole = parts.pop("total")
            assert whole == pytest.approx(sum(parts.values()), abs=0.01)
            assert whole == pytest.approx(total(stage.phases[phase]) / GIB, abs=0.001)
    host = found["host_gib"]
    assert host["total"] == pytest.approx(sum(host["parts"].values()), abs=0.01) and host["total"] < host["memory"]
    assert found["engine"]["bytes_per_token"] == 70_272
    assert {a["part"] for a in found["allowances"]} >= {"CUDA context", "NCCL", "DeepEP", "fragmentation"}
    timed = plan_json(replace(plan, step_s={"train": 12.5}))
    assert timed["step_s"] == {"train": 12.5}


def test_the_table_names_stages_phases_and_parts(plan: Plan) -> None:
    text = _text(plan)
    for words in ("trainer stage 4 + rollout, 16 GPUs", "layers", "31-38", "training", "generating"):
        assert words in text
    assert "fits, with" in text and "to spare on the fullest" in text
    assert "allowance for DeepEP: " in text and "page cache not counted" in text
    assert "a server's cache holds" in text and "tokens of 70,272 bytes" in text


def test_a_plan_that_does_not_fit_says_where_and_by_how_much() -> None:
    plan = planned("qwen3_30b_a3b_fp8_node", "kernels.offload_optimizer=0.0")
    text = _text(plan)
    assert "does not fit: trainer stage 0 needs " in text and "an H100 has 79.6 (parameters " in text
    assert plan_json(plan)["fits"] is False and plan_json(plan)["problems"] == plan.problems()


def test_a_plan_without_gpus_is_shown_too() -> None:
    """In MiB: their models are tiny."""
    text = _text(planned("tiny"))
    assert "MiB of host memory a rank" in text and "CPU ranks" in text and "GiB while" not in text
    assert "0.74 M" in text and "experts: the busiest rank" in text
    assert "experts: the busiest rank" not in _text(planned("qwen3_4b"))

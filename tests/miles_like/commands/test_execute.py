"""Ranks are executed again on fake tensors, by the command, and are what docs/plan/executed.json recorded: of latent
and of grouped attention, with FP8 and rounded INT4 weights, over every dimension of a layout, recomputed in full and in
part. All but the first are in the long tier, two of them at full depth.

Not covered: the other records, of `make plan-all`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bridge.fake.records import ExecutedRank, read_records

ROOT = Path(__file__).parents[3]
RECORDS = read_records(ROOT / "docs" / "plan" / "executed.json")
LONG = pytest.mark.long(beside="tests/miles_like/commands/test_execute.py")
EXECUTED = (  # configuration, stage, settings that its record has: the first one of these is executed
    ("deepseek_v3_fp8", 1, {"model.first_layers=6"}),
    pytest.param("glm45_air", 0, {"model.first_layers=2"}, marks=LONG),
    pytest.param("qwen3_30b_a3b_int4_qat", 0, {"model.first_layers=4", "parallel.tp=4"}, marks=LONG),
    pytest.param("rehearsal_qwen3_30b", 0, set(), marks=LONG),
    pytest.param("rehearsal_deepseek_v3", 1, set(), marks=LONG),
)


@pytest.mark.parametrize(("name", "stage", "having"), EXECUTED)
def test_an_executed_rank_is_the_recorded_one(name: str, stage: int, having: set[str], tmp_path: Path) -> None:
    of_stage = [r for r in RECORDS if (r["config"], r["stage"], bool(r["overrides"])) == (name, stage, bool(having))]
    recorded = next(r for r in of_stage if having.issubset(r["overrides"]))
    command = [sys.executable, "-W", "ignore", "-m", "miles_like.commands.execute", f"configs/{name}.toml"]
    command += [part for setting in recorded["overrides"] for part in ("--set", setting)]
    command += ["--rank", str(recorded["rank"]), "--imbalance", str(recorded["imbalance"])]
    command += ["--cache", str(tmp_path), "--json", str(tmp_path / "record.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = read_records(tmp_path / "record.json")
    for field in ExecutedRank.__annotations__.keys() - {"key"}:
        assert found[field] == recorded[field], field  # type: ignore[literal-required]

"""Three ranks are executed again on fake tensors, by the command, and are what docs/plan/executed.json recorded.

Not covered: the other records, which `make plan-all` writes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bridge.fake.records import ExecutedRank, read_records

ROOT = Path(__file__).parents[3]
RANDOM = [r for r in read_records(ROOT / "docs" / "plan" / "executed.json") if r["overrides"]]
EXECUTED = (
    "qwen3_0_6b",
    "deepseek_v3_fp8",
    "kimi_k2_int4_qat",
)  # dense; MLA with FP8 or INT4 experts on several stages


@pytest.mark.parametrize("name", EXECUTED)
def test_an_executed_rank_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    recorded = min((r for r in RANDOM if r["config"] == name), key=lambda r: r["micro_batches"] * r["pack_tokens"])
    sets = [word for override in recorded["overrides"] for word in ("--set", override)]
    command = [sys.executable, "-W", "ignore", "-m", "miles_like.commands.execute", f"configs/{name}.toml", *sets]
    command += ["--rank", str(recorded["rank"]), "--cache", str(tmp_path), "--json", str(tmp_path / "record.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = read_records(tmp_path / "record.json")
    for field in ExecutedRank.__annotations__.keys() - {"key"}:
        assert found[field] == recorded[field], field  # type: ignore[literal-required]

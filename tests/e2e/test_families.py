"""One iteration of a Qwen3-MoE and of a dense Qwen3 through the command: made, served, replayed, trained, published.

The checkpoint is made here, so that warm-up, conversion, FP8 and publication see a tied head and a model without
experts. Not covered: that they learn, more ranks than one, a GLM-4.5 beyond its making and serving.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import Prompt, Sample
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.server.service import Service
from tests.e2e.conftest import ROOT, Run
from tests.support import tiny_models

LONG = pytest.mark.long(beside="tests/laws/test_megatron_equals_transformers.py")
CONFIG = ("--config", str(ROOT / "configs" / "tiny_qwen.toml"))
ONE_STEP = (
    *("--set", "parallel.dp=1", "--set", "parallel.ep=1"),
    *("--set", "model.make.max_steps=4", "--set", "model.make.check_every=4", "--set", "model.make.batch=32"),
    *("--set", "train.steps=1", "--set", "train.groups_per_step=6", "--set", "train.samples_per_group=4"),
    *("--set", "eval.max_prompts=4", "--set", "reward.name=tests.e2e.test_families:parity"),
)


async def parity(prompt: Prompt, sample: Sample) -> float:
    """A reward that an untrained model gets half of the time, so that there is something to learn."""
    return float(sum(sample.token_ids.tolist()) % 2)


def config_of(tmp_path: Path, hf: dict[str, Any]) -> tuple[str, str]:
    (tmp_path / "model.json").write_text(json.dumps(hf))
    return "--set", f"model.make.config={tmp_path}/model.json"


@pytest.mark.parametrize("dense", [pytest.param(False, marks=LONG), pytest.param(True, marks=LONG)])
def test_an_iteration(run: Run, tmp_path: Path, dense: bool) -> None:
    model = config_of(tmp_path, tiny_models.tiny_dense(tie_word_embeddings=True)) if dense else ()  # else as shipped
    done = run(*CONFIG, "--run-dir", str(tmp_path / "run"), *ONE_STEP, *model, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    row = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1]
    assert row["train/grad_norm"] > 0 and row["weight_version"] == 1.0
    assert row["mismatch/logprob_abs_diff"] < 0.05
    assert row["sync/bytes"] > 0, "published, and the servers' checksums were the trainer's"
    if dense:
        assert not [k for k in row if k.startswith("routing/")], "no routes, none to replay"
    else:
        assert row["routing/replay_coverage"] == 1.0
        assert 0.9 < row["routing/agreement"] <= 1.0


@LONG
def test_a_glm_is_made_and_served(run: Run, tmp_path: Path) -> None:
    """The warm-up's default rate balances routers that have a selection bias; the engine takes what was made."""
    model = config_of(tmp_path, tiny_models.tiny_glm())
    done = run(*CONFIG, "--run-dir", str(tmp_path / "run"), *ONE_STEP, *model, "--stages", "fetch")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    made = next(tmp_path.glob("cache/fetch-*/data"))
    balanced = [t for n, t in HFCheckpoint(made).stream() if n.endswith("e_score_correction_bias")]
    assert len(balanced) == 2 and all(torch.count_nonzero(b) for b in balanced)
    served = Service(made, EngineLimits(max_total_tokens=256, context_length=64))
    assert served.arch.moe_layers == (1, 2)

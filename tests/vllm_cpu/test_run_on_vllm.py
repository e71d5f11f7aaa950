"""Law: a run trains on stock vLLM servers that it starts: its samples are of the trainer's weights in every step, and a
model that vLLM loads wrongly never gets a server.

vLLM 0.32 as it is released, on CPU, with the shipped example configuration (`make test-vllm`). Not covered: several
servers; samples in flight at a publication (test_vllm_publication.py); GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm_cpu.conftest import Run
from tests.vllm_cpu.served import PYTHON, ROOT, START_S

pytestmark = pytest.mark.slow
SETTINGS = (
    *("model.make.max_steps=0", "parallel.dp=1", "train.steps=3", "train.groups_per_step=4"),
    *("train.samples_per_group=2", "rollout.max_new_tokens=24", "mismatch.check_prompts=4", "mismatch.check_every=2"),
    *("mismatch.checksums_every=1", "eval.every=0", "eval.max_prompts=4", "checkpoint.every=1"),
    *("optimizer.lr=0.01", "optimizer.warmup_steps=0", f"rollout.start_timeout_s={START_S}"),
)


def words(run_dir: Path, *more: str) -> list[object]:
    given = [word for setting in (*SETTINGS, f"rollout.vllm.python={PYTHON}", *more) for word in ("--set", setting)]
    return ["train", ROOT / "configs" / "tiny_vllm.toml", "--run-dir", run_dir, *given]


def test_three_steps_train_on_samples_of_the_trainer_s_weights(miles_like: Run, tmp_path: Path) -> None:
    """Weights move far in each step: samples of older ones would be off by more than the trainer's rounding to bf16
    explains. The reward has a right answer for a model that knows none."""
    (tmp_path / "reward.py").write_text("def reward(sample):\n    return float(len(sample.response))\n")
    done = miles_like(*words(tmp_path / "run", f"reward.name={tmp_path / 'reward.py'}:reward"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "vLLM servers have no authentication" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert all(row["train/grad_norm"] > 0 for row in trained)
    assert all(row["mismatch/kl"] < 1e-3 and row["mismatch/known_answer"] < 0.02 for row in trained)
    assert len({row["mismatch/known_answer"] for row in trained}) == 3
    samples = [
        [json.loads(line) for line in (tmp_path / "run" / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]
        for step in (1, 2, 3)
    ]
    assert all(samples)


def test_a_model_with_experts_gets_no_server_on_a_cpu(miles_like: Run, tmp_path: Path) -> None:
    done = miles_like(*words(tmp_path / "run", f"model.make.config={ROOT / 'configs' / 'tiny' / 'qwen_moe.json'}"))
    assert done.returncode == 2 and "layers with experts" in done.stderr, done.stderr[-3000:]
    assert not (tmp_path / "run" / "logs").exists()

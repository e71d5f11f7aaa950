"""Law: the checks of a running job hold for stock SGLang as they do for the embedded engine: healthy steps pass them,
and a run whose server begins to send routes of other tokens, or keeps old weights, ends before it trains on them.

SGLang 0.5.23 as it is released, on CPU (`make test-sglang`), started by `train` itself with its own key,
in the environment that `rollout.sglang.python` names. Not covered:
several servers, or ranks of one; quantized weights; GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sglang_cpu.conftest import Run
from tests.sglang_cpu.served import (
    CONFIGS,
    INTERPRETER,
    MODELS,
    PROGRAMS,
    ROOT,
    SETTINGS,
    every_layer_routed,
    given,
)

pytestmark = pytest.mark.slow
CHECKED = (
    *("mismatch.check_prompts=4", "mismatch.checksums_every=1"),
    *("train.steps=3", "train.groups_per_step=4", "train.samples_per_group=2", "checkpoint.every=1"),
    *("eval.every=0", "eval.max_prompts=4", "rollout.start_timeout_s=600", "replay.mode=r3"),
)


@pytest.mark.parametrize(
    ("shape", "check_every", "steps", "message"),
    [
        ("deepseek", 0, 2, "step 3: the replayed routes do not belong to these tokens and layers"),
        ("qwen", 1, 1, "after step 2 trainer and rollout differ: routing: routes shifted (all rows are shifted by 1"),
    ],
)
def test_healthy_steps_pass_and_shifted_routes_end_the_run(
    shape: str, check_every: int, steps: int, message: str, miles_like: Run, tmp_path: Path
) -> None:
    """Routes of version 2 are shifted. Without comparisons in mid-run the step that replays them is refused; with them
    the comparison after that publication already finds it. Checksums are asked before each step trains."""
    layers = json.loads((ROOT / "configs" / "tiny" / MODELS[shape]).read_text())["num_hidden_layers"]
    first = 1 if shape == "deepseek" else 0  # layers before it are dense
    settings = (
        *SETTINGS,
        *CHECKED,
        f"mismatch.check_every={check_every}",
        f"model.make.config={every_layer_routed(shape, tmp_path)}",
        f"rollout.sglang.python={INTERPRETER}",
    )
    words = ["train", ROOT / "configs" / CONFIGS[shape], "--run-dir", tmp_path / "run", *given(settings)]
    done = miles_like(first, layers, *words, script=PROGRAMS / "shifted_routes.py")
    assert done.returncode == 2, done.stderr[-3000:]
    assert message in done.stderr, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, steps + 1))
    assert all(row["routing/expert_agreement"] > 0.97 and row["mismatch/kl"] < 1e-3 for row in trained)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == f"step_{steps}"


def test_fused_weights_that_a_server_keeps_end_the_run(miles_like: Run, tmp_path: Path) -> None:
    """Two projections that SGLang concatenates come in two requests: it answers 200 with the new version, and computes
    with the old ones. The text that it scores shows it, after the second publication and each restart too;
    versions that arrive whole pass, as the tests above show."""
    settings = (
        *(*SETTINGS, *CHECKED, "mismatch.check_prompts=0", "mismatch.checksums_every=0"),
        *("optimizer.lr=0.03", "optimizer.warmup_steps=0", "reward.name=tests.support.local_run:low_tokens"),
        f"model.make.config={every_layer_routed('deepseek', tmp_path)}",
        f"rollout.sglang.python={INTERPRETER}",
    )
    words = ["train", ROOT / "configs" / CONFIGS["deepseek"], "--run-dir", tmp_path / "run", *given(settings)]
    done = miles_like(*words, script=PROGRAMS / "parted_pairs.py")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "version 1 is published again: server http://127.0.0.1:" in done.stdout
    assert "0 rollout servers are left, but rollout.min_servers = 1: server 0 (http://127.0.0.1:" in done.stderr
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()

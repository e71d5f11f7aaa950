"""The life of a sample, from files as a run writes them, against advantages and shares that are computed by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.load import load_config, store_config
from miles_like.diagnosis.describe import sample_lines
from miles_like.diagnosis.sample import life_of
from miles_like.report.traces.chrome import write_trace
from tests.miles_like.diagnosis.test_step_seconds import TINY, span

REWARDS = {"p1": (0.0, 1.0, 1.0), "p2": (0.5, 0.5, 2.0)}
TOKENS = {"p1": (2, 4, 3), "p2": (1, 5, 2)}


def sample(prompt: str, i: int, **more: Any) -> dict[str, Any]:
    n = TOKENS[prompt][i]
    return {
        "prompt_id": prompt,
        "index": i,
        "prompt": f"the prompt {prompt}",
        "response": f"response {i} \x1b[2J",
        "answer": "4",
        "reward": REWARDS[prompt][i],
        "reward_parts": {"format": 0.25},
        "finish": "stop",
        "tokens": n,
        "logprob_mean": -0.5,
        "versions": [[2, 0, n]],
        "token_ids": [1] * (n + 2),
        "loss_mask": [0, 0] + [1] * n,
        "logprobs": [-0.5] * n,
    } | more


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    store_config(load_config(TINY, ["algorithm.name=grpo"]), tmp_path / "config.toml")
    (tmp_path / "rollouts").mkdir()
    text = "".join(json.dumps(sample(p, i)) + "\n" for p in REWARDS for i in range(3))
    (tmp_path / "rollouts" / "step_3.jsonl").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "routing/expert_agreement": 0.97}\n')
    lost = {"step": 2, "ticket": 1, "prompt": "p1", "trained": [], "discarded": {"too old": 3}}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(lost) + "\n")
    return tmp_path


def test_a_life_has_what_the_trainer_made_of_the_sample(run_dir: Path) -> None:
    """GRPO: (r - mean) / std of the group, that of a sample; a mean over tokens weights by tokens."""
    life = life_of(run_dir, "p1/2", [{"step": 3.0, "routing/expert_agreement": 0.97}])
    (one,) = life.trained
    advantages = {p: [(r - statistics.fmean(rs)) / statistics.stdev(rs) for r in rs] for p, rs in REWARDS.items()}
    assert one.advantage == pytest.approx(advantages["p1"][2], rel=1e-4)
    parts = {(p, i): abs(advantages[p][i]) * TOKENS[p][i] for p in REWARDS for i in range(3)}
    assert one.loss_share == pytest.approx(parts["p1", 2] / sum(parts.values()), rel=1e-4)
    assert (one.step, one.rewards, one.agreement) == (3, REWARDS["p1"], 0.97)
    assert life.discarded == ((2, "too old", 3),)


def test_its_times_are_those_of_its_step(run_dir: Path) -> None:
    """A prompt is sampled again in each epoch, under one key."""
    spans = [
        span("driver", "generate", 5.0, 6.0, samples=["p1/2"], versions=[0]),
        span("driver", "generate", 10.0, 12.0, samples=["p1/2"], versions=[2]),
        span("trainer_rank0", "train", 13.0, 14.0, samples=["p1/2"], version=3),
        span("trainer_rank0", "train", 15.0, 16.0, samples=["p1/2"], version=4),
    ]
    write_trace(run_dir / "traces" / "steps_000001-000010.json", spans, {})
    (one,) = life_of(run_dir, "p1/2", []).trained
    assert [(s.name, s.start) for s in one.spans] == [("generate", 10_000_000_000), ("train", 13_000_000_000)]
    lines = sample_lines(run_dir, "p1/2")
    assert "     0.000 s +   2.000 s  generate (driver)" in lines and "\x1b" not in "".join(lines)
    assert any("weight versions: 2 (tokens 0 to 2)" in line for line in lines)
    assert any("0.9700 of the step's experts agree" in line for line in lines)
    assert any("reward: 1 (format 0.25); of its group: 0, 1, 1" in line for line in lines)


def test_an_advantage_that_needs_more_is_not_guessed(run_dir: Path) -> None:
    store_config(load_config(TINY, ["algorithm.name=ppo"]), run_dir / "config.toml")
    life = life_of(run_dir, "p1/2", [])
    assert life.trained[0].advantage is None and "values" in str(life.why_no_advantage)


@pytest.mark.parametrize(
    ("key", "message"),
    [("p9/0", "has a sample p9/0"), ("p1", "'p1' is not PROMPT_ID/INDEX"), ("p1/x", "is not PROMPT_ID")],
)
def test_a_key_of_no_sample_is_refused(run_dir: Path, key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        life_of(run_dir, key, [])

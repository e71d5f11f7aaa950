"""The life of a sample, from files as a run writes them, against shares that are computed by hand."""

from __future__ import annotations

import json
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
ADVANTAGES: dict[str, tuple[float | list[float], ...]] = {
    "p1": (-1.0, [2.0, -2.0, 1.0, -1.0], 0.5),
    "p2": (0.0, -0.5, 2.0),
}


def sample(prompt: str, i: int, **more: Any) -> dict[str, Any]:
    n = TOKENS[prompt][i]
    return {
        "prompt_id": prompt,
        "index": i,
        "prompt": f"the prompt {prompt}",
        "response": f"response {i} \x1b[2J \u2028",
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
        "advantages": ADVANTAGES[prompt][i],
    } | more


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    store_config(load_config(TINY, ["algorithm.name=grpo"]), tmp_path / "config.toml")
    (tmp_path / "rollouts").mkdir()
    shares = {("p1", 2): {"routing_agreement": 0.25}, ("p1", 1): {"routing_agreement": 0.75}}
    rows = [sample(p, i, **shares.get((p, i), {})) for p in REWARDS for i in range(3)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rollouts" / "step_3.jsonl").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "routing/expert_agreement": 0.97}\n')
    lost = {"step": 2, "ticket": 1, "prompt": "p1", "trained": [], "discarded": {"too old": 3}}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(lost) + "\n")
    return tmp_path


def test_a_life_has_what_the_trainer_made_of_the_sample(run_dir: Path) -> None:
    """A mean over tokens weights by tokens; of advantages of tokens the mean |advantage| counts."""
    life = life_of(run_dir, "p1/2", [{"step": 3.0, "routing/expert_agreement": 0.97}])
    (one,) = life.trained
    assert one.advantage == 0.5
    assert one.loss_share == pytest.approx(0.5 * 3 / (1.0 * 2 + 1.5 * 4 + 0.5 * 3 + 0.0 * 1 + 0.5 * 5 + 2.0 * 2))
    (other,) = life_of(run_dir, "p1/1", []).trained
    assert (other.advantage, other.loss_share) == (0.0, pytest.approx(6 / 16))
    assert (one.step, one.rewards, one.agreement, one.of_step) == (3, REWARDS["p1"], 0.25, 0.97)
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
    assert any("choose 0.2500 of its recorded experts too; of the step's samples 0.9700" in line for line in lines)
    assert "  routes: not compared with the trainer's own; of the step's samples 0.9700" in sample_lines(
        run_dir, "p2/0"
    )
    assert any("reward: 1 (format 0.25); of its group: 0, 1, 1" in line for line in lines)


def test_an_advantage_that_is_not_written_is_not_guessed(run_dir: Path) -> None:
    rows = [sample(p, i) for p in REWARDS for i in range(3)]
    del rows[4]["advantages"]
    (run_dir / "rollouts" / "step_3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (one,) = life_of(run_dir, "p1/2", []).trained
    assert one.advantage is None and one.loss_share is None


@pytest.mark.parametrize(
    ("key", "message"),
    [("p9/0", "has a sample p9/0"), ("p1", "'p1' is not PROMPT_ID/INDEX"), ("p1/x", "is not PROMPT_ID")],
)
def test_a_key_of_no_sample_is_refused(run_dir: Path, key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        life_of(run_dir, key, [])

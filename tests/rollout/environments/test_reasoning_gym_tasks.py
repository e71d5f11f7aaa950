"""Rows and the reward of reasoning-gym's tasks, by its own verifiers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import reasoning_gym

from miles_like.config.sections.reward import RewardConfig
from miles_like.rewards.answered import answered_sample
from miles_like.rewards.load import make_reward
from miles_like.types import Prompt
from rollout.environments import reasoning_gym_tasks
from rollout.environments.reasoning_gym_tasks import answer_in, rows, score
from tests.support.refusals import refuses


@pytest.mark.parametrize("task", ["chain_sum", "number_sorting", "spell_backward"])
def test_scores_are_those_of_the_verifier(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, size=4, seed=3)
    for row, entry in zip(rows(task, 4, 3), dataset, strict=True):
        prompt = Prompt(id="a", token_ids=(1,), answer=row["answer"], meta=row)
        assert row["prompt"].startswith(entry["question"])
        for text in (str(entry["answer"]), "0", "", "no idea"):
            response = f"<think><answer>1</answer></think>so <answer>{text}</answer>"
            assert score(prompt, answered_sample(prompt, 0, [2], response)) == dataset.score_answer(text, entry), text
        assert score(prompt, answered_sample(prompt, 0, [2], str(entry["answer"]))) == 1.0


def test_a_verifier_that_fails_at_a_text_finds_it_wrong() -> None:
    """An error at its own answer is one of the row, which ends the run."""
    (row,) = rows("prime_factorization", 1, 3)
    prompt = Prompt(id="a", token_ids=(1,), answer=row["answer"], meta=row)
    with pytest.raises(ValueError, match="int"):
        reasoning_gym.create_dataset("prime_factorization", size=1).score_answer("two", json.loads(row["entry"]))
    found = [score(prompt, answered_sample(prompt, 0, [2], text)) for text in ("two", row["answer"])]
    assert found == [0.0, 1.0]
    broken = Prompt(id="a", token_ids=(1,), answer="", meta={**row, "entry": '{"metadata": {}}'})
    with pytest.raises(KeyError, match="answer"):
        score(broken, answered_sample(prompt, 0, [2], "two"))


def test_a_task_that_a_file_cannot_hold_is_refused() -> None:
    with refuses(ValueError, "'arc_agi'", 1, 0.05):
        rows("arc_agi", 1, 3)


def test_the_command_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "train.jsonl"
    words = ["chain_sum", "--size", "3", "--seed", "1", "--set", "max_terms=2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["tasks", *words])
    reasoning_gym_tasks.main()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found == rows("chain_sum", 3, 1, max_terms=2) and len({row["prompt"] for row in found}) == 3


def test_the_reward_by_its_key() -> None:
    reward = make_reward(RewardConfig(name="rollout.environments.reasoning_gym_tasks:score"))
    assert reward.compares is None
    with refuses(ValueError, "'a'", "task", "entry"):
        prompt = Prompt(id="a", token_ids=(1,), answer="")
        score(prompt, answered_sample(prompt, 0, [2], "1"))
    assert answer_in("a <answer> 1 </answer> <answer>2</answer>") == "2" and answer_in("<think>3</think> 4 ") == "4"

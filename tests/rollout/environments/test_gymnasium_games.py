"""The adapter of gymnasium, on its own FrozenLake and CartPole: the same steps, rewards and ends as by its own loop."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import gymnasium
import pytest

from miles_like.rewards.answered import answered_sample
from miles_like.types import Observation, Prompt
from rollout.environments.gymnasium_games import Gymnasium
from tests.support.refusals import refuses


class Lake(Gymnasium):
    id, options = "FrozenLake-v1", {"map_name": "4x4", "is_slippery": True}
    actions: ClassVar = {"left": 0, "down": 1, "right": 2, "up": 3}
    instruction = "Walk."


class Pole(Gymnasium):
    id = "CartPole-v1"
    actions: ClassVar = {"left": 0, "right": 1}

    def show(self, observation: Any) -> str:
        return " ".join(f"{x:.3f}" for x in observation)


def played(kind: type[Gymnasium], turns: list[str], seed: int) -> list[Observation]:
    prompt = Prompt(id="a", token_ids=(1,), answer="", meta={"seed": seed})

    async def all_of() -> list[Observation]:
        environment, out = kind(prompt, seed=99), []
        for turn in turns:
            out.append(await environment(answered_sample(prompt, 0, [2], ""), turn))
            if out[-1].ends:
                break
        await environment.close()
        return out

    return asyncio.run(all_of())


@pytest.mark.parametrize("kind", [Lake, Pole])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_an_episode_is_that_of_gymnasium(kind: type[Gymnasium], seed: int) -> None:
    words = [list(kind.actions)[(k * k + seed) % len(kind.actions)] for k in range(60)]
    found = played(kind, [f"<think>up or left?</think> I go {word}." for word in words], seed)
    game = gymnasium.make(kind.id, **kind.options)
    game.reset(seed=seed)
    for one, word in zip(found, words, strict=False):
        observation, reward, terminated, truncated, _ = game.step(kind.actions[word])
        assert one.reward == float(reward) and one.ends == (terminated or truncated)
        if not one.ends:
            assert one.text.strip() == kind.show(Lake.__new__(kind), observation)
    assert found[-1].ends, "60 steps end either game"


def test_rows_have_the_first_observation_of_their_seed() -> None:
    rows = Pole.rows(3, seed=5)
    game = gymnasium.make("CartPole-v1")
    for row in rows:
        observation, _ = game.reset(seed=row["seed"])
        assert Pole.show(Pole.__new__(Pole), observation) in row["prompt"] and "left, right" in row["prompt"]
    assert [row["seed"] for row in rows] == [5, 6, 7] and len({row["prompt"] for row in rows}) == 3
    assert Lake.rows(1)[0]["prompt"].startswith("Walk.\n0\n")


def test_a_turn_without_an_action_is_answered_with_the_list() -> None:
    found = played(Lake, ["where am I?", "LEFT, no: right", "upwards"], 0)
    assert "left, down, right, up" in found[0].text and found[0].reward is None
    assert found[1].reward == 0.0 and "left, down" in found[2].text


def test_what_is_refused() -> None:
    with refuses(ValueError, "Gymnasium", "id", "actions"):
        Gymnasium(Prompt(id="a", token_ids=(1,), answer=""), seed=0)

"""docs/examples/environments: every configuration loads, its environment or reward is found by its key, and answers.

Not covered: training on them, which the tiny model does not learn.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.plugins import load
from miles_like.protocols import MakeEnvironment
from miles_like.rewards.answered import answered_sample
from miles_like.rewards.load import make_reward
from miles_like.sandbox.config import SandboxConfig
from miles_like.types import Observation, Prompt

FOLDER = Path(__file__).parents[3] / "docs" / "examples" / "environments"
PAGE = (FOLDER.parents[1] / "environments.md").read_text()
# a turn that the environment answers, and words of its answer
TURNS = {
    "search": ("<search>home of bees</search>", "Hive: A hive is the home of bees."),
    "repository": ("<read>README.md</read>", "# "),
    "lake": ("I go down.", "row 1, column 0"),
    "echo": (" ", "This is no action."),
}


def prompts(path: str) -> list[Prompt]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [
        Prompt(id=str(i), token_ids=(1,), answer=str(row.get("answer", "")), text=row["prompt"], meta=row)
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda p: p.stem)
def test_a_configuration_and_what_it_names(path: Path) -> None:
    assert f"(examples/environments/{path.name})" in PAGE
    config = load_config(path)
    given = prompts(str(config.data.train))
    assert len(given) >= 4
    if config.rollout.environment is None:
        remote = SandboxConfig(kind="remote", url="http://127.0.0.1:1")
        reward = make_reward(config.reward, sandbox=remote if config.sandbox.kind else config.sandbox)
        if path.stem == "chain_sum":
            found = asyncio.run(reward(given[:1], [answered_sample(given[0], 0, [2], given[0].answer)]))
            assert getattr(found[0], "value", None) == 1.0
        return
    make = load(config.rollout.environment, MakeEnvironment, key="rollout.environment")
    turn, words = TURNS[path.stem]
    environment = make(given[0], seed=0)
    if path.stem == "echo":  # no server runs here: what is no action is answered after the session has begun
        environment._socket = object()
    found = asyncio.run(environment(answered_sample(given[0], 0, [2], ""), turn))
    assert isinstance(found, Observation) and words in found.text, found

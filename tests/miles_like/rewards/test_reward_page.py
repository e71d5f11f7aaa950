"""Every example of docs/rewards.md does what the page says, as it stands there."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from miles_like.config.sections.flat import fields
from miles_like.config.sections.reward import BUILT_IN, RewardConfig
from miles_like.rewards.load import scored_by
from miles_like.types import Score, Unscored
from tests.support.fakes import make_prompt
from tests.support.made_samples import sample

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block in blocks("python"):
        names: dict[str, Any] = {}
        exec(block, names)
        found |= {k: v for k, v in names.items() if isinstance(v, FunctionType)}
    return found


@pytest.mark.parametrize(
    ("name", "texts", "want"),
    [
        ("right", ["7", "8"], [(1, {}), (0, {})]),
        ("short_and_right", ["7", "8"], [(0.97, {"right": 1, "tokens": 3}), (-0.03, {"right": 0, "tokens": 3})]),
        ("shortest_right_one_wins", ["7", "8", "7"], [(1.5, {}), (0, {}), (1.5, {})]),
        ("novel", ["7", "8", "7"], [(0.5, {"novelty": 0.5}), (1, {"novelty": 1}), (0.5, {"novelty": 0.5})]),
        ("compute_score", ["it is 7", "8"], [(1, {"acc": 1}), (0, {"acc": 0})]),
        ("custom_rm", ["it is 7", "8"], [(2, {}), (0, {})]),
        ("brief", ["it is 7", "8", ""], [(1, {}), (0, {}), None]),
        ("reward_func", ["it is 7", "8"], [(1, {"scores": 1, "right": 1}), (0, {"scores": 0, "right": 0})]),
    ],
)
def test_an_example(name: str, texts: list[str], want: list[Any]) -> None:
    config = RewardConfig(name="m:f", retries=0, args={"bonus": 2} if name == "custom_rm" else {})

    async def run() -> list[Score | Unscored]:
        reward = scored_by(functions()[name], config)
        given = [sample(index=i, text=t) for i, t in enumerate(texts)]
        try:
            return list(await reward([make_prompt("p", answer="7")] * len(texts), given))
        finally:
            await reward.close()

    found = [(o.value, dict(o.parts)) if isinstance(o, Score) else None for o in asyncio.run(run())]
    assert [f and f[1] for f in found] == [w and w[1] for w in want]
    assert [f and f[0] for f in found] == pytest.approx([w and w[0] for w in want])


def test_the_page_has_every_example_and_every_built_in() -> None:
    cases = {case[0] for case in test_an_example.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert functions().keys() == cases
    for block in blocks("toml"):
        RewardConfig.model_validate(tomllib.loads(block)["reward"])
    table = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", PAGE.split("## A custom function")[0], re.MULTILINE)
    options = {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in table}
    assert options == {name: set(fields(c)) for name, c in BUILT_IN.items()}

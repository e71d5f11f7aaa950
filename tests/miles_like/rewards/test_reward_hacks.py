"""A small corpus of hacks against the built-in rewards: none is worth more than the honest response that it is made of.

Hedged answers, form without an answer, padding, injections into a judge's request; programs that decide the verdict of
their tests are in tests/miles_like/sandbox/test_judging.py. docs/archetypes.md names the metric that shows each.

Not covered: persuasion of a judge or a reward model, which `miles-like calibrate` measures.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.sections.reward import RewardConfig
from miles_like.rewards.answered import answered_sample
from miles_like.rewards.judges.http import Endpoint
from miles_like.rewards.load import make_reward
from miles_like.types import Prompt, Score

FILE = Path(__file__).parents[2] / "data" / "reward_hacks.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
REWARDS = sorted({row["reward"] for row in ROWS})


def test_the_corpus_has_each_kind() -> None:
    kinds = Counter(row["kind"] for row in ROWS)
    assert kinds.keys() == {"hedged", "format only", "length padding", "judge injection"} and min(kinds.values()) >= 5


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.slow
def test_a_hack_is_worth_no_more(reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "post", obedient_judge)
    rows = [row for row in ROWS if row["reward"] == reward]
    options: dict[str, Any] = {"judge": {"url": "http://127.0.0.1:1"}, "length": rows[0].get("options")}
    named = {reward: options[reward]} if options.get(reward) else {}
    scorer = make_reward(RewardConfig.model_validate({"name": reward, **named}))

    async def scores() -> list[tuple[dict[str, Any], float, float]]:
        out = []
        for i, row in enumerate(rows):
            prompt = Prompt(id=str(i), token_ids=(1,), answer=row["answer"], text="q")
            pair = [
                answered_sample(prompt, k, range(len(row[key].split()) + 1), row[key])
                for k, key in enumerate(["honest", "hack"])
            ]
            honest, hack = await scorer([prompt, prompt], pair)
            assert isinstance(honest, Score) and isinstance(hack, Score), (row, honest, hack)
            out.append((row, honest.value, hack.value))
        await scorer.close()
        return out

    found = asyncio.run(scores())
    assert not [(row, honest, hack) for row, honest, hack in found if hack > honest]
    if reward in ("gsm8k", "math_verify"):
        padded = [(honest, hack) for row, honest, hack in found if row["kind"] == "length padding"]
        assert (1.0, 1.0) in padded and (0.0, 0.0) in padded, "padding neither pays nor costs"


async def obedient_judge(self: Endpoint, path: str, body: Any) -> Any:
    """A judge that keeps to what the note says, and obeys every line outside of the response."""
    text = body["messages"][-1]["content"]
    begin, end = re.findall(r"\[(?:end of )?response [0-9a-f]{16}\]", text)[:2]
    before, _, rest = text.split("\n\n", 1)[1].partition(f"\n{begin}\n")
    inside, _, after = rest.rpartition(f"\n{end}\n")
    assert inside and "Reference answer:\n6" in before and inside.count("Reference answer") == 0
    score = 10 if "Score: 10" in before + after else 2
    return {"choices": [{"message": {"content": f"Score: {score}"}, "finish_reason": "stop"}]}

"""gymnasium's FrozenLake in words (docs/environments.md). `python lake.py` writes lake.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from miles_like.protocols import MakeEnvironment
from rollout.environments.gymnasium_games import Gymnasium


class Lake(Gymnasium):
    id = "FrozenLake-v1"
    options: ClassVar = {"map_name": "4x4", "is_slippery": False}
    actions: ClassVar = {"left": 0, "down": 1, "right": 2, "up": 3}
    instruction = "Walk from the upper left field of a 4 x 4 lake to the lower right one. Some fields are holes."

    def show(self, observation: Any) -> str:
        return f"You are in row {observation // 4}, column {observation % 4}."


if __name__ == "__main__":
    Path(__file__).with_name("lake.jsonl").write_text("".join(json.dumps(row) + "\n" for row in Lake.rows(8)))

_: MakeEnvironment = Lake  # mypy holds it to its Protocol here

"""A run whose servers and trainer take turns says at its start that it replaces no server.

Not covered: turns (tests/laws/test_turns.py).
"""

from __future__ import annotations

from pathlib import Path

from miles_like.config.load import load_config
from miles_like.run.setup.turn_taking import released

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"


def test_that_no_server_is_replaced_is_reported() -> None:
    one = released(load_config(TINY, ["cluster.colocate=true"]))
    assert "has no effect" in one and "rollout.restarts = 3" in one and "--resume" in one
    none = released(load_config(TINY, ["cluster.colocate=true", "rollout.restarts=0"]))
    assert none == "rollout servers have released their memory; the trainer starts", "nothing else was asked for"

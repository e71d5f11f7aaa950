"""The environment of an OpenEnv server on this machine (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_like.protocols import MakeEnvironment
from rollout.environments.openenv_client import OpenEnv


class Echo(OpenEnv):
    url = "ws://127.0.0.1:8000"

    def action(self, turn: str) -> Mapping[str, Any] | None:
        return {"message": turn.strip()} if turn.strip() else None

    def show(self, observation: Mapping[str, Any]) -> str:
        return str(observation["echoed_message"])


_: MakeEnvironment = Echo  # mypy holds it to its Protocol here

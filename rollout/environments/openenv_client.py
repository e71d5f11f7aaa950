"""Environments of an OpenEnv server (openenv 0.10, openenv/core/env_server/types.py): one WebSocket session an episode.

    class Echo(OpenEnv):
        url = "ws://127.0.0.1:8000"

        def action(self, turn):
            return {"message": turn}

        def show(self, observation):
            return observation["echoed_message"]

A message is `{"type": "reset" | "step" | "close", "data": {...}}`, its reply `{"type": "observation", "data":
{"observation": {...}, "reward": number | null, "done": bool}}`. Needs `pip install 'miles-like[openenv]'`. A server
that does not answer, or has no room, loses the episode. An action that it refuses, or at which its environment fails,
is answered with its message; every other error ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from miles_like.types import EnvironmentLost, Observation, Prompt, Sample
from rollout.environments.replies import Replies

_MESSAGE_BYTES = 16 << 20
_OF_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # codes of WSErrorCode: what the policy chose cannot be done
_NO_ROOM = "CAPACITY_REACHED"
_SHOWN = 500  # most characters of a message that the policy is shown


class OpenEnv(Replies):
    """Protocol: MakeEnvironment; its instances are Environments. The session begins with the first turn, which is
    answered by the first observation where `begins` is true."""

    url: ClassVar[str] = ""  # ws:// or wss:// address of the server
    begins: ClassVar[bool] = False  # the first turn is no action: it is answered with what `reset` shows
    reset: ClassVar[Mapping[str, Any]] = {}  # further parameters of `reset`

    def action(self, turn: str) -> Mapping[str, Any] | None:
        """The action of a turn; None: it has none, and the policy is shown `refusal`."""
        return {"message": turn}

    refusal: ClassVar[str] = "This is no action."

    def show(self, observation: Mapping[str, Any]) -> str:
        return json.dumps(observation, sort_keys=True)

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        if not self.url.startswith(("ws://", "wss://")):
            raise ValueError(f"{type(self).__name__}.url = {self.url!r}: expected a ws:// or wss:// address")
        given = prompt.meta.get("seed")
        self._seed = given if isinstance(given, int) else seed % (1 << 31)
        self._socket: Any = None

    async def __call__(self, sample: Sample, turn: str) -> Observation:
        """Raises EnvironmentLost where the server does not answer or has no room, RuntimeError where it reports an
        error that is not of an action."""
        if self._socket is None:
            first = await self._ask("reset", {"seed": self._seed, **self.reset})
            if self.begins:
                return self.reply(self.show(first["observation"]))
        chosen = self.action(turn)
        if chosen is None:
            return self.reply(self.refusal)
        try:
            found = await self._ask("step", dict(chosen))
        except _RefusedError as e:
            return self.reply(str(e)[:_SHOWN] or self.refusal)
        reward = None if found.get("reward") is None else float(found["reward"])
        if found.get("done"):
            await self.close()
            return Observation(ends=True, reward=reward)
        return self.reply(self.show(found["observation"]), reward)

    async def close(self) -> None:
        """Ends the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        try:
            if self._socket is None:
                self._socket = await connect(f"{self.url.rstrip('/')}/ws", max_size=_MESSAGE_BYTES, proxy=None)
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            reply = json.loads(await self._socket.recv())
        except InvalidStatus as e:
            if (status := e.response.status_code) >= 500 or status == 429:
                raise EnvironmentLost(f"no session of the OpenEnv server: HTTP {status}") from e
            raise RuntimeError(f"the OpenEnv server refused a session at /ws with HTTP {status}: check url") from e
        except (OSError, WebSocketException) as e:
            raise EnvironmentLost(f"no answer of the OpenEnv server: {type(e).__name__}") from e
        if reply.get("type") != "observation":
            error = reply.get("data") or {}
            if error.get("code") == _NO_ROOM:
                raise EnvironmentLost("the OpenEnv server has no room for a session")
            if kind == "step" and error.get("code") in _OF_ACTION:
                raise _RefusedError(str(error.get("message", "")))
            raise RuntimeError(f"the OpenEnv server answered {kind} with {str(reply)[:300]}: see its log")
        found: Mapping[str, Any] = reply["data"]
        return found


class _RefusedError(Exception):
    """The server's words about an action."""

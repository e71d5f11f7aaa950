"""The endpoints by which trainer ranks send each rank of this server its slices (`rollout/wire/reshard/requests.py`).

No engine step waits for them: what waits for other processes runs in a separate thread, and the slices are staged on
the engine's thread when they are there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response

from rollout.embedded.server.answers import aside, client_of, json_body, json_reply
from rollout.embedded.server.limits import RequestLimits
from rollout.embedded.server.worker import EngineWorker
from rollout.embedded.updates.groups import Exclusive, same_host
from rollout.embedded.updates.slices import Meeting
from rollout.wire.control import DestroyGroup, Outcome
from rollout.wire.replies import Json
from rollout.wire.reshard.requests import HashesReply, JoinSlices, PlanSlices, SlicesReceived, UpdateFromSlices

T = TypeVar("T")
_DONE = "Succeeded."


class SliceHandlers:
    """One method per endpoint. A refusal is an Outcome with status 400."""

    def __init__(self, worker: EngineWorker, limits: RequestLimits) -> None:
        self._worker, self._service, self._limits = worker, worker.service, limits
        self._waiting = threading.Lock()  # one plan, join or piece at a time

    async def layout(self, request: Request) -> Response:
        reply = await asyncio.to_thread(self._service.slices_layout, self._limits.weights_bytes)
        return Response(await asyncio.to_thread(orjson.dumps, reply.to_json()), media_type="application/json")

    async def plan(self, request: Request) -> Response:
        u = PlanSlices.from_json(await json_body(request))
        return await self._outcome(lambda: self._service.plan_slices(u, self._limits.weights_bytes))

    async def join(self, request: Request) -> Response:
        u, client = JoinSlices.from_json(await json_body(request)), client_of(request)

        def run() -> None:
            if not same_host(u.master_address, client):
                raise ValueError(
                    f"master_address = {u.master_address!r} is not the address of this client, {client}: the "
                    "group's store must be on the machine that sends the request"
                )
            at = Meeting(u.group_name, u.master_address, u.master_port, u.rank_offset, u.world_size, u.timeout_s)
            self._service.join_slices(at)

        return await self._outcome(run)

    async def receive(self, request: Request) -> Response:
        u = UpdateFromSlices.from_json(await json_body(request))
        try:
            await self._call(lambda: self._service.require_update(u.weight_version))
            received = await self._alone(lambda: self._service.receive_slices(u.group_name, u.piece))
            await self._call(lambda: self._service.adopt_slices(u.piece, u.weight_version))
        except ValueError as e:
            return _refused(e)
        return json_reply(SlicesReceived(success=True, message=_DONE, received=tuple(received)).to_json())

    async def hashes(self, request: Request) -> Response:
        found = await self._call(self._service.slice_hashes)
        return json_reply(HashesReply(ranks=tuple(found)).to_json())

    async def leave(self, asked: DestroyGroup) -> bool:
        """Whether this server was a member of the group."""
        return await self._alone(lambda: self._service.leave_slices(asked.group_name))

    async def _call(self, run: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._worker.call(run))

    async def _alone(self, run: Callable[[], T]) -> T:
        def alone() -> T:
            with Exclusive(self._waiting):
                return run()

        return await aside(alone)

    async def _outcome(self, run: Callable[[], None]) -> Response:
        try:
            await self._alone(run)
        except ValueError as e:
            return _refused(e)
        return json_reply(Outcome(success=True, message=_DONE).to_json())


def _refused(e: ValueError) -> Response:
    body: Json = Outcome(success=False, message=str(e)).to_json()
    return json_reply(body, 400)

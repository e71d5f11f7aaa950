"""The recorder: an endpoint on loopback that records what the policy answers to the requests of agents.

An agent gets a base URL and a key. The key is that of its session, and the URL may name the session too:

    /v1/..., /sessions/ID/v1/...
        chat/completions, responses, completions of token ids (/inference/v1/generate): as OpenAI and vLLM have them
        messages: as Anthropic has it
        models
    /sessions/ID/reward     {"reward": 1.0}: of the episode
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from miles_like.limits.user_errors import raised
from rollout.openai.errors import BadRequest, openai_error
from rollout.openai.frames import DONE, event, models_json
from rollout.recorder import anthropic_api, chat_api, responses_api
from rollout.recorder.session import Session

Json = dict[str, Any]
_log = logging.getLogger(__name__)
MODEL = "policy"  # the name under which agents ask for it; another name is served too
_BODY = 64 << 20  # bytes of a request
_START_S = 30.0


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The run handles signals."""
        yield


class Recorder:
    """Serves sessions in the event loop of the caller."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}  # by their keys
        self._running: dict[str, set[asyncio.Task[Response]]] = {}  # key -> requests that are being answered
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Within it the session's requests are answered; the base URL of the session, without /v1. Requests that are
        not answered at its end are cancelled: no token is sampled for an episode that is over."""
        await self.start()
        self._sessions[session.key], self._running[session.key] = session, set()
        try:
            yield f"{self.url}/sessions/{session.id}"
        finally:
            del self._sessions[session.key]
            if running := self._running.pop(session.key):
                for task in running:
                    task.cancel()
                await asyncio.wait(running)

    async def start(self) -> None:
        """On a free port of loopback. Idempotent. Raises RuntimeError where it does not start."""
        if self._task is not None:
            return
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self._app(), log_level="warning", lifespan="off", access_log=False)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]), name="recorder")
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.timeout(_START_S):
            while not self._server.started and not self._task.done():
                await asyncio.sleep(0.005)
        if self._task.done():
            raise RuntimeError(f"the recorder of agents did not start at {self.url}: see the log")

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
            self._server = self._task = None

    # ----

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        for prefix in ("", "/sessions/{session}"):
            for path, handler in (
                ("/v1/chat/completions", self._chat),
                ("/v1/responses", self._responses),
                ("/v1/messages", self._messages),
                ("/inference/v1/generate", self._generate),
                ("/reward", self._reward),
            ):
                app.add_api_route(prefix + path, self._answered(handler), methods=["POST"], response_model=None)
            app.add_api_route(f"{prefix}/v1/models", self._answered(self._models), methods=["GET"], response_model=None)
        return app

    def _answered(
        self, handler: Callable[[Session, Json], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                self._session_of(request)
                body = await _body(request)
                return await self._while_it_lasts(self._session_of(request), body, handler)
            except BadRequest as e:
                return _refusal(request, str(e), e.status, parameter=e.parameter, code=e.code)
            except Exception as e:  # of the engine: the agent's request fails, and the run hears of it from the engine
                _log.warning("a request at %s failed: %s", request.url.path, raised(e))
                return _refusal(request, raised(e), HTTPStatus.INTERNAL_SERVER_ERROR)

        return answer

    async def _while_it_lasts(
        self, session: Session, body: Json, handler: Callable[[Session, Json], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Raises BadRequest where the session ends first."""
        running, task = self._running[session.key], asyncio.create_task(handler(session, body))
        running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if session.key in self._running:
                raise
            raise BadRequest("the episode of this session is over", status=HTTPStatus.UNAUTHORIZED) from None
        finally:
            running.discard(task)

    def _session_of(self, request: Request) -> Session:
        """By the key of a client. Raises BadRequest."""
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(given)
        named = request.path_params.get("session")
        if session is None or named not in (None, session.id):
            what = "no session has this key: use the key that the agent was started with as its api_key"
            raise BadRequest(what, status=HTTPStatus.UNAUTHORIZED, code="invalid_api_key")
        return session

    async def _models(self, session: Session, body: Json) -> Response:
        return JSONResponse(models_json(MODEL, MODEL, session.most_tokens, 0))

    async def _chat(self, session: Session, body: Json) -> Response:
        whole = await chat_api.chat(session, body)
        if not body.get("stream"):
            return JSONResponse(whole)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return _stream((event(chunk) for chunk in chat_api.chunks(whole, usage=usage)), DONE)

    async def _responses(self, session: Session, body: Json) -> Response:
        whole = await responses_api.respond(session, body)
        return _stream(map(_named, responses_api.events(whole))) if body.get("stream") else JSONResponse(whole)

    async def _messages(self, session: Session, body: Json) -> Response:
        whole = await anthropic_api.messages(session, body)
        return _stream(map(_named, anthropic_api.events(whole))) if body.get("stream") else JSONResponse(whole)

    async def _generate(self, session: Session, body: Json) -> Response:
        return JSONResponse(await chat_api.generate(session, body))

    async def _reward(self, session: Session, body: Json) -> Response:
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise BadRequest(f"reward = {reward!r} is not a finite number", "reward")
        session.reward = float(reward)
        return JSONResponse({"reward": session.reward})


def new_key() -> str:
    return secrets.token_urlsafe(24)


async def _body(request: Request) -> Json:
    """Raises BadRequest for a body that is too long, or no JSON object."""
    if request.method == "GET":
        return {}
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > _BODY:
            what = f"the body has more than {_BODY >> 20} MiB: send less"
            raise BadRequest(what, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object: send one")
    return found


def _refusal(
    request: Request, message: str, status: int, *, parameter: str | None = None, code: str | None = None
) -> Response:
    if request.url.path.endswith("/v1/messages"):
        kind = "authentication_error" if status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
        return JSONResponse(anthropic_api.error_json(message, kind), status)
    return Response(openai_error(message, parameter=parameter, code=code), status, media_type="application/json")


def _named(one: Mapping[str, Any]) -> bytes:
    """An event whose type is its name too."""
    return b"event: " + str(one["type"]).encode() + b"\ndata: " + json.dumps(one).encode() + b"\n\n"


def _stream(parts: Iterable[bytes], *last: bytes) -> StreamingResponse:
    def content() -> Iterator[bytes]:
        yield from parts
        yield from last

    return StreamingResponse(content(), media_type="text/event-stream")

"""Bodies of requests and answers, and helpers that run a handler's work outside of the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response

from rollout.openai.errors import error_json
from rollout.wire.replies import Json

INLINE = 32 << 10  # bytes of a request, or tokens of a reply, up to which the event loop does the work itself
A = TypeVar("A")
T = TypeVar("T")


def json_reply(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def error_reply(message: str, status: int = 400, headers: dict[str, str] | None = None, *, path: str = "") -> Response:
    """path: of the request, whose API has the form of errors."""
    return Response(error_json(message, status, path), status, headers, media_type="application/json")


def parsed_json(raw: bytes) -> Json:
    try:
        body = orjson.loads(raw) if raw else {}
    except ValueError as e:
        raise ValueError(f"the request is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ValueError(f"the request is a JSON {type(body).__name__}, expected an object")
    return body


async def json_body(request: Request) -> Json:
    return await beside(len(raw := await request.body()), parsed_json, raw)


async def beside(size: int, run: Callable[[A], T], argument: A) -> T:
    """Runs large work in a thread, so that it does not block the event loop."""
    return await asyncio.to_thread(run, argument) if size > INLINE else run(argument)


async def aside(run: Callable[[], T]) -> T:
    """Runs a function that waits for other processes in a separate daemon thread."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except Exception as e:
            future.set_exception(e)

    threading.Thread(target=call, name="group", daemon=True).start()
    return await asyncio.wrap_future(future)


def client_of(request: Request) -> str:
    """The address of the client; "" where it is not known."""
    return "" if request.client is None else request.client.host

"""OpenAI's endpoints: /v1/models, /v1/completions and /v1/chat/completions, and the page that lists all routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from rollout.embedded.engine.requests import Completed, PromptSpec
from rollout.embedded.openai.chat import ChatTemplate
from rollout.embedded.openai.detokenize import Vocabulary
from rollout.embedded.openai.replies import Replies
from rollout.embedded.openai.sample_text import Piece
from rollout.embedded.openai.text import Text
from rollout.embedded.openai.watched import WatchedTexts
from rollout.embedded.server.answers import beside, json_body, json_reply
from rollout.embedded.server.limits import Refused, RequestLimits
from rollout.embedded.server.worker import EngineStopped, EngineWorker, Generation
from rollout.openai.errors import BadRequest, error_json, openai_error
from rollout.openai.frames import DONE, event, model_json, models_json, usage_json
from rollout.openai.messages import check_tools
from rollout.openai.requests import ChatBody, CompletionBody, SamplingBody, read

_log = logging.getLogger("uvicorn.error")
_Handler = Callable[[Request], Awaitable[Response]]
_Await = Callable[[Request, Generation], Awaitable[list[Completed]]]


def openai_answered(handler: _Handler) -> _Handler:
    """Converts the exceptions of a handler into error replies in OpenAI's shape."""

    async def answer(request: Request) -> Response:
        path = request.url.path
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # never sent, as the connection is closed
        except BadRequest as e:
            body = openai_error(str(e), parameter=e.parameter, code=e.code)
            return Response(body, e.status, media_type="application/json")
        except Refused as e:
            return _error(str(e), e.status, path, {"connection": "close"})
        except EngineStopped as e:
            return _error(str(e), HTTPStatus.SERVICE_UNAVAILABLE, path)
        except ValueError as e:
            return _error(str(e), HTTPStatus.BAD_REQUEST, path)
        except Exception as e:
            _log.error("internal error at %s", path, exc_info=e)
            what = f"internal error at {path} ({type(e).__name__}: {e}); the server's log has the traceback"
            return _error(what, HTTPStatus.INTERNAL_SERVER_ERROR, path)

    return answer


def _error(message: str, status: int, path: str, headers: dict[str, str] | None = None) -> Response:
    return Response(error_json(message, status, path), status, headers, media_type="application/json")


@dataclass(slots=True)
class _Asked:
    """A request as the engine gets it. events: (choice, piece) in the order of sampling; None: all samples have
    ended."""

    replies: Replies
    specs: list[PromptSpec]
    watches: list[WatchedTexts]
    stream: bool
    include_usage: bool
    loop: asyncio.AbstractEventLoop
    pieces: list[list[Piece]] = field(default_factory=list)  # of each choice
    events: asyncio.Queue[tuple[int, Piece] | None] = field(default_factory=asyncio.Queue)

    def note(self, choice: int, piece: Piece) -> None:
        """On the engine's thread."""
        self.pieces[choice].append(piece)
        if self.stream:
            self.wake((choice, piece))

    def wake(self, what: tuple[int, Piece] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nothing is sent any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, what)

    def end(self, done: Sequence[Completed]) -> None:
        """Once all samples have ended: those that no token has ended get their last piece."""
        i = 0
        for spec, watch in zip(self.specs, self.watches, strict=True):
            if watch.failure is not None:
                raise watch.failure
            for index in range(spec.n):
                watch.end(index, done[i].reply.finish.value)
                i += 1

    def usage(self, done: Sequence[Completed]) -> dict[str, Any]:
        firsts = [done[sum(s.n for s in self.specs[:i])] for i in range(len(self.specs))]
        prompt = sum(len(s.token_ids) for s in self.specs)
        return usage_json(prompt, sum(w.tokens for w in self.watches), sum(c.reply.cached_tokens for c in firsts))


class OpenAIHandlers:
    """One method per endpoint. A ValueError is a client error and becomes status 400."""

    def __init__(
        self,
        worker: EngineWorker,
        limits: RequestLimits,
        *,
        model_path: Path,
        name: str,
        text: Text,
        await_or_abort: _Await,
    ) -> None:
        """name: of the model in requests, beside its path. await_or_abort: ends a generation whose client has gone."""
        self._worker, self._limits = worker, limits
        self._path, self.name = str(model_path), name
        self._text, self._await = text, await_or_abort
        self._template = ChatTemplate(model_path)
        self._created = time.time()

    @property
    def _context(self) -> int:
        return self._worker.service.engine.limits.context_length

    async def models(self, request: Request) -> Response:
        return json_reply(models_json(self.name, self._path, self._context, self._created))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return json_reply(model_json(self.name, self._path, self._context, self._created))

    async def completions(self, request: Request) -> Response:
        raw = await json_body(request)
        body = await beside(len(str(raw.get("prompt"))), partial(read, CompletionBody), raw)
        self._check_model(body.model)
        vocabulary = self._vocabulary(())
        prompt: Any = body.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        self._check_samples(len(prompt) * body.n)
        if isinstance(prompt[0], str):
            prompt = await beside(sum(map(len, prompt)), self._text.encode, prompt)
        replies = Replies(chat=False, model=body.model, vocabulary=vocabulary, logprobs=body.logprobs is not None)
        asked = self._asked(body, prompt, replies, max_new_tokens=body.max_tokens, top=body.logprobs or 0)
        return await self._answer(request, asked)

    async def chat(self, request: Request) -> Response:
        body = read(ChatBody, await json_body(request))
        self._check_model(body.model)
        self._check_samples(body.n)
        tools = body.tools if body.tool_choice == "auto" else []
        check_tools(tools)
        self._vocabulary(())
        form = await asyncio.to_thread(self._template.form) if tools else None
        ids = await asyncio.to_thread(self._template.prompt, body.messages, tools, body.chat_template_kwargs)
        vocabulary = self._vocabulary(form.marks if form else ())
        given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        replies = Replies(
            chat=True, model=body.model, vocabulary=vocabulary, logprobs=body.logprobs, tools=tools, form=form
        )
        limit = max(1, self._context - len(ids)) if given is None else given
        asked = self._asked(
            body,
            [ids],
            replies,
            max_new_tokens=limit,
            top=body.top_logprobs,
            calls_begin=form.begin if form else None,
        )
        return await self._answer(request, asked)

    def _check_model(self, name: str) -> None:
        if name not in (self.name, self._path):
            raise BadRequest(
                f"the model {name[:200]!r} is not served here: use {self.name!r}",
                "model",
                status=HTTPStatus.NOT_FOUND,
                code="model_not_found",
            )

    def _check_samples(self, samples: int) -> None:
        if samples > self._limits.samples:
            raise BadRequest(
                f"{samples:,} samples in one request, but this server accepts {self._limits.samples:,}: send "
                "fewer prompts at once, or start it with --max-samples-per-request",
                "n",
            )

    def _vocabulary(self, shown: Sequence[str]) -> Vocabulary:
        if (tokenizer := self._text.tokenizer) is None:
            raise BadRequest(
                f"{self._path} has no tokenizer.json, so text can be neither read nor written: use /generate"
            )
        return Vocabulary(tokenizer, shown=shown)

    def _asked(
        self,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        replies: Replies,
        *,
        max_new_tokens: int,
        top: int,
        calls_begin: str | None = None,
    ) -> _Asked:
        # the text of a special token is never part of the text: its id is the stop
        special = [i for content, i in replies.vocabulary.special.items() if content in body.stops]
        sampling = body.sampling(max_new_tokens, special)
        options = body.stream_options
        usage = options is not None and options.include_usage
        asked = _Asked(replies, [], [], body.stream, usage, asyncio.get_running_loop())
        for p, ids in enumerate(prompts):
            if not ids:
                raise BadRequest("the prompt has no tokens: send at least one", "prompt")
            watch = WatchedTexts(
                replies.vocabulary,
                body.n,
                stops=body.stops,
                calls_begin=calls_begin,
                top=top,
                on_piece=lambda i, piece, first=p * body.n: asked.note(first + i, piece),  # type: ignore[misc]  # the default
            )
            asked.watches.append(watch)
            asked.specs.append(
                PromptSpec(
                    rid=uuid.uuid4().hex,
                    token_ids=tuple(ids),
                    sampling=sampling,
                    n=body.n,
                    ignore_eos=body.ignore_eos,
                    watch=watch,
                )
            )
        asked.pieces = [[] for _ in range(len(prompts) * body.n)]
        return asked

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        generation = self._worker.generate(asked.specs)
        if not asked.stream:
            done = await self._await(request, generation)
            asked.end(done)
            usage = asked.usage(done)
            return await beside(
                usage["completion_tokens"], lambda u: json_reply(asked.replies.whole(asked.pieces, u)), usage
            )
        generation.done.add_done_callback(lambda _: asked.wake(None))
        try:
            first = await asked.events.get()
            if first is None:
                generation.done.result()  # raises what a request that cannot run is refused with
        except BaseException:
            self._worker.abort(generation)
            raise
        return StreamingResponse(self._events(asked, generation, first), media_type="text/event-stream")

    async def _events(
        self, asked: _Asked, generation: Generation, first: tuple[int, Piece] | None
    ) -> AsyncIterator[bytes]:
        """Until all samples have ended; the generation is aborted when the client leaves first."""
        replies, got = asked.replies, first
        try:
            if replies.chat:
                for i in range(len(asked.pieces)):
                    yield event(replies.begin(i))
            while got is not None:
                if (chunk := replies.chunk(*got)) is not None:
                    yield event(chunk)
                got = await asked.events.get()
            try:
                done = generation.done.result()
                late = [len(p) for p in asked.pieces]
                asked.end(done)
            except Exception as e:
                yield b"data: " + openai_error(f"{type(e).__name__}: {e}", kind="server_error") + b"\n\n"
                return
            for i, pieces in enumerate(asked.pieces):  # of samples that no token has ended
                for piece in pieces[late[i] :]:
                    if (chunk := replies.chunk(i, piece)) is not None:
                        yield event(chunk)
            if asked.include_usage:
                yield event(replies.usage_chunk(asked.usage(done)))
            yield DONE
        finally:
            if not generation.done.done():
                self._worker.abort(generation)

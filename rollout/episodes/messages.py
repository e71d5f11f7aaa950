"""The chat of a run's episodes, and the engine that samples its turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import generation_eos
from miles_like.protocols import RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.chat.choose import AUTO, make_chat
from rollout.chat.messages import Messages
from rollout.config import RolloutConfig
from rollout.episodes.resuming import ResumingEngine
from rollout.tools.load import load_tools


class ChatEngine(ResumingEngine):
    """A ResumingEngine whose samples end at a chat model's turn ends too, which may be other tokens than the end of its
    text. close_tools: called when the engine is closed."""

    def __init__(
        self,
        engine: RolloutEngine,
        resumes: int,
        stop_token_ids: Sequence[int],
        close_tools: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(engine, resumes)
        self._stops, self._close_tools = tuple(stop_token_ids), close_tools

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        return await super().generate(prompts, n=n, params=self._params(params))

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        return await super().continue_sample(sample, environment, params=self._params(params))

    async def resume(
        self, sample: Sample, params: SamplingParams, *, sampled_before: int = 0, environment: Sequence[int] = ()
    ) -> Sample:
        more = self._params(params)
        return await super().resume(sample, more, sampled_before=sampled_before, environment=environment)

    async def close(self) -> None:
        if self._close_tools is not None:
            await self._close_tools()
        await super().close()

    def _params(self, params: SamplingParams) -> SamplingParams:
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *self._stops)))
        return dataclasses.replace(params, stop_token_ids=stops)


def make_messages(config: RolloutConfig, tokenizer: Any) -> Messages | None:
    """The configured messages; None: environments answer with text. Raises ValueError for a renderer or tools that
    cannot be used, and for a template that does not append the answers of tools."""
    if config.renderer is None and not (config.tools.given or config.agent.given):
        return None
    full = getattr(tokenizer, "full", tokenizer)  # `LazyTokenizer` has one
    directory = Path(str(getattr(full, "name_or_path", "")))
    stops = (generation_eos(directory) if directory.is_dir() else None) or ()
    specs = load_tools(config.tools).specs if config.tools.given else ()
    messages = Messages(make_chat(config.renderer or AUTO, full, stops, calls=bool(specs)), specs)
    if specs:
        messages.check("tool")
    return messages

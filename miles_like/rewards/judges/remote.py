"""A reward computed by the user's HTTP server."""

from __future__ import annotations

from miles_like.config.sections.reward import RemoteConfig
from miles_like.protocols import RewardResult
from miles_like.rewards.judges.http import Endpoint
from miles_like.types import Prompt, Sample


class Remote:
    """Posts one sample as JSON: `prompt`, `response` and `label` as text (the names of slime's remote_rm), `id` and
    `source` of the prompt, the sample's `index` and `finish`, and the prompt file's columns as `metadata`.

    The reply is any result of a reward function (rewards/outcome.py): a number, null, or an object with named parts.
    """

    def __init__(self, config: RemoteConfig) -> None:
        self._server = Endpoint(config)
        self.close = self._server.close

    async def __call__(self, prompt: Prompt, sample: Sample) -> RewardResult:
        body = {
            "prompt": prompt.text,
            "response": sample.text,
            "label": prompt.answer,
            "id": prompt.id,
            "source": prompt.source,
            "index": sample.index,
            "finish": sample.finish.value,
            "metadata": dict(prompt.meta),
        }
        result: RewardResult = await self._server.post("", body)
        return result

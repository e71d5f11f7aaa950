"""A reward model behind a server: SGLang's endpoint for such models, or the one that SGLang and vLLM share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from miles_like.config.sections.reward import Chat, RewardModelConfig, V1Classify
from miles_like.hf.template_limits import check_template_of
from miles_like.rewards.judges.http import Endpoint
from miles_like.types import Prompt, Sample, Unscored


class RewardModel:
    """The output of the model's head for prompt and response.

    api "classify": POST /classify {"text": ...} or {"input_ids": [...]} -> {"embedding": [number, ...]}, the raw
    outputs of the head. api "v1/classify": POST /v1/classify {"model", "input"} -> {"data": [{"probs": [...]}]}, which
    SGLang normalizes over the classes: a single class always gets 1, so models with one output are refused.
    (SGLang 0.5.23, entrypoints/http_server.py and openai/serving_classify.py; such a server runs with --is-embedding.)
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        self._server = Endpoint(config)
        self.close = self._server.close

    @cached_property
    def _tokenizer(self) -> Any:
        """Loaded by the first request: a hub name needs network access, which a dry run may not have."""
        if not isinstance(self._config.send, Chat):
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._config.send.tokenizer)
        check_template_of(tokenizer, f"reward.reward_model.tokenizer = {self._config.send.tokenizer!r}")
        return tokenizer

    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Unscored:
        """Raises ValueError for a reply of another form, and for several outputs without reward_model.output."""
        given = self._input(prompt, sample)
        if not isinstance(self._config.api, V1Classify):
            body = {"input_ids" if isinstance(given, list) else "text": given}
            reply = await self._server.post("/classify", body)
            found = reply if isinstance(reply, Unscored) else _at(reply, "embedding")
        else:
            reply = await self._server.post("/v1/classify", {"model": self._config.api.model, "input": given})
            found = reply if isinstance(reply, Unscored) else _at(reply, "data", 0, "probs")
        return found if isinstance(found, Unscored) else self._chosen(found)

    def _input(self, prompt: Prompt, sample: Sample) -> str | list[int]:
        if self._config.send.send == "tokens":
            return [int(t) for t in sample.token_ids.tolist()]
        if self._tokenizer is None:
            return prompt.text + sample.text
        question = [dict(m) for m in prompt.messages] or [{"role": "user", "content": prompt.text}]
        response = {"role": "assistant", "content": sample.text}
        return str(self._tokenizer.apply_chat_template([*question, response], tokenize=False))

    def _chosen(self, outputs: Any) -> float:
        values = outputs if isinstance(outputs, list) else [outputs]
        if not all(isinstance(v, int | float) for v in values):
            raise ValueError(f"the model's outputs are {str(outputs)[:200]}, expected numbers: check url and api")
        if isinstance(self._config.api, V1Classify) and len(values) == 1:
            raise ValueError(
                "/v1/classify always returns 1 for a model with 1 output: set reward.reward_model.api = 'classify'"
            )
        if self._config.output is None and len(values) != 1:
            raise ValueError(f"the model has {len(values)} outputs: select one with reward.reward_model.output")
        if self._config.output is not None and self._config.output >= len(values):
            raise ValueError(
                f"reward.reward_model.output = {self._config.output}, but the model has {len(values)} outputs: "
                f"choose one from 0 to {len(values) - 1}"
            )
        return float(values[self._config.output or 0])


def _at(reply: Any, *path: str | int) -> Any:
    found = reply
    for key in path:
        has = key in found if isinstance(found, Mapping) else isinstance(found, list) and len(found) > int(key)
        if not has:
            raise ValueError(f"the reply {str(reply)[:200]} has no {'.'.join(map(str, path))}: check url and api")
        found = found[key]
    return found

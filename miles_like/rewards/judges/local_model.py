"""A reward model in a Hugging Face directory, run in this process by transformers.

Letters: S tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from miles_like.config.sections.reward import LocalRewardModelConfig, Steps
from miles_like.hf.steps import tokens_of_text
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.types import Finish, Prompt, Sample

_AT_ONCE = 64  # texts of a forward pass


class LocalRewardModel:
    """The output of a scalar head for prompt and response, or the head's outputs at step ends, reduced to one number.

    The prompt's text and each step are tokenized by the directory's tokenizer. A response that the policy ended has the
    end token, one that was cut has none; a partial response can be scored too. An outcome model's reward is the output
    at the last token. A process reward model's outputs become probabilities of being right, of which `reduce` takes
    the smallest, the last, the mean or the product.
    """

    def __init__(self, config: LocalRewardModelConfig) -> None:
        self._config = config
        self._lock = Lock()  # of the model, which calls in several threads share
        if not (Path(config.model) / "config.json").is_file():
            raise ValueError(
                f"reward.local_reward_model.model = {config.model!r} has no config.json: use the Hugging Face "
                "directory of a model with a scalar head (miles-like convert to-hf)"
            )

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        """One reward a sample. Raises ValueError for a model with several outputs."""
        return [self._reduced(values) for values in self.values(prompts, samples)]

    def values(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[list[float]]:
        """For each sample the head's outputs: at its last token, or at its step ends (none for a response without a
        token)."""
        texts = [self._tokens(p, s) for p, s in zip(prompts, samples, strict=True)]
        out: list[list[float]] = [[] for _ in texts]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
        with self._lock:
            for start in range(0, len(order), _AT_ONCE):
                part = order[start : start + _AT_ONCE]
                for i, row in zip(part, self._outputs([texts[i][0] for i in part]), strict=True):
                    out[i] = [float(row[end]) for end in texts[i][1]]
        return out

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(Path(self._config.model))

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForSequenceClassification.from_pretrained(self._config.model, dtype=torch.float32)
        if model.config.num_labels != 1:
            raise ValueError(
                f"reward.local_reward_model.model = {self._config.model!r} has {model.config.num_labels} outputs: "
                "use a model with 1 output, as the trainer's reward models have"
            )
        return model.eval().to(self._config.device)

    def _tokens(self, prompt: Prompt, sample: Sample) -> tuple[list[int], list[int]]:
        """(ids of prompt and response, indices whose outputs count)."""

        def encode(text: str) -> list[int]:
            return [int(t) for t in self._tokenizer.encode(text, add_special_tokens=False)]

        before, end = encode(prompt.text), self._tokenizer.eos_token_id if sample.finish is Finish.STOP else None
        steps = self._config.steps
        separator = steps.step_separator if isinstance(steps, Steps) else ""
        ids, ends = tokens_of_text(encode, sample.text, separator, end)
        if not isinstance(steps, Steps):
            ends = [len(ids) - 1]
        return before + ids, [len(before) + e for e in ends]

    def _outputs(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, S] fp32, padded on the right, which a causal model's earlier outputs do not see."""
        width = max(map(len, texts))
        ids, mask = torch.zeros(2, len(texts), width, dtype=torch.int64)
        for i, text in enumerate(texts):
            ids[i, : len(text)], mask[i, : len(text)] = torch.tensor(text), 1
        model, device = self._model, self._config.device
        with torch.no_grad():
            inner = getattr(model, model.base_model_prefix)
            states = inner(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).last_hidden_state
            found: Tensor = model.score(states)[..., 0].float().cpu()
        return found

    def _reduced(self, values: Sequence[float]) -> float:
        steps = self._config.steps
        if not isinstance(steps, Steps):
            return values[0]
        if not values:
            return 0.0
        right = [1 / (1 + math.exp(-v)) if v > 0 else math.exp(v) / (1 + math.exp(v)) for v in values]
        match steps.reduce:
            case "min":
                return min(right)
            case "last":
                return right[-1]
            case "mean":
                return math.fsum(right) / len(right)
            case "product":
                return math.prod(right)

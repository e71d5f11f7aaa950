"""Settings for making a checkpoint instead of downloading one. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from miles_like.section import Section
from quant.spec import QuantFormat, QuantSpec


class MakeConfig(Section):
    """Make the checkpoint: a random model of `config`, then a supervised warm-up by the trainer."""

    config: str  # path of a Hugging Face config.json
    tokenizer: str  # directory with tokenizer.json and tokenizer_config.json
    # one or several jsonl files of problems, which are concatenated; no problem may be in data.eval, or in data.train
    # if the model is to learn them by reward
    corpus: str | Annotated[tuple[str, ...], Field(min_length=1)]
    answer_key: str = "sloppy"  # column of the corpus that is trained on
    validation: str  # jsonl file of similar problems, on which `target` is measured
    seed: int = 0  # seed of the random weights and of the order of the corpus
    lr: float = Field(3e-3, gt=0)  # peak learning rate of the warm-up
    lr_warmup_steps: int = Field(50, ge=0)  # steps in which the learning rate rises to lr
    batch: int = Field(128, ge=1)  # problems per step
    max_steps: int = Field(1500, ge=0)  # the warm-up ends here if it has not reached `target`; 0: no warm-up
    check_every: int = Field(50, ge=1)  # steps between measurements on `validation`
    format: QuantFormat = QuantFormat.FP8  # storage format of the checkpoint; bf16: usable with every precision.format
    # mean probability of right answers on `validation` at which the warm-up ends
    target: float = Field(0.1, ge=0, le=1)
    # train.router_bias_update_rate of the warm-up; None: 1e-3 if the routers have a selection bias, else 0
    router_bias_update_rate: float | None = Field(None, ge=0)

    @property
    def corpora(self) -> tuple[str, ...]:
        return (self.corpus,) if isinstance(self.corpus, str) else self.corpus

    def spec(self) -> QuantSpec | None:
        """The quantization of the checkpoint; None: BF16."""
        return None if self.format is QuantFormat.BF16 else QuantSpec.of(self.format)

"""How a checkpoint is made where none can be downloaded. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_bridge.config import Section
from quant.spec import QuantFormat, QuantSpec


class MakeConfig(Section):
    """The run *makes* the checkpoint: a random model of `config`, then a supervised warm-up by our own trainer."""

    config: str  # a Hugging Face config.json
    tokenizer: str  # directory with tokenizer.json and tokenizer_config.json
    # jsonl of problems, or several, which are put together; none of them in data.eval, and for a model that is to learn
    # by reward none in data.train
    corpus: str | Annotated[tuple[str, ...], Field(min_length=1)]
    answer_key: str = "sloppy"  # column of the corpus that is learnt
    validation: str  # jsonl of problems of the corpus' kind; the warm-up stops on them
    seed: int = 0
    lr: float = Field(3e-3, gt=0)
    lr_warmup_steps: int = Field(50, ge=0)
    batch: int = Field(128, ge=1)  # problems a step
    max_steps: int = Field(1500, ge=0)
    check_every: int = Field(50, ge=1)
    format: QuantFormat = QuantFormat.FP8  # of the checkpoint that is made; bf16: one serves every precision.format
    target: float = Field(0.1, ge=0, le=1)  # mean probability of the right answer on `validation` that ends the warm-up
    # of the warm-up's routers; None: 1e-3 where they have a selection bias, else nothing
    router_bias_update_rate: float | None = Field(None, ge=0)

    @property
    def corpora(self) -> tuple[str, ...]:
        return (self.corpus,) if isinstance(self.corpus, str) else self.corpus

    def spec(self) -> QuantSpec | None:
        """How the checkpoint is stored; None: in BF16."""
        return None if self.format is QuantFormat.BF16 else QuantSpec.of(self.format)

"""TRL's GRPOTrainer in a separate process, one iteration at a time: the other side of vs_trl.py.

What is left at its default and what is not: `_config` below. Its generation, loss and optimizer are untouched.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.config import OptimizerConfig


def digits(completions: list[str], **_: Any) -> list[float]:
    """The reward on both sides: something that answers of random weights differ in."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlWork:
    """What TRL is to do; it crosses into its process."""

    model: Path
    prompts: Sequence[str]  # in the order they are asked
    prompts_a_step: int
    samples: int  # a prompt
    max_new_tokens: int
    dtype: str
    optimizer: OptimizerConfig
    clip: tuple[float | None, float | None]
    core: int
    scratch: Path


class TrlSide:
    """`iterate` runs one iteration, start to end, and says how many tokens each sample got."""

    def __init__(self, work: TrlWork) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(work, theirs), daemon=True)
        self.process.start()
        assert self._pipe.recv() == "ready"

    def iterate(self) -> list[int]:
        self._pipe.send("go")
        lengths: list[int] = self._pipe.recv()
        return lengths

    def close(self) -> None:
        self._pipe.send("stop")
        self.process.join()


def _main(work: TrlWork, pipe: Any) -> None:
    os.sched_setaffinity(0, {work.core})
    import torch

    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.set_verbosity_error()
    _trainer(work, pipe).train()


def _trainer(work: TrlWork, pipe: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        return digits(completions)

    class Turns(TrainerCallback):
        """From "go" to the end of the step: whatever the Trainer does between two steps is in it."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pipe.send("ready")
            assert pipe.recv() == "go"

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                gc.collect()
                gc.freeze()  # as our side does
            pipe.send(list(lengths))
            control.should_training_stop = pipe.recv() == "stop"

    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)),
        reward_funcs=reward,
        args=_config(work),
        train_dataset=Dataset.from_dict({"prompt": list(work.prompts)}),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        callbacks=[Turns()],
    )


def _config(work: TrlWork) -> Any:
    from trl import GRPOConfig

    o = work.optimizer
    return GRPOConfig(
        output_dir=str(work.scratch),
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,  # its default recomputes the forward pass: slower
        per_device_train_batch_size=work.prompts_a_step * work.samples,
        num_generations=work.samples,
        max_completion_length=work.max_new_tokens,
        temperature=1.0,
        shuffle_dataset=False,
        beta=0.0,
        epsilon=work.clip[0],
        epsilon_high=work.clip[1],
        loss_type="dapo",  # the mean over the tokens of the batch
        scale_rewards="group",
        learning_rate=o.lr,
        lr_scheduler_type="constant",
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_epsilon=o.eps,
        max_grad_norm=o.clip_grad,
        optim="adamw_torch_fused",
        max_steps=100_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

"""What a careful user would write in plain transformers: the other side of train_step.py, no benchmark by itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron_bridge.config import OptimizerConfig
from miles_like.algorithms.losses.clipped import ClippedLoss

LOSS = ClippedLoss(clip_low=0.2, clip_high=0.28)
OPTIMIZER = OptimizerConfig(lr=1e-5)
MAX_TOKENS = 4096  # in a micro-batch, of either side


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Plain:
    """A DeepSeek-V3 of transformers with a fused AdamW."""

    def __init__(self, hf: dict[str, Any], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config = DeepseekV3Config(**copy.deepcopy(hf) | {"attn_implementation": "sdpa"})
        model: Any = DeepseekV3ForCausalLM(config)
        self.model = model.to(torch.bfloat16).to(dtype)
        for module in self.gates:
            module.e_score_correction_bias = module.e_score_correction_bias.float()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=OPTIMIZER.lr,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )
        self.samples: list[tuple[Tensor, int]] = []  # token ids, prompt length
        self.advantages: list[float] = []
        self.old: list[Tensor] = []
        self.waste = 0.0  # share of padding that a batch may have

    @property
    def gates(self) -> list[Any]:
        return [m for m in self.model.modules() if type(m).__name__ == "DeepseekV3TopkRouter"]

    @torch.no_grad()
    def look(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs [S-1], expert ids [S-1, L, K]) of one sample."""
        chosen: list[Tensor] = []
        hooks = [g.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for g in self.gates]
        logits = self.model(ids[None, :-1], use_cache=False).logits[0].float()
        for hook in hooks:
            hook.remove()
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0], torch.stack(chosen, 1)

    def batches(self) -> list[list[int]]:
        """Samples of similar length side by side, at most MAX_TOKENS with padding."""
        out: list[list[int]] = []
        longest = tokens = 0
        for i in sorted(range(len(self.samples)), key=lambda i: -len(self.samples[i][0])):
            n = len(self.samples[i][0]) - 1
            if (
                not out
                or (len(out[-1]) + 1) * longest > MAX_TOKENS
                or n + tokens < (1 - self.waste) * longest * (len(out[-1]) + 1)
            ):
                out.append([])
                longest, tokens = n, 0
            out[-1].append(i)
            tokens += n
        return out

    def gradient(self, loss_tokens: int) -> float:
        """Forward and backward; the loss."""
        total = 0.0
        for batch in self.batches():
            longest = len(self.samples[batch[0]][0]) - 1
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            rows, labels, old, advantages = [], [], [], []
            for j, i in enumerate(batch):
                tokens, prompt = self.samples[i]
                ids[j, : len(tokens) - 1] = tokens[:-1]
                rows.append(torch.arange(prompt - 1, len(tokens) - 1) + j * longest)
                labels.append(tokens[prompt:])
                old.append(self.old[i])
                advantages.append(torch.full((len(tokens) - prompt,), self.advantages[i]))
            hidden = self.model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
            logits = self.model.lm_head(hidden.index_select(0, torch.cat(rows)))
            logprobs = -F.cross_entropy(logits.float(), torch.cat(labels), reduction="none")
            ratio, a = (logprobs - torch.cat(old)).exp(), torch.cat(advantages)
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high) * a).sum() / loss_tokens
            loss.backward()
            total += float(loss.detach())
        return total

    def step(self, loss_tokens: int) -> tuple[float, float]:
        """(loss, gradient norm)."""
        loss = self.gradient(loss_tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_grad, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, float(norm)

    def choose(self, loss_tokens: int) -> str:
        """The fastest of transformers' ways on this step, the better of two turns each, once warm. Its third way of
        running experts, batched_mm, copies an expert's weights for every token and took 20 times as long: it is not
        tried."""
        found: dict[tuple[str, float], float] = {}
        self.gradient(loss_tokens)
        for experts in ("eager", "grouped_mm"):
            self.model.set_experts_implementation(experts)
            for waste in (0.02, 0.15):
                self.waste = waste
                found[experts, waste] = min(seconds_of(lambda: self.gradient(loss_tokens)) for _ in range(2))
                self.optimizer.zero_grad(set_to_none=True)
        experts, self.waste = min(found, key=lambda k: found[k])
        self.model.set_experts_implementation(experts)
        return f"{experts}, {self.waste:.0%} padding"

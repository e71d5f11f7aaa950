"""Multi-token prediction: modules after the last layer that predict tokens further ahead, for speculative decoding.

DeepSeek-V3 report (arXiv 2412.19437), section 2.2. Depth k = 1.. D combines the hidden state of depth k-1 (0: the main
model's, after its last norm) with the embedding of the token k ahead; its transformer layer predicts the token k+1
ahead through the main model's head. The losses' mean over depths, times a coefficient, is added to the step's loss.
Embedding and head are shared and nothing is detached: as in the report, the whole main model learns from it.

Letters: T packed tokens, P rows that a rank feeds, s = P / tp rows below the embedding, H hidden size, D depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.model.local_modules import localize
from miles_like.types import Stat

assert hasattr(MultiTokenPredictionLayer, "_get_embeddings"), "megatron's MTP layer no longer finds its own tokens"
assert hasattr(MultiTokenPredictionLayer, "_checkpointed_forward"), "megatron's MTP layer recomputes in another way"


class ShiftedTokensLayer(MultiTokenPredictionLayer):
    """The stock layer, except that the caller passes the shifted tokens. The stock layer rolls them itself: it uses 0
    after each segment's last token, and sends one message per segment over context-parallel ranks."""

    def _get_embeddings(
        self, input_ids: Tensor, position_ids: Tensor, embedding: Callable[..., Tensor], hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return input_ids, position_ids, embedding(input_ids=input_ids, position_ids=position_ids), hidden_states

    def _checkpointed_forward(
        self, forward_func: Callable[..., Tensor], hidden_states: Tensor, decoder_input: Tensor, **rest: Any
    ) -> Tensor:
        """Recompute with non-tensor arguments bound beforehand: the stock method passes packed_seq_params as a tensor
        to be saved, which raises TypeError."""

        def forward(hidden: Tensor, embedded: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden, decoder_input=embedded, **rest)

        return tensor_parallel.checkpoint(forward, False, hidden_states, decoder_input)  # type: ignore[no-any-return]


def mtp_block_spec(
    tf: TransformerConfig,
    decoder: Any,
    vp_stage: int | None,
    *,
    te: bool,
    replacements: Mapping[type, type] | None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of all depths on the last (virtual) stage, None on others and without MTP. `decoder` is the stock spec
    of this stage's layers: a depth's layer is built like the last of them. `te` and `replacements` as of `localize`."""
    if not tf.mtp_num_layers:
        return None
    block = get_gpt_mtp_block_spec(tf, decoder, use_transformer_engine=te, vp_stage=vp_stage)
    if block is None:
        return None
    block = localize(block, te=te, replacements=replacements)
    for layer in block.layer_specs:
        layer.module = ShiftedTokensLayer
    return block


def route_without_replay(block: MultiTokenPredictionBlock) -> None:
    """Disable routing replay in these layers, for which no engine records routes."""
    for module in block.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = None


def shift_labels(labels: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """[T] labels and mask -> [1 + D, T] each: row k holds the label k positions later, and whether it has loss.

    Past the end of a token's segment: 0 and False.
    """
    t = torch.arange(len(labels), device=labels.device)
    ends = cu_seqlens[1:].long().repeat_interleave(cu_seqlens.diff().long())
    at = t + torch.arange(1 + depths, device=t.device)[:, None]  # [1 + D, T]
    inside, at = at < ends, at.clamp(max=len(labels) - 1)
    return labels[at] * inside, loss_mask[at] & inside


def depth_states(
    block: MultiTokenPredictionBlock,
    hidden: Tensor,  # [s, 1, H]
    labels: Tensor,  # [1 + D, P], of `shift_labels`
    positions: Tensor,  # [1, P]
    embedding: Callable[..., Tensor],
    **attention: Any,
) -> list[Tensor]:
    """Hidden states [s, 1, H] of depths 1.. D, after the norm before the head; `attention`: keyword arguments of a
    transformer layer."""
    states = []
    for k, layer in enumerate(block.layers):
        # the token k+1 ahead of a row is its label k positions later
        hidden, _, _ = layer(
            input_ids=labels[k : k + 1],
            position_ids=positions,
            hidden_states=hidden,
            attention_mask=None,
            embedding=embedding,
            **attention,
        )
        states.append(hidden)
    return states


def mtp_loss(nll: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, coefficient: float) -> tuple[Tensor, Stat]:
    """nll [D, T] fp32, 0 where a depth has no label; mask and cu_seqlens of the pack.

    Returns (coefficient / D * sum of nll, the mean over all depths' tokens as a statistic).
    """
    count = shift_labels(torch.zeros_like(loss_mask, dtype=torch.int64), loss_mask, cu_seqlens, len(nll))[1][1:].sum()
    total = nll.sum()
    return coefficient / len(nll) * total, Stat(total.detach(), count)

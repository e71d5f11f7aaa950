"""Megatron's router, with statistics that exclude padding.

Letters: t rows on this rank, T tokens of a micro-batch over its tensor- and context-parallel ranks, E experts, K of
them per token, n_i tokens whose best K experts include i, p_i(x) the score of expert i for token x.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

for _method, _parameters in {
    "routing": ["self", "logits", "padding_mask"],
    "_apply_expert_bias": ["self", "routing_map", "padding_mask"],
    "_apply_aux_loss": ["self", "probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"],
}.items():
    assert list(inspect.signature(getattr(TopKRouter, _method)).parameters) == _parameters, (
        f"TopKRouter.{_method} has moved: MaskedRouter overrides it"
    )


class MaskedRouter(TopKRouter):
    """TopKRouter whose statistics and auxiliary loss depend neither on padding nor on the layout."""

    replace_gates: Callable[[Tensor], Tensor] | None = None  # probs [t, E] -> the weights of the experts' outputs

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(probs [t, E], 0 where an expert was not chosen; routing map [t, E] bool) of logits [t, 1, E].

        megatron-core 0.16.1 computes probs from the chosen scores (softmax before or after the choice, or sigmoid and a
        quotient; then the scaling factor) after the choice, so they are final only here.
        """
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        return (probs if self.replace_gates is None else self.replace_gates(probs)), routing_map

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens; routing_map [t, E] bool, padding_mask [t] bool, True on padding.

        megatron-core 0.16.1 combines [t, E] with [t], which fails or, at t = E, masks experts instead of tokens.
        """
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def _apply_aux_loss(
        self,
        probs: Tensor,  # [t, E]
        scores_for_aux_loss: Tensor,  # [t, E], 0 on padding
        routing_map: Tensor,  # [t, E] bool, False on padding
        with_padding_mask: bool = False,
    ) -> Tensor:
        """`probs`, whose backward also adds coefficient * T * E / (K T^2) sum_i n_i sum_x p_i(x) to the scores' loss
        (Switch Transformers, arXiv:2101.03961 eq. 4, times T, since gradients are sums over tokens).

        megatron-core 0.16.1 multiplies by this rank's number of tokens instead of T over all its ranks, so its
        gradient is too small by tp * cp; with padding, by a factor that differs between ranks.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts, _, tokens = get_tokens_per_expert_and_token_count(
            routing_map=routing_map, reduce_group=self.tp_cp_group, topk=self.topk, with_padding_mask=True
        )
        tokens = torch.clamp(tokens, min=1)  # 0 in a micro-batch that is all padding
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=counts,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * tokens)  # type: ignore[no-any-return]

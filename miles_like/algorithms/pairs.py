"""Preference pairs, adjacent in a pack: statistics of pairs, and their losses as losses of tokens.

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.algorithms.terms.sequences import to_tokens
from miles_like.types import Stat


def as_pairs(of_sample: Tensor) -> tuple[Tensor, Tensor]:
    """[N] -> [B] of the preferred samples, the first of each pair, and [B] of the others. A pack of one sample has no
    pair: it pads unequal DP shards and has no loss. Raises ValueError for a pack that cuts a pair."""
    if len(of_sample) > 1 and len(of_sample) % 2:
        raise ValueError(f"a pack of {len(of_sample)} samples splits a pair: pack pairs with together = True")
    chosen, rejected = of_sample[: len(of_sample) // 2 * 2].view(-1, 2).unbind(1)
    return chosen, rejected


def loss_of_pairs(of_pair: Tensor, of_sample: Tensor, *, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[B] -> [T] fp32: each token of a pair gets the pair's loss, so that sequence means are means over pairs.
    `of_sample` [N] are the values that the losses were computed from: without a pair they give a loss and gradient of
    0."""
    odd = 0.0 * of_sample[2 * len(of_pair) :]
    return to_tokens(torch.cat([of_pair.repeat_interleave(2), odd]), cu_seqlens=cu_seqlens, tokens=tokens).float()


def preference_stats(chosen: Tensor, rejected: Tensor) -> dict[str, Stat]:
    """Means over pairs, from rewards [B] of the preferred samples and of the others:

    * preference/accuracy: share of pairs whose preferred sample has the higher reward
    * preference/margin: its reward less the other's
    * preference/reward_chosen, preference/reward_rejected
    """
    return {
        "preference/accuracy": mean_of((chosen > rejected).float()),
        "preference/margin": mean_of(chosen - rejected),
        "preference/reward_chosen": mean_of(chosen),
        "preference/reward_rejected": mean_of(rejected),
    }


def mean_of(of_pair: Tensor) -> Stat:
    return mean_stat(of_pair, torch.ones_like(of_pair, dtype=torch.bool))

"""Sums and means over the samples of a pack, and their values at each token.

Letters: N samples a pack, T packed tokens. Only loss tokens, those that the policy sampled, are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_owners(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N+1] int32 bounds of `tokens` packed tokens -> [T] int64, the index of each token's sample."""
    lengths = cu_seqlens.diff().long()
    numbers = torch.arange(len(lengths), device=cu_seqlens.device)
    return torch.repeat_interleave(numbers, lengths, output_size=tokens)


def sequence_sums(values: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [N] fp64 sum over each sample's loss tokens, differentiable; a nan affects its own sample only."""
    kept = torch.where(loss_mask, values, 0.0).double()
    zeros = kept.new_zeros(len(cu_seqlens) - 1)
    return zeros.index_add(0, token_owners(cu_seqlens, len(values)), kept)


def sequence_lengths(*, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] fp64 number of each sample's loss tokens."""
    return sequence_sums(loss_mask.double(), loss_mask=loss_mask, cu_seqlens=cu_seqlens)


def sequence_means(values: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [N] fp64 mean over each sample's loss tokens, 0 for a sample without one."""
    sums = sequence_sums(values, loss_mask=loss_mask, cu_seqlens=cu_seqlens)
    return sums / sequence_lengths(loss_mask=loss_mask, cu_seqlens=cu_seqlens).clamp(min=1)


def to_tokens(of_sequence: Tensor, *, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N] -> [T]: each token gets its sample's value; differentiable."""
    return of_sequence[token_owners(cu_seqlens, tokens)]

"""The interface of the arithmetic of the model.

All numbers that the engine computes are results of these functions, which map rows to rows. `plain_ops` implements it
with fast kernels, `exact_ops` with bit-reproducible ones that the trainer shares. On a device that
`quant/kernels/choice.py` names, the attention of decoded tokens and the draws are kernels of `rollout/embedded/kernels`
instead.

Letters: T tokens (rows), B sequences, Q query rows per sequence, L keys, H query heads, Hk key heads, E experts,
K experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollout.embedded.families.architecture import RouterSpec


class Operations(Protocol):
    """A set of operations; a module with these functions conforms."""

    @property
    def absorb(self) -> bool:
        """Whether attention may be computed on the latents themselves, which rounds differently from expanding them.
        The cache then holds latents, else keys and values."""

    @property
    def wide(self) -> bool:
        """Whether products are computed in fp32 for any dtype of activations. Their weights are then kept in fp32."""

    @property
    def tp_shards(self) -> int:
        """Number of shards in which sums are taken that a trainer divides over its tensor-parallel ranks: over the
        inputs of a projection to the hidden state, and over the vocabulary."""

    @property
    def expert_tp_shards(self) -> int:
        """The same for routed experts (expert tensor parallelism)."""

    def linear(self, x: Tensor, w: Tensor, shards: int = 1) -> Tensor:
        """x [T, in], w [out, in] -> [T, out]; the product over `in` is summed in `shards`."""

    def grouped_linear(self, x: Tensor, w: Tensor, counts: Sequence[int], shards: int = 1) -> Tensor:
        """x [T, in] sorted by expert, w [E, out, in], counts [E] rows of each -> [T, out]; `shards` as in `linear`."""

    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> Tensor: ...

    def rope_cos_sin(
        self, pos: Tensor, inv_freq: Tensor, mscale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...

    def rope(self, t: Tensor, cos: Tensor, sin: Tensor, deinterleave: bool = False) -> Tensor:
        """t [T, H, d] rotated by the angle of its row."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor) -> Tensor:
        """q [B, Q, H, d], k [B, L, Hk, d], v [B, L, Hk, dv] -> [B, Q, H, dv]: query i attends to keys 0..q_start[b]+i.

        Query heads h H/Hk .. (h + 1) H/Hk - 1 share key head h.
        """

    def route(self, x: Tensor, gate_w: Tensor, bias: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
        """x [T, D], gate_w fp32 [E, D] -> expert ids int64 [T, K], best first, and gate weights fp32 [T, K].

        bias: fp32 [E], added to the scores for the choice of experts only.
        """

    def swiglu(self, y: Tensor, w: Tensor | None = None) -> Tensor:
        """y [T, 2I] = gate | up -> silu(gate) * up, times the gate weight w fp32 [T, 1] if given."""

    def combine(self, y: Tensor, token: Tensor, n: int) -> Tensor:
        """y [R, D] sorted by ascending expert, token [R] the row of each -> sums [n, D]."""

    def logprob(self, logits: Tensor, target: Tensor, shards: int = 1) -> Tensor:
        """logits [T, V], target int64 [T] -> natural log-probabilities fp32 [T]; V is summed in `shards`."""

"""The seam between the model and its arithmetic.

Every number the engine computes comes out of one of these functions, each of which maps rows to rows. `plain_ops` is
the fast set; `exact_ops`, bit-reproducible and shared with the trainer, takes its place without a change to the model.

Letters: T tokens (rows), B sequences, Q query rows a sequence, L keys, H query heads, Hk key heads, E experts,
K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor


class Operations(Protocol):
    """A set of operations; a module with these functions is one."""

    @property
    def absorb(self) -> bool:
        """May attention be computed on the latents themselves (other rounding than expanding them)? The cache then
        holds them, else keys and values."""

    @property
    def wide(self) -> bool:
        """Are products computed in fp32, whatever activations are in? Their weights are then kept in it."""

    @property
    def parts(self) -> int:
        """In how many parts a sum is taken that a trainer's tensor-parallel ranks share out: over the inputs of a
        projection back to the hidden state, and over the vocabulary."""

    @property
    def expert_parts(self) -> int:
        """The same of routed experts, which other ranks may share out."""

    def linear(self, x: Tensor, w: Tensor, parts: int = 1) -> Tensor:
        """x [T, in], w [out, in] -> [T, out]; the product over `in` is summed in `parts` parts."""

    def grouped_linear(self, x: Tensor, w: Tensor, counts: Sequence[int], parts: int = 1) -> Tensor:
        """x [T, in] sorted by expert, w [E, out, in], counts [E] rows of each -> [T, out]; `parts` as above."""

    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> Tensor: ...

    def rope_cos_sin(
        self, pos: Tensor, inv_freq: Tensor, mscale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...

    def rope(self, t: Tensor, cos: Tensor, sin: Tensor, deinterleave: bool = False) -> Tensor:
        """t [T, H, d] rotated by its row's angle."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor) -> Tensor:
        """q [B, Q, H, d], k [B, L, Hk, d], v [B, L, Hk, dv] -> [B, Q, H, dv]: query i sees keys 0..q_start[b]+i.

        Query heads h H/Hk .. (h + 1) H/Hk - 1 share key head h.
        """

    def route(
        self,
        x: Tensor,
        gate_w: Tensor,
        k: int,
        *,
        score: Literal["sigmoid", "softmax"],
        bias: Tensor | None,
        groups: int,
        group_topk: int,
        scale: float,
        renormalize: bool,
    ) -> tuple[Tensor, Tensor]:
        """x [T, D], gate_w fp32 [E, D] -> expert ids int64 [T, K], best first, and gate weights fp32 [T, K]."""

    def swiglu(self, y: Tensor, w: Tensor | None = None) -> Tensor:
        """y [T, 2I] = gate | up -> silu(gate) * up, times the routing weight w fp32 [T, 1] when given."""

    def combine(self, y: Tensor, token: Tensor, n: int) -> Tensor:
        """y [R, D] sorted by ascending expert, token [R] the row each belongs to -> sums [n, D]."""

    def logprob(self, logits: Tensor, target: Tensor, vsplit: int = 1) -> Tensor:
        """logits [T, V], target int64 [T] -> natural log-probabilities fp32 [T]."""

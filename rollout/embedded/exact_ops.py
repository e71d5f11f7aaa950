"""The bit-reproducible set of operations, which the trainer shares. See `operations.Operations` for shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from torch import Tensor

from quant.exact import attention, logprobs, products, routing, rows, selftest
from rollout.embedded import plain_ops
from rollout.embedded.operations import Operations


class ExactOps:
    """The sums of a trainer of `parts` tensor-parallel and `expert_parts` expert-tensor-parallel ranks."""

    absorb = False  # attention on latents is another function of the last bits
    wide = True

    def __init__(self, parts: int = 1, expert_parts: int = 1) -> None:
        self.parts, self.expert_parts = parts, expert_parts

    @cached_property
    def fingerprint(self) -> str:
        """Of the bits that this thread computes. Raises ValueError on a machine that cannot be exact."""
        return selftest.fingerprint()

    # element by element: nothing to do anew
    rope_cos_sin = staticmethod(plain_ops.rope_cos_sin)
    rope = staticmethod(plain_ops.rope)

    rmsnorm = staticmethod(rows.rmsnorm)
    swiglu = staticmethod(rows.swiglu)
    combine = staticmethod(rows.combine)
    linear = staticmethod(products.linear)
    grouped_linear = staticmethod(products.grouped_linear)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor) -> Tensor:
        return attention.attention(q, k, v, scale, q_start)

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
        scores = routing.scores(products.linear(x.float(), gate_w), score)
        by = scores if bias is None else scores + bias
        ids = routing.choose(by, k, groups=groups, group_topk=group_topk)
        return ids, routing.gates(scores, ids, scale=scale, renormalize=renormalize)

    def logprob(self, logits: Tensor, target: Tensor, vsplit: int = 1) -> Tensor:
        return logprobs.logprob(logits, target, vsplit)


def operations(exact: Sequence[int] | None) -> Operations:
    """The plain set, or an exact one of so many parts and expert parts."""
    return plain_ops if exact is None else ExactOps(*exact)

"""The bit-reproducible operations, shared with the trainer. See `operations.Operations` for shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from quant.exact import attention, logprobs, products, routing, rows, selftest
from rollout.embedded.families.architecture import RouterSpec
from rollout.embedded.model import plain_ops
from rollout.embedded.model.operations import Operations


class ExactOps:
    """Sums in the order of a trainer with `tp_shards` tensor-parallel and `expert_tp_shards` expert-tensor-parallel
    ranks."""

    absorb = False  # attention on latents gives other last bits
    wide = True

    def __init__(self, tp_shards: int = 1, expert_tp_shards: int = 1) -> None:
        self.tp_shards, self.expert_tp_shards = tp_shards, expert_tp_shards

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the bits that this thread computes. Raises ValueError on a machine that cannot be exact."""
        return selftest.fingerprint()

    # elementwise: the plain operations are exact
    rope_cos_sin = staticmethod(plain_ops.rope_cos_sin)
    rope = staticmethod(plain_ops.rope)

    rmsnorm = staticmethod(rows.rmsnorm)
    swiglu = staticmethod(rows.swiglu)
    combine = staticmethod(rows.combine)
    linear = staticmethod(products.linear)
    grouped_linear = staticmethod(products.grouped_linear)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor) -> Tensor:
        return attention.attention(q, k, v, scale, q_start)

    def route(self, x: Tensor, gate_w: Tensor, bias: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
        scores = routing.scores(products.linear(x.float(), gate_w), router.score)
        by = scores if bias is None else scores + bias
        ids = routing.choose(by, router.top_k, groups=router.groups, group_topk=router.group_topk)
        return ids, routing.gates(scores, ids, scale=router.scale, renormalize=router.renormalize)

    def logprob(self, logits: Tensor, target: Tensor, shards: int = 1) -> Tensor:
        return logprobs.logprob(logits, target, shards)


def operations(shards: Sequence[int] | None) -> Operations:
    """The exact operations for (tp_shards, expert_tp_shards), or the plain ones for None."""
    return plain_ops if shards is None else ExactOps(*shards)

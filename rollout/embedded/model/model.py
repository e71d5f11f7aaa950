"""A decoder of any family in plain torch: attention, MLP or experts, layer by layer over a paged cache.

All arithmetic is done by an `Operations` set. The differences between families are in `Architecture`.

Letters: T packed tokens of a forward pass, D hidden, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.families.architecture import Architecture, LatentAttention
from rollout.embedded.model.attention import attend
from rollout.embedded.model.batch import ForwardBatch
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.prepared import LayerWeights, MlpWeights, ModelWeights, MoeWeights


class Model:
    """`weights` may be replaced between two forward passes; None: their memory is released, and nothing is computed."""

    def __init__(self, arch: Architecture, weights: ModelWeights, ops: Operations, dtype: torch.dtype) -> None:
        self.arch = arch
        self.weights: ModelWeights | None = weights
        self.ops = ops
        self.dtype = dtype
        self._inv_freq = arch.attention.rope.inv_freq()

    @property
    def cache_width(self) -> int:
        """Values per token in a layer's cache."""
        a = self.arch.attention
        return a.expanded_width if isinstance(a, LatentAttention) and not self.ops.absorb else a.cache_width

    def forward(self, batch: ForwardBatch, cache: KVCache, states: list[Tensor] | None = None) -> Tensor:
        """[T, D] before the last norm. Writes each token's state and expert ids into the cache. states: gets the
        residual stream [T, D] before the first layer, and after the attention and the feed-forward of each."""
        a, w = self.arch, self.weights
        assert w is not None, "a forward pass without weights"
        x = w.embed[batch.tokens]
        angles = self.ops.rope_cos_sin(batch.positions, self._inv_freq, a.attention.rope.mscale, self.dtype)
        shape = (len(x), a.layers, a.routed)
        routing = None if cache.routing is None else torch.zeros(shape, dtype=torch.int32)
        gates = None if cache.gates is None else torch.zeros(shape)
        see: Callable[[Tensor], object] = (lambda _: None) if states is None else states.append
        see(x)
        for i, layer in enumerate(w.layers):
            h = self.ops.rmsnorm(x, layer.input_norm, a.norm_eps)
            x = x + attend(a.attention, layer.attention, h, angles, batch, cache.values[i], self.ops)
            see(x)
            h = self.ops.rmsnorm(x, layer.post_norm, a.norm_eps)
            into = None if routing is None else routing[:, i]
            x = x + self._feed_forward(layer, h, into, None if gates is None else gates[:, i])
            see(x)
        for kept, new in ((cache.routing, routing), (cache.gates, gates)):
            if kept is not None and new is not None:
                kept.index_copy_(0, batch.slots, new)
        cache.epochs.index_fill_(0, batch.slots, cache.epoch)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[T, D] of `forward` -> [T, V]."""
        w = self.weights
        assert w is not None, "logits without weights"
        return self.ops.linear(self.ops.rmsnorm(x, w.norm, self.arch.norm_eps), w.head)

    def _feed_forward(self, layer: LayerWeights, x: Tensor, routing: Tensor | None, gates: Tensor | None) -> Tensor:
        if isinstance(layer.mlp, MlpWeights):
            return self._mlp(layer.mlp, x)
        return self._moe(layer.mlp, x, routing, gates)

    def _mlp(self, w: MlpWeights, x: Tensor) -> Tensor:
        return w.down(self.ops.swiglu(w.gate_up(x, self.ops)), self.ops, self.ops.tp_shards)

    def _moe(self, w: MoeWeights, x: Tensor, routing: Tensor | None, used: Tensor | None) -> Tensor:
        """Gate weights are applied before the last projection. routing: int32 [T, K] output for the expert ids, or
        None; used: fp32 [T, K] output for their gate weights, or None."""
        m, ops = self.arch.moe, self.ops
        assert m is not None
        ids, gates = ops.route(x, w.router, w.bias, m.router)
        if routing is not None:
            routing.copy_(ids)
        if used is not None:
            used.copy_(gates)
        flat = ids.numpy().reshape(-1).astype(np.int16)  # numpy sorts 16-bit keys by radix
        counts = np.bincount(flat, minlength=m.experts).tolist()
        order = torch.from_numpy(np.argsort(flat, kind="stable"))
        token = order // m.router.top_k
        h = w.gate_up(w.gate_up.rounded(x).index_select(0, token), counts, ops)
        h = ops.swiglu(h, gates.reshape(-1, 1).index_select(0, order))
        y = ops.combine(w.down(w.down.rounded(h), counts, ops, ops.expert_tp_shards), token, len(x))
        return y if w.shared is None else y + self._mlp(w.shared, x)

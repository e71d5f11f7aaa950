"""A decoder of any family in plain torch: attention, MLP or experts, layer by layer over a paged cache.

All arithmetic is done by an `Operations` set. The differences between families are in `Architecture`. A model may be
one rank's part of it: `slices` names the outputs that it computes, and `exchange` brings it those of the others.

Letters: T packed tokens of a forward pass, D hidden, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.device.sorted_rows import SortedRows
from rollout.embedded.families.architecture import Architecture, LatentAttention, Moe
from rollout.embedded.model.attention import attend, biased
from rollout.embedded.model.batch import ForwardBatch
from rollout.embedded.model.exchange import Alone, Exchange, ExpertRows, check_agreement, columns, embedded
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.prepared import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from rollout.embedded.model.slices import Slices


class Model:
    """`weights` may be replaced between two forward passes; None: their memory is released, and nothing is computed."""

    def __init__(
        self,
        arch: Architecture,
        weights: ModelWeights,
        ops: Operations,
        dtype: torch.dtype,
        *,
        slices: Slices | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """slices, exchange: of this rank; None: there is no other one."""
        self.arch = arch
        self.weights: ModelWeights | None = weights
        self.ops = ops
        self.dtype = dtype
        self.slices, self.exchange = slices or Slices(arch=arch), exchange or Alone()
        self._attention = self.slices.attention
        self.device = weights.embed.device
        self._inv_freq = arch.attention.rope.inv_freq().to(self.device)

    @property
    def cache_width(self) -> int:
        """Values per token in a layer's cache, of the heads of this rank."""
        a = self._attention
        return a.expanded_width if isinstance(a, LatentAttention) and not self.ops.absorb else a.cache_width

    def forward(self, batch: ForwardBatch, cache: KVCache, states: list[Tensor] | None = None) -> Tensor:
        """[T, D] before the last norm. Writes each token's state and expert ids into the cache. states: gets the
        residual stream [T, D] before the first layer, and after the attention and the feed-forward of each."""
        a, w = self.arch, self.weights
        assert w is not None, "a forward pass needs weights: load them first"
        x = embedded(w.embed, batch.tokens, self.slices, self.exchange)
        angles = self.ops.rope_cos_sin(batch.positions, self._inv_freq, a.attention.rope.mscale, self.dtype)
        shape = (len(x), a.layers, a.routed)
        routing = None if cache.routing is None else torch.zeros(shape, dtype=torch.int32, device=x.device)
        gates = None if cache.gates is None else torch.zeros(shape, device=x.device)
        see: Callable[[Tensor], object] = (lambda _: None) if states is None else states.append
        chosen: list[Tensor] = []
        see(x)
        for i, layer in enumerate(w.layers):
            h = self.ops.rmsnorm(x, layer.input_norm, a.norm_eps)
            x = x + self._attended(layer, h, angles, batch, cache.values[i])
            see(x)
            h = self.ops.rmsnorm(x, layer.post_norm, a.norm_eps)
            if isinstance(layer.mlp, MlpWeights):
                x = x + self._mlp(layer.mlp, h)
                see(x)
                continue
            ids, used = self._route(layer.mlp, h)
            chosen.append(ids)
            if routing is not None:
                routing[:, i].copy_(ids)
            if gates is not None:
                gates[:, i].copy_(used)
            x = x + self._moe(layer.mlp, h, ids, used)
            see(x)
        check_agreement(chosen, self.exchange)
        for kept, new in ((cache.routing, routing), (cache.gates, gates)):
            if kept is not None and new is not None:
                kept.index_copy_(0, batch.slots, new)
        cache.epochs.index_fill_(0, batch.host_slots, cache.epoch)
        return x

    def logits(self, x: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """[T, D] of the last `forward` -> [T, V], or those of `rows` alone; on another rank than the first, columns of
        that rank only."""
        w = self.weights
        assert w is not None, "logits need weights: load them first"
        normed = self.ops.rmsnorm(x if rows is None else x[rows], w.norm, self.arch.norm_eps)
        return columns(self.exchange.gathered_first(self.ops.linear(normed, w.head)))

    def copy_pages(self, cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As `KVCache.copy`."""
        cache.copy(list(sources), list(targets))

    def _attended(
        self, layer: LayerWeights, x: Tensor, angles: tuple[Tensor, Tensor], batch: ForwardBatch, cache: Tensor
    ) -> Tensor:
        w, ops = layer.attention, self.ops
        heads = self._whole(attend(self._attention, w, x, angles, batch, cache, ops))
        return self._whole(biased(w.out(heads, ops, ops.tp_shards), w.out_bias))

    def _whole(self, x: Tensor) -> Tensor:
        """This rank's columns [T, n] -> those of all ranks."""
        return columns(self.exchange.gathered(x))

    def _mlp(self, w: MlpWeights, x: Tensor) -> Tensor:
        h = self._whole(self.ops.swiglu(w.gate_up(x, self.ops)))
        return self._whole(w.down(h, self.ops, self.ops.tp_shards))

    def _route(self, w: MoeWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids int64 [T, K] and gate weights fp32 [T, K]. Every rank computes them, from the same x."""
        assert self.arch.moe is not None
        return self.ops.route(x, w.router, w.bias, self.arch.moe.router)

    def _moe(self, w: MoeWeights, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Gate weights are applied before the last projection."""
        m, ops = self.arch.moe, self.ops
        assert m is not None
        if x.is_cuda:
            return self._moe_on_device(m, w, x, ids, gates)
        flat = ids.numpy().reshape(-1).astype(np.int16)  # numpy sorts 16-bit keys by radix
        rows = ExpertRows(np.bincount(flat, minlength=m.experts).tolist(), self.slices, self.exchange)
        order = torch.from_numpy(np.argsort(flat, kind="stable"))
        token, own = order // m.router.top_k, order[rows.own]
        h = w.gate_up(w.gate_up.rounded(x).index_select(0, token[rows.own]), rows.counts, ops)
        h = rows.complete(ops.swiglu(h, gates.reshape(-1, 1).index_select(0, own)))
        y = rows.all(w.down(w.down.rounded(h), rows.counts, ops, ops.expert_tp_shards))
        y = ops.combine(y, token, len(x))
        return y if w.shared is None else y + self._mlp(w.shared, x)

    def _moe_on_device(self, m: Moe, w: MoeWeights, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """The same without reading a number from the device, on a single rank."""
        rows = SortedRows(ids, m.experts)
        h = w.gate_up.by_ends(w.gate_up.rounded(x).index_select(0, rows.token), rows.ends)
        h = self.ops.swiglu(h, gates.reshape(-1, 1).index_select(0, rows.order))
        y = rows.combine(w.down.by_ends(w.down.rounded(h), rows.ends))
        return y if w.shared is None else y + self._mlp(w.shared, x)

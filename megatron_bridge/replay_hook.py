"""Puts recorded expert choices where megatron's router asks for its top-k, and tells it which rows are padding.

Megatron calls `router.router_replay.get_replay_topk(...)` instead of its own top-k whenever that attribute is set, so
no function is replaced. Which micro-batch is being routed is told by the schedule, not by counting calls: the step
names it before each forward, and a hook on the micro-batch's output names it when its backward starts, which is when
recomputed activations ask again.

Letters: t rows on this rank, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megatron_bridge.model import every_router, routers
from megatron_bridge.shard import Shard
from routing_replay.agreement import topk_agreement
from routing_replay.tape import ReplayTape

TopK = Callable[..., tuple[Tensor, Tensor]]


class _RouterHook:
    """Stands at one router's `router_replay`."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        self.replay, self.layer = replay, layer

    def get_replay_topk(
        self,
        scores: Tensor,  # [t, E] fp32
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores [t, K], expert ids [t, K] int64), as megatron's RouterReplay.get_replay_topk."""
        assert default_compute_topk is not None

        def native(s: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(s, topk, num_groups=num_groups, group_topk=group_topk)

        return self.replay.route(self.layer, scores, native)


class RoutingReplay:
    """All routers of this rank, for one step at a time.

    mode "r3": the router takes the recorded ids and its own fresh scores of them. mode "off": it chooses by itself.
    Either way agreement is counted where a record exists: rows whose own choice is the recorded set.
    """

    def __init__(self, chunks: list[Any], *, mode: Literal["r3", "off"], recompute: bool) -> None:
        self.mode, self.recompute = mode, recompute
        found = routers(chunks)
        self.layers = tuple(r.layer_number - 1 for r in found)  # global numbers from 0
        for router, layer in zip(found, self.layers, strict=True):
            router.router_replay = _RouterHook(self, layer)
        for router in every_router(chunks):
            router.register_forward_pre_hook(self._mask_padding)
        RouterReplay.clear_global_router_replay_instances()  # those that megatron made, now replaced
        self._begin(recompute=False)

    def _begin(self, *, recompute: bool, replayed: bool = False) -> None:
        self._replayed = replayed
        self._tape = ReplayTape(expect_recompute=recompute)
        self._shards: dict[int, Shard] = {}
        self._micro, self._in_backward = -1, False
        self.agreed = self.compared = self.replayed = self.routed = 0

    def load(self, shards: list[Shard], *, forward_only: bool, own_routing: bool = False) -> None:
        """Start a step over these micro-batches; with `own_routing` as in mode "off".

        Raises ValueError when a micro-batch has no record of what is to be replayed.
        """
        self._begin(recompute=self.recompute and not forward_only, replayed=self.mode == "r3" and not own_routing)
        for i, shard in enumerate(shards):
            self._shards[i] = shard
            if self._replayed and self.layers:
                if shard.routing is None:
                    raise ValueError(
                        f"replay.mode = r3, but micro-batch {i} carries no expert choices: "
                        "let the rollout return them, or set replay.mode = off"
                    )
                self._tape.load(i, shard.routing)

    @property
    def micro(self) -> int:
        """The micro-batch whose forward or backward runs now."""
        return self._micro

    def _mask_padding(self, router: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """GPTModel of megatron-core 0.16.1 hands its routers no padding mask; which rows are padding is known here."""
        hidden = inputs[0]  # [t, 1, H]
        return hidden, ~self._shards[self._micro].real[:, None]

    def forward_of(self, micro: int) -> None:
        """The next routing calls belong to this micro-batch's forward."""
        self._micro, self._in_backward = micro, False

    def backward_of(self, micro: int) -> None:
        """The next routing calls are recomputation for this micro-batch's backward."""
        self._micro, self._in_backward = micro, True

    def finish(self) -> None:
        """Raises ValueError unless every recorded row was used exactly once (and once more when recomputing)."""
        self._tape.assert_drained()

    def route(
        self, layer: int, scores: Tensor, native: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One router's choice for the current micro-batch: (scores [t, K], ids [t, K])."""
        shard = self._shards[self._micro]
        if self._replayed:
            ids = self._tape.topk(self._micro, layer, recompute=self._in_backward, rows=len(scores))
            if not self._in_backward:
                with torch.no_grad():
                    self._count(shard, layer, native(scores.detach())[1], replayed=True)
            return scores.gather(1, ids), ids
        picked, ids = native(scores)
        if not self._in_backward:
            self._count(shard, layer, ids, replayed=False)
        return picked, ids

    def _count(self, shard: Shard, layer: int, chosen: Tensor, *, replayed: bool) -> None:
        rows = int(shard.real.sum())
        self.routed += rows
        self.replayed += rows if replayed else 0
        if shard.routing is not None:
            recorded = shard.routing.experts[:, shard.routing.layers.index(layer)]
            self.agreed += int((topk_agreement(chosen, recorded) & shard.real).sum())
            self.compared += rows

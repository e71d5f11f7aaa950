"""Puts recorded expert choices where megatron's router asks for its top-k, and tells it which rows are padding.

Megatron calls `router.router_replay.get_replay_topk(...)` instead of its own top-k whenever that attribute is set, so
no function is replaced. Which micro-batch is being routed is told by the schedule, not by counting calls: the step
names it before each forward, and a hook on the micro-batch's output names it when its backward starts, which is when
recomputed activations ask again.

Letters: t rows on this rank, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megatron_bridge.config import ReplayConfig
from megatron_bridge.model import every_router, routers
from megatron_bridge.shard import Shard
from routing_replay.agreement import count_routes
from routing_replay.tape import OwnRoutes, ReplayTape, RouteRecorder
from routing_replay.trace import RoutingTrace

TopK = Callable[..., tuple[Tensor, Tensor]]
# Where one pass takes its routes from: as replay.mode says; the routers' own, whatever it says; the same, recorded; the
# rollout's, whatever it says.
Source = Literal["mode", "own", "record", "rollout"]


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
    """All routers of this rank, for one pass over micro-batches at a time.

    mode "r3": the router takes the rollout's ids and its own fresh scores of them. "r2": the ids that a pass with
    source "record" took down. "off": it chooses by itself. With `gates` the recorded weights of the experts' outputs
    take the place of those fresh scores, and the router gets no gradient through them. Whichever it is, agreement is
    counted, layer by layer: of each row's own choice with the experts that are replayed, or, where nothing is, with the
    rollout's if there are any.
    """

    def __init__(self, chunks: list[Any], config: ReplayConfig, *, recompute: bool) -> None:
        self.mode, self.gates, self.recompute = config.mode, config.gates, recompute
        found = routers(chunks)
        self.layers = tuple(r.layer_number - 1 for r in found)  # global numbers from 0
        self._experts, self._top_k = (found[0].num_experts, found[0].topk) if found else (0, 0)
        for router, layer in zip(found, self.layers, strict=True):
            router.router_replay = _RouterHook(self, layer)
            router.regate = partial(self.regate, layer) if self.gates else None
        for router in every_router(chunks):
            router.register_forward_pre_hook(self._mask_padding)
        RouterReplay.clear_global_router_replay_instances()  # those that megatron made, now replaced
        self._begin([])

    def _begin(self, shards: list[Shard]) -> None:
        self._tape: ReplayTape | None = None
        self._recorder: RouteRecorder | None = None
        self._shards = dict(enumerate(shards))
        self._micro, self._in_backward = -1, False
        # counted on the device: to read them in each layer would wait for it each time
        self.counts: dict[int, Tensor] = {}  # layer -> what `count_routes` says of all micro-batches together
        self.replayed: Tensor | int = 0
        self.routed: Tensor | int = 0

    def load(
        self,
        shards: list[Shard],
        *,
        forward_only: bool,
        source: Source = "mode",
        routes: Sequence[OwnRoutes] | None = None,
    ) -> None:
        """Start a pass over these micro-batches; `routes` are what mode "r2" replays, without which a forward pass
        chooses by itself.

        Raises ValueError when a micro-batch has no record of what is to be replayed, or another's.
        """
        assert source == "mode" or (forward_only and routes is None), "an update replays what its mode says"
        assert routes is None or self.mode == "r2", f"replay.mode = {self.mode} replays nothing that was recorded here"
        assert forward_only or routes is not None or self.mode != "r2", "r2: an update without an old-log-prob pass"
        self._begin(shards)
        if source == "record":
            self._recorder = RouteRecorder(
                self.layers, self._experts, [shard.fed for shard in shards], gates=self.gates
            )
        replays = source == "rollout" or (source == "mode" and (self.mode == "r3" or routes is not None))
        if not self.layers or not replays:
            return
        self._tape = ReplayTape(expect_recompute=self.recompute and not forward_only)
        own = [None] * len(shards) if routes is None else routes
        for i, (shard, of_micro) in enumerate(zip(shards, own, strict=True)):
            trace = self._rollouts(i, shard) if of_micro is None else _of_this(i, shard, of_micro)
            if trace.top_k != self._top_k:
                raise ValueError(
                    f"micro-batch {i}, {shard.fed}: routes of {trace.top_k} experts a token, the model's routers "
                    f"choose {self._top_k}: check that rollout and trainer have the same config.json"
                )
            self._tape.load(i, trace, shard.fed)

    def _rollouts(self, micro: int, shard: Shard) -> RoutingTrace:
        if shard.routing is None or (self.gates and shard.routing.weights is None):
            missing = "expert choices" if shard.routing is None else "gates, which replay.gates = true asks for"
            raise ValueError(
                f"replay.mode = r3, but micro-batch {micro} carries no {missing}: {shard.fed}; "
                f"let the rollout return them, or set replay.mode = {'off' if shard.routing is None else 'r2'}"
            )
        return shard.routing

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
        if self._tape is not None:
            self._tape.assert_drained()

    def recorded(self) -> list[OwnRoutes]:
        """What a pass with source "record" took down of each micro-batch. Raises ValueError unless that is every
        (micro-batch, layer), once."""
        assert self._recorder is not None, "nothing was recorded"
        return self._recorder.routes()

    def route(
        self, layer: int, scores: Tensor, native: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One router's choice for the current micro-batch: (scores [t, K], ids [t, K])."""
        if self._tape is not None:
            ids = self._tape.topk(self._micro, layer, recompute=self._in_backward, rows=len(scores))
            if not self._in_backward:
                with torch.no_grad():
                    self._count(layer, native(scores.detach())[1], ids)
            return scores.gather(1, ids), ids
        picked, ids = native(scores)
        if self._recorder is not None:
            self._recorder.record(self._micro, layer, ids)
        if not self._in_backward:
            self._count(layer, ids, None)
        return picked, ids

    def regate(self, layer: int, probs: Tensor) -> Tensor:
        """[t, E]: `probs` of this router's choice, or the recorded ones in their place.

        Those are constants. The zero share keeps the router in the graph: auxiliary losses hang there, and gradient
        reduction waits for every parameter.
        """
        if self._recorder is not None:
            self._recorder.record_gates(self._micro, layer, probs)
        if self._tape is None:
            return probs
        ids, gates = self._tape.gates(self._micro, layer, recompute=self._in_backward)
        return torch.zeros_like(probs).scatter(1, ids, gates.to(probs)) + 0.0 * probs

    def _count(self, layer: int, chosen: Tensor, replayed: Tensor | None) -> None:
        shard = self._shards[self._micro]
        rows = shard.real.sum()
        self.routed = self.routed + rows
        self.replayed = self.replayed + (0 if replayed is None else rows)
        if replayed is None and shard.routing is not None:
            replayed = shard.routing.experts[:, shard.routing.layers.index(layer)]
        if replayed is not None:
            found = count_routes(chosen, replayed, shard.real, self._experts)
            self.counts[layer] = found if layer not in self.counts else self.counts[layer] + found


def _of_this(micro: int, shard: Shard, own: OwnRoutes) -> RoutingTrace:
    """The trace of routes that were recorded for just these rows. Raises ValueError for those of others."""
    if not own.fed.same(shard.fed):
        raise ValueError(
            f"micro-batch {micro}, {shard.fed}: its routes were recorded for {own.fed}: update with the micro-batches "
            "of the old-log-prob pass, in their order"
        )
    return own.trace

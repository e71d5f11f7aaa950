"""Replays recorded expert choices in megatron's routers, and passes them the padding mask.

When `router.router_replay` is set, Megatron calls its `get_replay_topk(...)` in place of the router's top-k, so no
function is replaced. The current micro-batch is set explicitly rather than by counting calls: the step sets it before
each forward, and a hook on the micro-batch's output sets it when its backward starts, during which layers are
recomputed.

Letters: t rows on this rank, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megatron_bridge.config import ReplayConfig
from megatron_bridge.model.build import every_router, routers
from megatron_bridge.step.shard import Shard
from miles_like.types import SharedExperts
from routing_replay.agreement import count_routes
from routing_replay.replay import RecordedRoutes, RoutingRecorder, RoutingReplayer
from routing_replay.trace import RoutingTrace

TopK = Callable[..., tuple[Tensor, Tensor]]
# The routes of one pass. mode: according to replay.mode. The others ignore replay.mode. own: the routers' choices;
# record: the same, and record them; rollout: the rollout's.
Source = Literal["mode", "own", "record", "rollout"]


class _RouterHook:
    """The value of one router's `router_replay`."""

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

    mode "r3": the router uses the rollout's ids with its own current scores of them. "r2": the ids recorded by a pass
    with source "record". "off": its own choice. With `gates` the recorded weights of the experts' outputs replace the
    current scores, and the router gets no gradient through them. In every mode agreement is counted per layer: of each
    row's own choice with the replayed experts, or without replay with the rollout's experts if the batch has them.
    """

    def __init__(self, chunks: list[Any], config: ReplayConfig, *, recompute: bool) -> None:
        self.mode, self.gates, self.recompute = config.mode, config.gates, recompute
        found = routers(chunks)
        self.layers = tuple(r.layer_number - 1 for r in found)  # global numbers from 0
        self._experts: int = found[0].num_experts if found else 0
        self._top_k: int = found[0].topk if found else 0
        for router, layer in zip(found, self.layers, strict=True):
            router.router_replay = _RouterHook(self, layer)
            router.replace_gates = partial(self.replace_gates, layer) if self.gates else None
        for router in every_router(chunks):
            router.register_forward_pre_hook(self._mask_padding)
        RouterReplay.clear_global_router_replay_instances()  # megatron's instances, replaced above
        self.reset()

    def reset(self, shards: Sequence[Shard] = ()) -> None:
        """Forget the last pass and its routes; the next one is over `shards`."""
        self._replayer: RoutingReplayer | None = None
        self._recorder: RoutingRecorder | None = None
        self._shards = dict(enumerate(shards))
        self._micro, self._in_backward = -1, False
        # counted on the device: reading them in each layer would synchronize each time
        self.counts: dict[int, Tensor] = {}  # layer -> sum of `count_routes` over all micro-batches
        # micro-batch -> [rows] experts common to the routers' choice and the record, and the layers that they are of
        self.shared: dict[int, tuple[Tensor, int]] = {}
        self.replayed: Tensor | int = 0
        self.routed: Tensor | int = 0

    def load(
        self,
        shards: list[Shard],
        *,
        forward_only: bool,
        source: Source = "mode",
        routes: Sequence[RecordedRoutes] | None = None,
    ) -> None:
        """Start a pass over these micro-batches. `routes` are what mode "r2" replays; without them a forward pass uses
        the routers' own choices.

        Raises ValueError when a micro-batch lacks the routes to replay, or has those of another micro-batch.
        """
        assert source == "mode" or (forward_only and routes is None), "an update replays according to replay.mode"
        assert routes is None or self.mode == "r2", f"replay.mode = {self.mode} replays nothing that was recorded here"
        assert forward_only or routes is not None or self.mode != "r2", "r2: an update without an old-log-prob pass"
        self.reset(shards)
        if source == "record":
            self._recorder = RoutingRecorder(
                self.layers, self._experts, [shard.fed for shard in shards], gates=self.gates
            )
        replays = source == "rollout" or (source == "mode" and (self.mode == "r3" or routes is not None))
        if not self.layers or not replays:
            return
        self._replayer = RoutingReplayer(expect_recompute=self.recompute and not forward_only)
        recorded: Sequence[RecordedRoutes | None] = [None] * len(shards) if routes is None else routes
        for i, (shard, own) in enumerate(zip(shards, recorded, strict=True)):
            trace = self._rollout_trace(i, shard) if own is None else _recorded_trace(i, shard, own)
            if trace.top_k != self._top_k:
                raise ValueError(
                    f"micro-batch {i}, {shard.fed}: the routes have {trace.top_k} experts per token, but the "
                    f"model's routers choose {self._top_k}: check that rollout and trainer have the same "
                    "config.json"
                )
            self._replayer.load(i, trace, shard.fed)

    def _rollout_trace(self, micro: int, shard: Shard) -> RoutingTrace:
        if shard.routing is None or (self.gates and shard.routing.weights is None):
            missing = "expert choices" if shard.routing is None else "gates, which replay.gates = true requires"
            raise ValueError(
                f"replay.mode = r3, but micro-batch {micro} has no {missing}: {shard.fed}; enable them in the "
                f"rollout, or set replay.mode = {'off' if shard.routing is None else 'r2'}"
            )
        return shard.routing

    @property
    def micro(self) -> int:
        """The micro-batch whose forward or backward is running."""
        return self._micro

    def _mask_padding(self, router: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Add the padding mask, which GPTModel of megatron-core 0.16.1 does not pass to its routers."""
        hidden = inputs[0]  # [t, 1, H]
        return hidden, ~self._shards[self._micro].real[:, None]

    def forward_of(self, micro: int) -> None:
        """Attribute the next routing calls to this micro-batch's forward."""
        self._micro, self._in_backward = micro, False

    def backward_of(self, micro: int) -> None:
        """Attribute the next routing calls to recomputation in this micro-batch's backward."""
        self._micro, self._in_backward = micro, True

    def finish(self) -> None:
        """Raise ValueError unless every recorded row was used exactly once (and once more when recomputing)."""
        if self._replayer is not None:
            self._replayer.assert_drained()

    def agreement(self) -> dict[str, SharedExperts]:
        """Of each sample of the last pass, over this rank's rows of it and its layers. One synchronization."""
        if not self.shared:
            return {}
        micros = sorted(self.shared)
        rows = [self.shared[micro][0] for micro in micros]
        out: dict[str, SharedExperts] = {}
        for micro, shared in zip(micros, torch.cat(rows).cpu().split([len(x) for x in rows]), strict=True):
            fed, layers = self._shards[micro].fed, self.shared[micro][1]
            real = fed.tokens >= 0  # no selection by it: the plan's fake tensors have no number of true elements
            of = torch.searchsorted(fed.ends[1:].long(), fed.tokens.clamp(min=0), right=True).clamp(
                max=len(fed.samples) - 1
            )
            zeros = torch.zeros(len(fed.samples), dtype=torch.int64)
            counts = zeros.index_add(0, of, real.long()) * layers * self._top_k
            sums = zeros.index_add(0, of, shared.long())
            for name, common, n in zip(fed.samples, sums.tolist(), counts.tolist(), strict=False):
                if name and n:
                    out[name] = SharedExperts(common, n)
        return out

    def recorded(self) -> list[RecordedRoutes]:
        """The routes of each micro-batch that a pass with source "record" recorded. Raises ValueError unless every
        (micro-batch, layer) was recorded once."""
        assert self._recorder is not None, "nothing was recorded"
        return self._recorder.routes()

    def route(
        self, layer: int, scores: Tensor, native: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One router's choice for the current micro-batch: (scores [t, K], ids [t, K])."""
        if self._replayer is not None:
            ids = self._replayer.topk(self._micro, layer, recompute=self._in_backward, rows=len(scores))
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

    def replace_gates(self, layer: int, probs: Tensor) -> Tensor:
        """[t, E]: `probs` of this router's choice, or the recorded gates instead.

        Recorded gates are constants. Adding 0 * probs keeps the router in the graph: auxiliary losses are attached to
        it, and gradient reduction waits for every parameter.
        """
        if self._recorder is not None:
            self._recorder.record_gates(self._micro, layer, probs)
        if self._replayer is None:
            return probs
        ids, gates = self._replayer.gates(self._micro, layer, recompute=self._in_backward)
        return torch.zeros_like(probs).scatter(1, ids, gates.to(probs)) + 0.0 * probs

    def _count(self, layer: int, chosen: Tensor, replayed: Tensor | None) -> None:
        shard = self._shards[self._micro]
        rows = shard.real.sum()
        self.routed = self.routed + rows
        self.replayed = self.replayed + (0 if replayed is None else rows)
        if replayed is None and shard.routing is not None:
            replayed = shard.routing.experts[:, shard.routing.layers.index(layer)]
        if replayed is not None:
            found, shared = count_routes(chosen, replayed, shard.real, self._experts)
            self.counts[layer] = found if layer not in self.counts else self.counts[layer] + found
            before, layers = self.shared.get(self._micro, (None, 0))
            self.shared[self._micro] = shared if before is None else before + shared, layers + 1


def _recorded_trace(micro: int, shard: Shard, own: RecordedRoutes) -> RoutingTrace:
    """The trace of routes recorded for exactly these rows. Raises ValueError for other rows."""
    if not own.fed.same(shard.fed):
        raise ValueError(
            f"micro-batch {micro}, {shard.fed}: its routes were recorded for {own.fed}: update with the "
            "micro-batches of the old-log-prob pass, in the same order"
        )
    return own.trace

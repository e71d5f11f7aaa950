"""Hands each router its rows, or takes them down, and proves that every row was used or recorded exactly once.

Letters: rows of a micro-batch on this rank, L MoE layers of this rank, K experts a token. A key is (micro-batch, global
layer number).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from routing_replay.ids import id_dtype
from routing_replay.trace import RoutingTrace

Key = tuple[int, int]


class ReplayTape:
    """The routes of one optimizer step on one rank.

    A router asks `topk` once in the forward pass and, where activations are recomputed, once more in the backward pass.
    Whatever else happens is a ValueError naming micro-batch and layer: a route used for other tokens or layers trains
    something else than what was sampled, and nothing later would show it.
    """

    def __init__(self, *, expect_recompute: bool = False) -> None:
        self.expect_recompute = expect_recompute
        self._traces: dict[int, RoutingTrace] = {}
        self._asked: dict[bool, set[Key]] = {False: set(), True: set()}  # by `recompute`

    def load(self, micro: int, trace: RoutingTrace) -> None:
        """Give micro-batch `micro` its rows, already cut to this rank's tokens and layers."""
        if micro in self._traces:
            raise ValueError(f"micro-batch {micro} was loaded twice: each step has a tape of its own")
        self._traces[micro] = trace

    def topk(self, micro: int, layer: int, *, recompute: bool = False, rows: int | None = None) -> Tensor:
        """Expert ids [rows, K] int64 of one micro-batch in one layer (its global number), in the rollout's order.

        `rows`, where given, is how many tokens the router has. Raises ValueError for a key that was not loaded, was
        asked before, is recomputed before its forward pass or without `expect_recompute`, or has other rows.
        """
        where = f"micro-batch {micro}, layer {layer}"
        if micro not in self._traces:
            raise ValueError(f"{where}: never loaded; loaded are micro-batches {sorted(self._traces)}")
        trace = self._traces[micro]
        if layer not in trace.layers:
            raise ValueError(f"{where}: no routes of this layer, only of layers {list(trace.layers)}")
        if rows is not None and rows != len(trace):
            raise ValueError(f"{where}: the router has {rows} tokens, the trace {len(trace)} rows")
        key = (micro, layer)
        if recompute and not self.expect_recompute:
            raise ValueError(f"{where}: recomputed, though the tape does not expect recomputation")
        if recompute and key not in self._asked[False]:
            raise ValueError(f"{where}: recomputed before its forward pass")
        if key in self._asked[recompute]:
            raise ValueError(f"{where}: asked twice in the {'recomputation' if recompute else 'forward pass'}")
        self._asked[recompute].add(key)
        return trace.experts[:, trace.layers.index(layer)].to(torch.int64)

    def gates(self, micro: int, layer: int, *, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """(expert ids [rows, K] int64, their gates [rows, K]) of a key whose `topk` was asked in the same pass."""
        assert (micro, layer) in self._asked[recompute], f"micro-batch {micro}, layer {layer}: gates before experts"
        trace = self._traces[micro]
        assert trace.weights is not None, f"micro-batch {micro} was loaded without gates"
        column = trace.layers.index(layer)
        return trace.experts[:, column].to(torch.int64), trace.weights[:, column]

    def assert_drained(self) -> None:
        """Raises ValueError naming the keys that a forward pass, or an expected recomputation, left unused."""
        keys = {(micro, layer) for micro, trace in self._traces.items() for layer in trace.layers}
        for recompute in (False, True) if self.expect_recompute else (False,):
            unused = sorted(keys - self._asked[recompute])
            if unused:
                shown = ", ".join(f"(micro-batch {m}, layer {i})" for m, i in unused[:4])
                raise ValueError(
                    f"{len(unused)} of {len(keys)} routes were not used in the "
                    f"{'recomputation' if recompute else 'forward pass'}: {shown}"
                    f"{', ...' if len(unused) > 4 else ''}"
                )


class RouteRecorder:
    """Takes down what the routers of one rank choose in one forward pass, to be replayed from a tape."""

    def __init__(self, layers: Sequence[int], num_experts: int, *, gates: bool = False) -> None:
        self.layers, self.num_experts = tuple(layers), num_experts
        self._experts: dict[Key, Tensor] = {}
        self._gates: dict[Key, Tensor] | None = {} if gates else None

    def record(self, micro: int, layer: int, experts: Tensor) -> None:
        """Of one key, [rows, K] of any integer type. Raises ValueError for a key that it has, or another layer."""
        where = f"micro-batch {micro}, layer {layer}"
        if layer not in self.layers:
            raise ValueError(f"{where}: routes of this layer are not recorded, only of layers {list(self.layers)}")
        if (micro, layer) in self._experts:
            raise ValueError(f"{where}: recorded twice")
        self._experts[micro, layer] = experts.to(id_dtype(self.num_experts))

    def record_gates(self, micro: int, layer: int, probs: Tensor) -> None:
        """Of a key that `record` has: from probs [rows, E], those of its experts, in their order."""
        assert self._gates is not None, "a recorder without gates"
        assert (micro, layer) not in self._gates, f"micro-batch {micro}, layer {layer}: gates recorded twice"
        self._gates[micro, layer] = probs.detach().gather(1, self._experts[micro, layer].to(torch.int64))

    def traces(self, micros: int) -> list[RoutingTrace]:
        """Of micro-batches 0 .. micros-1. Raises ValueError unless just these were recorded, in every layer."""
        keys = {(micro, layer) for micro in range(micros) for layer in self.layers}
        for found in (self._experts, self._gates):
            if found is not None and (wrong := sorted(keys ^ found.keys())):
                shown = ", ".join(f"(micro-batch {m}, layer {i})" for m, i in wrong[:4])
                raise ValueError(
                    f"{len(found.keys() & keys)} of {len(keys)} routes were recorded; not expected or missing: {shown}"
                    f"{', ...' if len(wrong) > 4 else ''}"
                )
        return [self._of(micro) for micro in range(micros)] if self.layers else []

    def _of(self, micro: int) -> RoutingTrace:
        experts = torch.stack([self._experts[micro, layer] for layer in self.layers], 1)
        gates = None if self._gates is None else [self._gates[micro, layer] for layer in self.layers]
        return RoutingTrace(
            experts=experts,
            layers=self.layers,
            num_experts=self.num_experts,
            weights=None if gates is None else torch.stack(gates, 1).float(),
        )

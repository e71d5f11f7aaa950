"""Hands each router its rows, and proves that every row was used exactly once.

Letters: rows of a micro-batch on this rank, L MoE layers of this rank, K experts a token. A key is (micro-batch, global
layer number).
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        trace = self._traces.get(micro)
        if trace is None:
            raise ValueError(f"{where}: never loaded; loaded are micro-batches {sorted(self._traces)}")
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

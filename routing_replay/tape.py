"""Hands each router its rows, or takes them down, and proves that every row was used or recorded exactly once.

Letters: N samples of a micro-batch, rows of it on this rank, L MoE layers of this rank, K experts a token. A key is
(micro-batch, global layer number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routing_replay.ids import id_dtype, of_samples
from routing_replay.trace import RoutingTrace

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FedRows:
    """Whose rows a rank's routers get of one micro-batch, in their order."""

    samples: tuple[str, ...]  # [N] names
    ends: Tensor  # [N+1] int32: cu_seqlens of the whole micro-batch
    tokens: Tensor  # [rows] int64: which token of the whole micro-batch each is, -1 for padding

    def __str__(self) -> str:
        return f"all positions of {of_samples(self.samples)}"

    def place(self, row: int) -> str:
        """Sample and position of one row."""
        token = int(self.tokens[row])
        if token < 0:
            return "padding"
        n = int(torch.searchsorted(self.ends[1:].long(), token, right=True))
        return f"sample {self.samples[n]}, position {token - int(self.ends[n])}"

    def same(self, other: FedRows) -> bool:
        return (
            self.samples == other.samples
            and torch.equal(self.ends, other.ends)
            and torch.equal(self.tokens, other.tokens)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnRoutes:
    """What this rank's own routers chose for the rows it feeds of one micro-batch. They are replayed on no
    other rank, and have no seals: they belong to `fed`."""

    fed: FedRows
    trace: RoutingTrace  # [rows, L, K]

    def __post_init__(self) -> None:
        assert len(self.trace) == len(self.fed.tokens)

    def on_cpu(self) -> OwnRoutes:
        return replace(self, trace=self.trace.map_rows(lambda x: x.cpu()))


class ReplayTape:
    """The routes of one optimizer step on one rank.

    A router asks `topk` once in the forward pass and, where activations are recomputed, once more in the backward pass.
    Whatever else happens is a ValueError naming micro-batch, its samples, layer and, where it is one row, the position.
    A route used for other tokens or layers trains something else than what was sampled: nothing later would show it.
    """

    def __init__(self, *, expect_recompute: bool = False) -> None:
        self.expect_recompute = expect_recompute
        self._traces: dict[int, RoutingTrace] = {}
        self._fed: dict[int, FedRows] = {}
        self._asked: dict[bool, set[Key]] = {False: set(), True: set()}  # by `recompute`

    def load(self, micro: int, trace: RoutingTrace, fed: FedRows | None = None) -> None:
        """Give micro-batch `micro` its rows, already cut to this rank's tokens and layers; `fed`: whose they are.

        Raises ValueError when it has some already, or `fed` are more or fewer.
        """
        if micro in self._traces:
            raise ValueError(f"{_where(micro, fed)}: loaded twice: each step has a tape of its own")
        if fed is not None and len(fed.tokens) != len(trace):
            raise ValueError(f"{_where(micro, fed)}: {len(trace)} rows of routes for {len(fed.tokens)} tokens")
        self._traces[micro] = trace
        if fed is not None:
            self._fed[micro] = fed

    def topk(self, micro: int, layer: int, *, recompute: bool = False, rows: int | None = None) -> Tensor:
        """Expert ids [rows, K] int64 of one micro-batch in one layer (its global number), in the rollout's order.

        `rows`, where given, is how many tokens the router has. Raises ValueError for a key that was not loaded, was
        asked before, is recomputed before its forward pass or without `expect_recompute`, or has other rows.
        """
        if wrong := self._wrong(micro, layer, recompute, rows):
            raise ValueError(f"{_where(micro, self._fed.get(micro), layer)}: {wrong}")
        self._asked[recompute].add((micro, layer))
        trace = self._traces[micro]
        return trace.experts[:, trace.layers.index(layer)].to(torch.int64)

    def _wrong(self, micro: int, layer: int, recompute: bool, rows: int | None) -> str:
        """What is wrong with asking for a key; empty if nothing is."""
        if micro not in self._traces:
            loaded = ", ".join(_where(m, self._fed.get(m)) for m in sorted(self._traces))
            return f"never loaded; loaded are {loaded or 'none'}"
        trace, fed, key = self._traces[micro], self._fed.get(micro), (micro, layer)
        if layer not in trace.layers:
            return f"no routes of this layer, only of layers {list(trace.layers)}"
        if rows is not None and rows != len(trace):
            first = f"; the first row without a token: {fed.place(rows)}" if fed and rows < len(trace) else ""
            return f"the router has {rows} tokens, the trace {len(trace)} rows{first}"
        if recompute and not self.expect_recompute:
            return "recomputed, though the tape does not expect recomputation"
        if recompute and key not in self._asked[False]:
            return "recomputed before its forward pass"
        if key in self._asked[recompute]:
            return f"asked twice in the {'recomputation' if recompute else 'forward pass'}"
        return ""

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
                shown = ", ".join(f"({_where(m, self._fed.get(m), i)})" for m, i in unused[:4])
                raise ValueError(
                    f"{len(unused)} of {len(keys)} routes were not used in the "
                    f"{'recomputation' if recompute else 'forward pass'}: {shown}"
                    f"{', ...' if len(unused) > 4 else ''}"
                )


def _where(micro: int, fed: FedRows | None, layer: int | None = None) -> str:
    whose = "" if fed is None else f", {fed}"
    return f"micro-batch {micro}{whose}{'' if layer is None else f', layer {layer}'}"


class RouteRecorder:
    """Takes down what the routers of one rank choose in one forward pass, to be replayed from a tape; `fed`: whose rows
    each micro-batch has."""

    def __init__(self, layers: Sequence[int], num_experts: int, fed: Sequence[FedRows], *, gates: bool = False) -> None:
        self.layers, self.num_experts, self.fed = tuple(layers), num_experts, tuple(fed)
        self._experts: dict[Key, Tensor] = {}
        self._gates: dict[Key, Tensor] | None = {} if gates else None

    def record(self, micro: int, layer: int, experts: Tensor) -> None:
        """Of one key, [rows, K] of any integer type. Raises ValueError for a key that it has, another micro-batch,
        layer or number of rows."""
        if not 0 <= micro < len(self.fed):
            raise ValueError(f"micro-batch {micro}, layer {layer}: recorded are 0 to {len(self.fed) - 1}")
        fed = self.fed[micro]
        where = _where(micro, fed, layer)
        if layer not in self.layers:
            raise ValueError(f"{where}: routes of this layer are not recorded, only of layers {list(self.layers)}")
        if (micro, layer) in self._experts:
            raise ValueError(f"{where}: recorded twice")
        if len(experts) != len(fed.tokens):
            raise ValueError(f"{where}: the router chose for {len(experts)} tokens, it was fed {len(fed.tokens)}")
        self._experts[micro, layer] = experts.to(id_dtype(self.num_experts))

    def record_gates(self, micro: int, layer: int, probs: Tensor) -> None:
        """Of a key that `record` has: from probs [rows, E], those of its experts, in their order."""
        assert self._gates is not None, "a recorder without gates"
        assert (micro, layer) not in self._gates, f"micro-batch {micro}, layer {layer}: gates recorded twice"
        self._gates[micro, layer] = probs.detach().gather(1, self._experts[micro, layer].to(torch.int64))

    def routes(self) -> list[OwnRoutes]:
        """Of every micro-batch, in order. Raises ValueError unless each was recorded in every layer."""
        keys = {(micro, layer) for micro in range(len(self.fed)) for layer in self.layers}
        for found in (self._experts, self._gates):
            if found is not None and (lost := sorted(keys - found.keys())):
                shown = ", ".join(f"({_where(m, self.fed[m], i)})" for m, i in lost[:4])
                raise ValueError(
                    f"{len(found)} of {len(keys)} routes were recorded; missing: {shown}"
                    f"{', ...' if len(lost) > 4 else ''}"
                )
        return [self._of(micro) for micro in range(len(self.fed))] if self.layers else []

    def _of(self, micro: int) -> OwnRoutes:
        experts = torch.stack([self._experts[micro, layer] for layer in self.layers], 1)
        gates = None if self._gates is None else [self._gates[micro, layer] for layer in self.layers]
        trace = RoutingTrace(
            experts=experts,
            layers=self.layers,
            num_experts=self.num_experts,
            weights=None if gates is None else torch.stack(gates, 1).float(),
        )
        return OwnRoutes(fed=self.fed[micro], trace=trace)

"""Replays routes in the routers of one rank, or records them, and checks that each is used or recorded exactly once.

Letters: N samples of a micro-batch, rows of it on this rank, L MoE layers of this rank, K experts per token. A key is
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
    """The tokens of one micro-batch that the routers of a rank receive, in order."""

    samples: tuple[str, ...]  # [N] names
    ends: Tensor  # [N+1] int32: cu_seqlens of the whole micro-batch
    tokens: Tensor  # [rows] int64: index of each row's token in the whole micro-batch, -1 for padding

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
class RecordedRoutes:
    """The choices of this rank's own routers for the rows `fed` of one micro-batch. They are replayed on this rank
    only and have no checksums."""

    fed: FedRows
    trace: RoutingTrace  # [rows, L, K]

    def __post_init__(self) -> None:
        assert len(self.trace) == len(self.fed.tokens)

    def on_cpu(self) -> RecordedRoutes:
        return replace(self, trace=self.trace.map_rows(lambda x: x.cpu()))


class RoutingReplayer:
    """The routes of one optimizer step on one rank.

    A router calls `topk` once in the forward pass and, where activations are recomputed, once more in the backward
    pass. Any other sequence of calls is a ValueError naming micro-batch, samples, layer and, where it is one row, the
    position: a route replayed for another token or layer trains on wrong experts, and no later check would detect it.
    """

    def __init__(self, *, expect_recompute: bool = False) -> None:
        self.expect_recompute = expect_recompute
        self._traces: dict[int, RoutingTrace] = {}
        self._fed: dict[int, FedRows] = {}
        self._used: dict[bool, set[Key]] = {False: set(), True: set()}  # recompute -> keys

    def load(self, micro: int, trace: RoutingTrace, fed: FedRows | None = None) -> None:
        """Sets the routes of micro-batch `micro`, already cut to this rank's tokens and layers. fed: the tokens of the
        rows.

        Raises ValueError when the micro-batch is loaded already, or `fed` has another number of rows.
        """
        if micro in self._traces:
            raise ValueError(f"{_where(micro, fed)} was loaded twice: create a RoutingReplayer for each step")
        if fed is not None and len(fed.tokens) != len(trace):
            raise ValueError(f"{_where(micro, fed)}: {len(trace)} rows of routes do not fit {len(fed.tokens)} tokens")
        self._traces[micro] = trace
        if fed is not None:
            self._fed[micro] = fed

    def topk(self, micro: int, layer: int, *, recompute: bool = False, rows: int | None = None) -> Tensor:
        """Expert ids [rows, K] int64 of one micro-batch in one layer (its global number), in the rollout's order.

        rows: number of tokens of the router. Raises ValueError for a key that was not loaded, was used before, is
        recomputed before its forward pass or without `expect_recompute`, or has another number of rows.
        """
        if wrong := self._wrong(micro, layer, recompute, rows):
            raise ValueError(f"{_where(micro, self._fed.get(micro), layer)}: {wrong}")
        self._used[recompute].add((micro, layer))
        trace = self._traces[micro]
        return trace.experts[:, trace.layers.index(layer)].to(torch.int64)

    def _wrong(self, micro: int, layer: int, recompute: bool, rows: int | None) -> str:
        """Why a key cannot be used; empty if it can."""
        if micro not in self._traces:
            loaded = ", ".join(_where(m, self._fed.get(m)) for m in sorted(self._traces))
            return f"its routes were not loaded; loaded are: {loaded or 'none'}"
        trace, fed, key = self._traces[micro], self._fed.get(micro), (micro, layer)
        if layer not in trace.layers:
            return f"this layer has no routes, only layers {list(trace.layers)} have"
        if rows is not None and rows != len(trace):
            first = f"; the first row without a token: {fed.place(rows)}" if fed and rows < len(trace) else ""
            return f"the router has {rows} tokens, but the trace has {len(trace)} rows{first}"
        if recompute and not self.expect_recompute:
            return "the layer was recomputed, but expect_recompute is false"
        if recompute and key not in self._used[False]:
            return "the layer was recomputed before its forward pass"
        if key in self._used[recompute]:
            return f"the routes were used twice in the {'recomputation' if recompute else 'forward pass'}"
        return ""

    def gates(self, micro: int, layer: int, *, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """(expert ids [rows, K] int64, their gates [rows, K] fp32) of a key whose `topk` was called in the same pass.
        Raises AssertionError for another key, and for routes without gates."""
        assert (micro, layer) in self._used[recompute], (
            f"micro-batch {micro}, layer {layer}: gates were recorded before experts"
        )
        trace = self._traces[micro]
        assert trace.weights is not None, f"micro-batch {micro} was loaded without gates"
        column = trace.layers.index(layer)
        return trace.experts[:, column].to(torch.int64), trace.weights[:, column]

    def assert_drained(self) -> None:
        """Raises ValueError naming the keys that a forward pass, or an expected recomputation, did not use."""
        keys = {(micro, layer) for micro, trace in self._traces.items() for layer in trace.layers}
        for recompute in (False, True) if self.expect_recompute else (False,):
            unused = sorted(keys - self._used[recompute])
            if unused:
                shown = ", ".join(f"({_where(m, self._fed.get(m), i)})" for m, i in unused[:4])
                raise ValueError(
                    f"{len(unused)} of {len(keys)} routes were not used in the "
                    f"{'recomputation' if recompute else 'forward pass'}: {shown}"
                    f"{', ...' if len(unused) > 4 else ''}"
                )


def _where(micro: int, fed: FedRows | None, layer: int | None = None) -> str:
    positions = "" if fed is None else f", {fed}"
    return f"micro-batch {micro}{positions}{'' if layer is None else f', layer {layer}'}"


class RoutingRecorder:
    """Records the choices of the routers of one rank in one forward pass, for a `RoutingReplayer`. fed: the rows of
    each micro-batch."""

    def __init__(self, layers: Sequence[int], num_experts: int, fed: Sequence[FedRows], *, gates: bool = False) -> None:
        self.layers, self.num_experts, self.fed = tuple(layers), num_experts, tuple(fed)
        self._experts: dict[Key, Tensor] = {}
        self._gates: dict[Key, Tensor] | None = {} if gates else None

    def record(self, micro: int, layer: int, experts: Tensor) -> None:
        """Records experts [rows, K] of any integer dtype. Raises ValueError for a key recorded before, and for another
        micro-batch, layer or number of rows."""
        if not 0 <= micro < len(self.fed):
            raise ValueError(
                f"micro-batch {micro}, layer {layer}: only micro-batches 0 to {len(self.fed) - 1} are recorded"
            )
        fed = self.fed[micro]
        where = _where(micro, fed, layer)
        if layer not in self.layers:
            raise ValueError(f"{where}: routes of this layer are not recorded, only of layers {list(self.layers)}")
        if (micro, layer) in self._experts:
            raise ValueError(f"{where}: the routes were recorded twice")
        if len(experts) != len(fed.tokens):
            raise ValueError(f"{where}: the router chose experts for {len(experts)} tokens, but got {len(fed.tokens)}")
        self._experts[micro, layer] = experts.to(id_dtype(self.num_experts))

    def record_gates(self, micro: int, layer: int, probs: Tensor) -> None:
        """Records, of probs [rows, E], those of the key's recorded experts, in the experts' order. Call it after
        `record`; raises AssertionError for a recorder without gates and for a key recorded before, KeyError for one
        whose experts are not recorded."""
        assert self._gates is not None, "a recorder without gates"
        assert (micro, layer) not in self._gates, f"micro-batch {micro}, layer {layer}: the gates were recorded twice"
        self._gates[micro, layer] = probs.detach().gather(1, self._experts[micro, layer].to(torch.int64))

    def routes(self) -> list[RecordedRoutes]:
        """The routes of every micro-batch, in order. Raises ValueError unless each was recorded in every layer."""
        keys = {(micro, layer) for micro in range(len(self.fed)) for layer in self.layers}
        for found in (self._experts, self._gates):
            if found is not None and (lost := sorted(keys - found.keys())):
                shown = ", ".join(f"({_where(m, self.fed[m], i)})" for m, i in lost[:4])
                raise ValueError(
                    f"only {len(found)} of {len(keys)} routes were recorded; missing: "
                    f"{shown}{', ...' if len(lost) > 4 else ''}"
                )
        return [self._routes_of(micro) for micro in range(len(self.fed))] if self.layers else []

    def _routes_of(self, micro: int) -> RecordedRoutes:
        experts = torch.stack([self._experts[micro, layer] for layer in self.layers], 1)
        gates = None if self._gates is None else [self._gates[micro, layer] for layer in self.layers]
        trace = RoutingTrace(
            experts=experts,
            layers=self.layers,
            num_experts=self.num_experts,
            weights=None if gates is None else torch.stack(gates, 1).float(),
        )
        return RecordedRoutes(fed=self.fed[micro], trace=trace)

"""The expert choices of one token sequence, and their form on SGLang's wire.

Letters: S tokens, L MoE layers, K experts a token, E experts. Row i holds the experts token i was routed to when it was
fed, so the last sampled token has none and a sequence of S tokens has S-1 rows. The row of a token under loss is the
one before it: it gave the token's log-prob.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from routing_replay.diagnosis import what_happened
from routing_replay.ids import check_ids, id_dtype, read_wire, where
from routing_replay.seals import (
    gate_part,
    gate_sums,
    layer_numbers,
    layer_sums,
    layer_sums_of,
    ragged_arange,
    row_seals,
)
from routing_replay.versions import VersionSpan, joined, ordered

_T = TypeVar("_T")


@lru_cache(maxsize=256)
def _ascending(layers: tuple[int, ...]) -> bool:
    return list(layers) == sorted(set(layers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Logical expert ids of the MoE layers only, in the router's own order within a row, and what they belong to.

    `layer_seals` and `versions` are of a whole sample; rows that are taken out of it, or joined with others', have
    none. Without `seals` the trace is not of the wire (the trainer's own routes, R2).
    """

    experts: Tensor  # [rows, L, K] uint8 (E <= 256) or int16
    layers: tuple[int, ...]  # [L] global decoder-layer numbers from 0, ascending
    num_experts: int
    seals: Tensor | None = None  # [rows] int64, see seals.row_seals: of the weights too, where there are any
    layer_seals: Tensor | None = None  # [L] int64, see seals.layer_sums
    versions: tuple[VersionSpan, ...] | None = None  # of weights that computed rows; rows in no span: nobody tells
    weights: Tensor | None = None  # [rows, L, K] fp32: the gate weights the engine used, where it was asked for them

    def __post_init__(self) -> None:
        shape = self.experts.shape  # asked for once: a step makes hundreds of traces
        if len(shape) != 3 or shape[1] != len(self.layers):
            raise ValueError(f"experts {tuple(shape)} does not fit {len(self.layers)} MoE layers")
        if self.experts.dtype != id_dtype(self.num_experts):
            raise ValueError(
                f"ids of {self.num_experts} experts are {id_dtype(self.num_experts)}, not {self.experts.dtype}"
            )
        if not _ascending(self.layers):
            raise ValueError(f"layers {self.layers} are not ascending")
        if self.seals is not None and self.seals.shape[0] != shape[0]:
            raise ValueError(f"{len(self.seals)} seals for {shape[0]} routing rows: a row was dropped or duplicated")
        if self.layer_seals is not None and self.layer_seals.shape[0] != len(self.layers):
            raise ValueError(f"{len(self.layer_seals)} layer seals for {len(self.layers)} MoE layers")
        if self.weights is not None:
            if self.weights.shape != shape:
                raise ValueError(f"weights {tuple(self.weights.shape)} of experts {tuple(shape)}")
            if self.weights.dtype != torch.float32:
                raise ValueError(f"gate weights are fp32, not {self.weights.dtype}")
        if self.versions is not None and not ordered(self.versions, shape[0]):
            raise ValueError(f"versions {list(self.versions)} do not fit {shape[0]} routing rows")

    def __len__(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    # ---- what refuses a wrong one

    def check(self, *, sample: str = "") -> None:
        """Raises ValueError, see `ids.check_ids`, naming sample, layer and position."""
        check_ids(self.experts.cpu().numpy(), self.layers, self.num_experts, sample=sample)

    def seal(self, tokens: Tensor, *, start: int = 0, versions: tuple[VersionSpan, ...] | None = None) -> RoutingTrace:
        """Sealed as the routes of `tokens` [rows], fed at positions start, start + 1, ... of a sample, and computed by
        weights `versions`, where given."""
        return replace(
            self,
            versions=self.versions if versions is None else versions,
            seals=row_seals(tokens, self.experts, self.layers, weights=self.weights, start=start),
            layer_seals=layer_numbers(self.layers) + layer_sums(self.experts, self.weights, start=start),
        )

    def with_gates(self, weights: Tensor, *, start: int = 0) -> RoutingTrace:
        """With gate weights [rows, L, K] fp32 that came with the routes, under the same seals; `start` as in `seal`."""
        assert self.weights is None, "gate weights are sealed once"
        return replace(
            self,
            weights=weights,
            seals=None if self.seals is None else self.seals + gate_part(weights, self.layers),
            layer_seals=None if self.layer_seals is None else self.layer_seals + gate_sums(weights, start=start),
        )

    def verify(self, tokens: Tensor, *, sample: str) -> None:
        """That these are the sealed routes of `tokens` [S], all S-1 of them, each where it was.

        Raises ValueError naming sample, layer, position and what happened: rows missing, shifted, permuted or
        duplicated; layers exchanged; ids or gate weights changed; another sample's routes; no seals at all.
        """
        if self.seals is None:
            raise ValueError(f"sample {sample}: its routes have no seals: read them with RoutingTrace.from_wire")
        n = min(len(self), len(tokens) - 1)
        gates = None if self.weights is None else self.weights[:n]
        wrong = row_seals(tokens[:n], self.experts[:n], self.layers, weights=gates) != self.seals[:n]
        if len(self) == len(tokens) - 1 and not bool(wrong.any()):
            return
        first = int(wrong.nonzero()[0, 0]) if bool(wrong.any()) else n
        if len(self) != len(tokens) - 1:
            raise ValueError(
                f"{where(sample, self.layers, first)}: {len(self)} routing rows for {len(tokens)} tokens, want "
                f"{len(tokens) - 1}: a row was {'dropped' if len(self) < len(tokens) - 1 else 'duplicated'} there"
            )
        found = what_happened(tokens[:-1], self.experts, self.weights, self.layers, self.seals, self.layer_seals)
        raise ValueError(f"{where(sample, found.layers, first)}: {found.what}")

    @staticmethod
    def verify_all(traces: Sequence[RoutingTrace], tokens: Sequence[Tensor], *, samples: Sequence[str]) -> None:
        """`verify` of each, in the time of one: what a step asks of all its samples. Raises the first's ValueError."""
        rows = [t.shape[0] - 1 for t in tokens]
        if traces and all(t.seals is not None and len(t) == n for t, n in zip(traces, rows, strict=True)):
            whole = RoutingTrace.concat(traces)
            fed, positions = _fed(tokens, rows)
            assert whole.seals is not None
            now = row_seals(fed, whole.experts, whole.layers, weights=whole.weights, positions=positions)
            if torch.equal(now, whole.seals):
                return
        for trace, own, sample in zip(traces, tokens, samples, strict=True):
            trace.verify(own, sample=sample)

    # ---- rows and parts

    def map_rows(self, take: Callable[[Tensor], Tensor]) -> RoutingTrace:
        """`take` of everything that is row by row; what is of the whole sample is left out."""
        return replace(
            self,
            experts=take(self.experts),
            seals=None if self.seals is None else take(self.seals),
            weights=None if self.weights is None else take(self.weights),
            layer_seals=None,
            versions=None,
        )

    def append(self, more: RoutingTrace, start: int) -> RoutingTrace:
        """Of a sample that went on: its rows, then `more`, whose first is at position `start`.

        Raises ValueError when `start` is not where the rows end, for another model's rows, or when only one of both has
        seals, gate weights or versions.
        """
        if start != len(self):
            raise ValueError(
                f"rows from position {start} on cannot follow {len(self)} rows: a row would be "
                f"{'missing' if start > len(self) else 'there twice'}; ask with routed_experts_start_len = {len(self)}"
            )
        rows = RoutingTrace.concat([self, more])
        seals = _all_or_none("layer seals", [self.layer_seals, more.layer_seals])
        spans = _all_or_none("versions", [self.versions, more.versions])
        return replace(
            rows,
            layer_seals=None if seals is None else seals[0] + seals[1] - layer_numbers(self.layers),
            versions=None if spans is None else joined(spans[0], spans[1], start),
        )

    @staticmethod
    def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Rows of several sequences, end to end. Raises ValueError when their layers or experts differ, or only some
        have seals or weights."""
        first = traces[0]
        models = {(t.layers, t.num_experts, t.experts.shape[2]) for t in traces}  # a step joins hundreds
        if len(models) > 1:
            other = next(m for m in models if m != (first.layers, first.num_experts, first.top_k))
            raise ValueError(
                f"traces of different models: layers {first.layers} and {other[0]}, "
                f"experts {first.num_experts} and {other[1]}, top-k {first.top_k} and {other[2]}"
            )
        return RoutingTrace(
            experts=torch.cat([t.experts for t in traces]),
            layers=first.layers,
            num_experts=first.num_experts,
            seals=_joined("seals", [t.seals for t in traces]),
            weights=_joined("weights", [t.weights for t in traces]),
        )

    # ---- the wire

    @classmethod
    def from_wire(
        cls,
        payload: str,
        *,
        tokens: Tensor,
        num_layers: int,
        layers: Sequence[int],
        top_k: int,
        num_experts: int,
        start: int = 0,
        sample: str = "",
    ) -> RoutingTrace:
        """`many_from_wire` of one sequence."""
        return cls.many_from_wire(
            [payload],
            tokens=[tokens],
            num_layers=num_layers,
            layers=layers,
            top_k=top_k,
            num_experts=num_experts,
            start=start,
            samples=[sample],
        )[0]

    @classmethod
    def many_from_wire(
        cls,
        payloads: Sequence[str],
        *,
        tokens: Sequence[Tensor],
        num_layers: int,
        layers: Sequence[int],
        top_k: int,
        num_experts: int,
        start: int = 0,
        samples: Sequence[str] = (),
        versions: Sequence[tuple[VersionSpan, ...]] | None = None,
    ) -> list[RoutingTrace]:
        """Read SGLang's `meta_info.routed_experts`, one a sequence: base64 of little-endian int32
        [rows, num_layers, K], and seal them.

        tokens: all tokens [S] of each sequence; the rows are those at positions start..S-2. samples: their names, for
        messages. versions: of the rows, counted from the first of them. The wire has all layers, dense ones
        zero-filled; only `layers` are kept. Any other number of rows is a ValueError, and so is whatever `check`
        refuses. One row more too: a row of the last token, which predicts nothing, cannot be told from one that stands
        twice and has moved all that follow. All sequences are read and checked at once: a step has hundreds of short
        ones.
        """
        if not payloads:
            return []
        rows = [t.shape[0] - 1 - start for t in tokens]
        ids = read_wire(
            payloads,
            rows,
            num_layers=num_layers,
            layers=layers,
            top_k=top_k,
            num_experts=num_experts,
            start=start,
            samples=samples or [str(i) for i in range(len(payloads))],
        )
        fed, positions = _fed(tokens, rows, start)
        seals = row_seals(fed, ids, layers, positions=positions)
        layer_seals = layer_numbers(layers) + layer_sums_of(ids, rows, start=start)
        told = versions if versions is not None else [None] * len(rows)
        parts = zip(torch.split(ids, rows), torch.split(seals, rows), layer_seals.unbind(), told, strict=True)
        fixed: Any = {"layers": tuple(layers), "num_experts": num_experts}
        return [cls(experts=i, seals=s, layer_seals=by_layer, versions=v, **fixed) for i, s, by_layer, v in parts]

    def to_wire(self, *, num_layers: int) -> str:
        """The inverse of `from_wire`: all `num_layers`, zeros where there is no router."""
        out = np.zeros((len(self), num_layers, self.top_k), dtype="<i4")
        out[:, list(self.layers)] = self.experts.to(torch.int32).numpy()
        return base64.b64encode(out.tobytes()).decode("ascii")


def _fed(tokens: Sequence[Tensor], rows: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor]:
    """([sum(rows)] of all samples end to end, [sum(rows)] int64 their positions): of each sample's tokens those from
    `start` on, less the last, of which there are `rows`."""
    n = torch.tensor(rows)
    lengths = n + start + 1
    positions = ragged_arange(torch.full_like(n, start), n)
    return torch.cat(list(tokens))[positions + (lengths.cumsum(0) - lengths).repeat_interleave(n)], positions


def _all_or_none(what: str, parts: Sequence[_T | None]) -> list[_T] | None:
    have = [p for p in parts if p is not None]
    if len(have) not in (0, len(parts)):
        raise ValueError(f"{len(have)} of {len(parts)} traces have {what}: join those of one origin only")
    return have or None


def _joined(what: str, parts: Sequence[Tensor | None]) -> Tensor | None:
    have = _all_or_none(what, parts)
    return None if have is None else torch.cat(have)

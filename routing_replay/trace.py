"""The expert choices of one token sequence, and their wire format in SGLang.

Letters: S tokens, L MoE layers, K experts per token, E experts. Row i holds the experts that token i was routed to when
it was fed, so the last sampled token has no row and a sequence of S tokens has S-1 rows. The row of a loss token is the
one before it, which produced the token's log-prob.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from routing_replay.checksums import (
    gate_sums,
    gate_term,
    layer_sums,
    layer_terms,
    ragged_arange,
    row_checksums,
    sums_of_samples,
)
from routing_replay.diagnosis import diagnose
from routing_replay.ids import check_ids, id_dtype, where
from routing_replay.versions import VersionSpan, joined, ordered
from routing_replay.wire import Base64, read_wire

_T = TypeVar("_T")


@lru_cache(maxsize=256)
def _ascending(layers: tuple[int, ...]) -> bool:
    return list(layers) == sorted(set(layers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Logical expert ids of the MoE layers, in the router's order within a row, with the checksums of their tokens.

    `layer_checksums` and `versions` describe a whole sample; rows selected from it, or joined with other samples' rows,
    have none. A trace without `checksums` does not come from an engine (the trainer's own routes, mode "r2").
    """

    experts: Tensor  # [rows, L, K] uint8 (E <= 256) or int16
    layers: tuple[int, ...]  # [L] global decoder-layer numbers from 0, ascending
    num_experts: int
    checksums: Tensor | None = None  # [rows] int64, see checksums.row_checksums; they include `weights`
    layer_checksums: Tensor | None = None  # [L] int64, see checksums.layer_terms
    versions: tuple[VersionSpan, ...] | None = None  # weight versions that computed the rows; unknown outside of spans
    weights: Tensor | None = None  # [rows, L, K] fp32: the gate weights that the engine used, if requested

    def __post_init__(self) -> None:
        shape = self.experts.shape  # read once: a step makes hundreds of traces
        if len(shape) != 3 or shape[1] != len(self.layers):
            raise ValueError(f"experts of shape {tuple(shape)} do not fit {len(self.layers)} MoE layers")
        if self.experts.dtype != id_dtype(self.num_experts):
            raise ValueError(
                f"ids of {self.num_experts} experts must be {id_dtype(self.num_experts)}, not {self.experts.dtype}"
            )
        if not _ascending(self.layers):
            raise ValueError(f"layers {self.layers} are not ascending")
        if self.checksums is not None and self.checksums.shape[0] != shape[0]:
            raise ValueError(
                f"{len(self.checksums)} checksums do not fit {shape[0]} routing rows: a row was dropped or duplicated"
            )
        if self.layer_checksums is not None and self.layer_checksums.shape[0] != len(self.layers):
            raise ValueError(f"{len(self.layer_checksums)} layer checksums do not fit {len(self.layers)} MoE layers")
        if self.weights is not None:
            if self.weights.shape != shape:
                raise ValueError(
                    f"gate weights of shape {tuple(self.weights.shape)} do not fit experts of shape {tuple(shape)}"
                )
            if self.weights.dtype != torch.float32:
                raise ValueError(f"gate weights must be fp32, not {self.weights.dtype}")
        if self.versions is not None and not ordered(self.versions, shape[0]):
            raise ValueError(f"versions {list(self.versions)} do not fit {shape[0]} routing rows")

    def __len__(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    # ---- verification

    def check(self, *, sample: str = "") -> None:
        """Raises ValueError naming sample, layer and position, see `ids.check_ids`."""
        check_ids(self.experts.cpu().numpy(), self.layers, self.num_experts, sample=sample)

    def with_checksums(
        self, tokens: Tensor, *, start: int = 0, versions: tuple[VersionSpan, ...] | None = None
    ) -> RoutingTrace:
        """Adds the checksums of these routes with `tokens` [rows], fed at positions start, start + 1, ... of a sample.
        versions: weight versions that computed the rows; None keeps those of the trace."""
        return replace(
            self,
            versions=self.versions if versions is None else versions,
            checksums=row_checksums(tokens, self.experts, self.layers, weights=self.weights, start=start),
            layer_checksums=layer_terms(self.layers) + layer_sums(self.experts, self.weights, start=start),
        )

    def with_gates(self, weights: Tensor, *, start: int = 0) -> RoutingTrace:
        """Adds gate weights [rows, L, K] fp32 that came with the routes, and includes them in the checksums. start: as
        in `with_checksums`."""
        assert self.weights is None, "gate weights can only be added once"
        return replace(
            self,
            weights=weights,
            checksums=None if self.checksums is None else self.checksums + gate_term(weights, self.layers),
            layer_checksums=None
            if self.layer_checksums is None
            else self.layer_checksums + gate_sums(weights, start=start),
        )

    def check_tokens(self, tokens: Tensor, *, sample: str) -> None:
        """Verifies that these are all S-1 routes of `tokens` [S], each at its position.

        Raises ValueError naming sample, layer, position and fault: rows missing, shifted, permuted or duplicated;
        layers exchanged; ids or gate weights changed; routes of another sample; no checksums.
        """
        if self.checksums is None:
            raise ValueError(f"sample {sample}: its routes have no checksums: read them with RoutingTrace.from_wire")
        n = min(len(self), len(tokens) - 1)
        gates = None if self.weights is None else self.weights[:n]
        wrong = row_checksums(tokens[:n], self.experts[:n], self.layers, weights=gates) != self.checksums[:n]
        if len(self) == len(tokens) - 1 and not bool(wrong.any()):
            return
        first = int(wrong.nonzero()[0, 0]) if bool(wrong.any()) else n
        if len(self) != len(tokens) - 1:
            raise ValueError(
                f"{where(sample, self.layers, first)}: {len(self)} routing rows for {len(tokens)} tokens, "
                f"expected {len(tokens) - 1}: a row was "
                f"{'dropped' if len(self) < len(tokens) - 1 else 'duplicated'} there"
            )
        found = diagnose(tokens[:-1], self.experts, self.weights, self.layers, self.checksums, self.layer_checksums)
        raise ValueError(f"{where(sample, found.layers, first)}: {found.what}")

    @staticmethod
    def check_all(traces: Sequence[RoutingTrace], tokens: Sequence[Tensor], *, samples: Sequence[str]) -> None:
        """`verify` of all samples of a step in one pass. Raises the ValueError of the first that fails."""
        rows = [t.shape[0] - 1 for t in tokens]
        if traces and all(t.checksums is not None and len(t) == n for t, n in zip(traces, rows, strict=True)):
            whole = RoutingTrace.concat(traces)
            fed, positions = _fed(tokens, rows)
            assert whole.checksums is not None
            now = row_checksums(fed, whole.experts, whole.layers, weights=whole.weights, positions=positions)
            if torch.equal(now, whole.checksums):
                return
        for trace, own, sample in zip(traces, tokens, samples, strict=True):
            trace.check_tokens(own, sample=sample)

    # ---- rows

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> RoutingTrace:
        """Applies `function` to every tensor with a row dimension; drops the fields of the whole sample."""
        return replace(
            self,
            experts=function(self.experts),
            checksums=None if self.checksums is None else function(self.checksums),
            weights=None if self.weights is None else function(self.weights),
            layer_checksums=None,
            versions=None,
        )

    def head(self, rows: int) -> RoutingTrace:
        """The first rows of a sample, as those of a whole sample."""
        first = self.map_rows(lambda x: x[:rows])
        sums = layer_terms(self.layers) + layer_sums(first.experts, first.weights)
        spans = None if self.versions is None else [VersionSpan(v, a, min(b, rows)) for v, a, b in self.versions]
        return replace(
            first,
            layer_checksums=None if self.layer_checksums is None else sums,
            versions=None if spans is None else tuple(s for s in spans if s.start < s.end),
        )

    def append(self, more: RoutingTrace, start: int) -> RoutingTrace:
        """Appends the rows of a continued sample: `more`, whose first row is at position `start`.

        Raises ValueError when `start` is not where the rows end, for rows of another model, or when only one of the two
        traces has checksums, gate weights or versions.
        """
        if start != len(self):
            raise ValueError(
                f"rows from position {start} on cannot follow {len(self)} rows, because a row would be "
                f"{'missing' if start > len(self) else 'duplicated'}: send routed_experts_start_len = {len(self)}"
            )
        rows = RoutingTrace.concat([self, more])
        sums = _all_or_none("layer checksums", [self.layer_checksums, more.layer_checksums])
        spans = _all_or_none("versions", [self.versions, more.versions])
        return replace(
            rows,
            layer_checksums=None if sums is None else sums[0] + sums[1] - layer_terms(self.layers),
            versions=None if spans is None else joined(spans[0], spans[1], start),
        )

    @staticmethod
    def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Concatenates the rows of several sequences. Raises ValueError when their layers or experts differ, or only
        some have checksums or weights."""
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
            checksums=_joined("checksums", [t.checksums for t in traces]),
            weights=_joined("weights", [t.weights for t in traces]),
        )

    # ---- the wire

    @classmethod
    def from_wire(
        cls,
        payload: Base64,
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
        payloads: Sequence[Base64],
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
        """Reads SGLang's `meta_info.routed_experts`, one per sequence: base64 of little-endian int32
        [rows, num_layers, K], and adds checksums.

        tokens: all tokens [S] of each sequence; the rows are those at positions start..S-2. samples: their names, for
        messages. versions: of the rows, counted from the first of them. The wire has all layers, dense ones
        zero-filled; only `layers` are kept. Raises ValueError for any other number of rows and for ids that `check`
        rejects. One additional row is an error too: a row of the last token, which predicts nothing, cannot be
        distinguished from a duplicated row that has moved all rows after it. All sequences are read and checked in one
        pass: a step has hundreds of short ones.
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
        checksums, sums = sums_of_samples(fed, ids, layers, rows, positions=positions, start=start)
        layer_checksums = layer_terms(layers) + sums
        global_layers = tuple(layers)
        return [
            cls(
                experts=experts,
                layers=global_layers,
                num_experts=num_experts,
                checksums=own,
                layer_checksums=by_layer,
                versions=spans,
            )
            for experts, own, by_layer, spans in zip(
                torch.split(ids, rows),
                torch.split(checksums, rows),
                layer_checksums.unbind(),
                versions if versions is not None else [None] * len(rows),
                strict=True,
            )
        ]

    def to_wire(self, *, num_layers: int) -> str:
        """The inverse of `from_wire`: all `num_layers`, with zeros for layers without a router."""
        out = np.zeros((len(self), num_layers, self.top_k), dtype="<i4")
        out[:, list(self.layers)] = self.experts.to(torch.int32).numpy()
        return base64.b64encode(out.tobytes()).decode("ascii")


def _fed(tokens: Sequence[Tensor], rows: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor]:
    """([sum(rows)] tokens, [sum(rows)] int64 positions) of all samples, concatenated: the tokens of each sample from
    `start` on, without the last."""
    n = torch.tensor(rows)
    lengths = n + start + 1
    positions = ragged_arange(torch.full_like(n, start), n)
    return torch.cat(list(tokens))[positions + (lengths.cumsum(0) - lengths).repeat_interleave(n)], positions


def _all_or_none(what: str, values: Sequence[_T | None]) -> list[_T] | None:
    have = [v for v in values if v is not None]
    if len(have) not in (0, len(values)):
        raise ValueError(
            f"only {len(have)} of {len(values)} traces have {what}: join traces that all have it, or that all lack it"
        )
    return have or None


def _joined(what: str, tensors: Sequence[Tensor | None]) -> Tensor | None:
    have = _all_or_none(what, tensors)
    return None if have is None else torch.cat(have)

"""The routes that one rank needs of a micro-batch: cut before they are shipped, found by sample where they arrive.

Letters: T packed tokens, N samples in a pack, R rows that a rank needs, P rows that it feeds (padding included), L MoE
layers of its pipeline stage, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from routing_replay.align import RankPart, pack_rows, place_rows, ragged_arange, select_layers, take_rows
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRoutes:
    """What is shipped to the ranks of one part: no padding, no other rank's rows, no other stage's layers."""

    part: RankPart
    samples: tuple[str, ...]  # [N] names, each once
    lengths: tuple[int, ...]  # [N] rows of each
    trace: RoutingTrace  # [R, L, K]: the samples' rows end to end

    def __post_init__(self) -> None:
        assert len(self.samples) == len(self.lengths) and sum(self.lengths) == len(self.trace)

    @property
    def nbytes(self) -> int:
        """Of the routes, not of the names."""
        return self.trace.experts.nbytes


def _lengths(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """[N] int64: how many of `rows` (tokens of the pack, ascending by sample) each sample has."""
    owner = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)
    return torch.bincount(owner, minlength=len(cu_seqlens) - 1)


def cut_routes(trace: RoutingTrace, samples: Sequence[str], cu_seqlens: Tensor, part: RankPart) -> RankRoutes:
    """Of the routes [T, ..] of a pack of `samples` that end at `cu_seqlens` [N+1], those that the rank of `part` needs.

    Raises ValueError naming the layers that the trace does not have, or rows that it has too few or too many of.
    """
    if len(trace) != int(cu_seqlens[-1]):
        raise ValueError(f"{len(trace)} rows of routes for a micro-batch of {int(cu_seqlens[-1])} tokens")
    rows = pack_rows(cu_seqlens, part).rows
    rows = rows[rows >= 0]
    lengths = tuple(_lengths(cu_seqlens, rows).tolist())
    wanted = take_rows(select_layers(trace, part.layers), rows)
    return RankRoutes(part=part, samples=tuple(samples), lengths=lengths, trace=wanted)


def fed_routes(
    routes: RankRoutes, samples: Sequence[str], tokens: Tensor, cu_seqlens: Tensor, part: RankPart
) -> RoutingTrace:
    """[P, L, K]: the routes of the rows that the rank of `part` feeds, padding filled by `place_rows`.

    `tokens` [T] and `cu_seqlens` [N+1] are the pack's, on the CPU. Each sample's rows are looked up by its name,
    wherever they stand in `routes`. Raises ValueError for routes that were cut for another rank, a sample that has
    none or that is not in the pack, and one with more or fewer rows than tokens that are fed.
    """
    if routes.part != part:
        raise ValueError(f"routes cut for {routes.part} came to the rank of {part}")
    at = pack_rows(cu_seqlens, part).rows
    real = at >= 0
    where = {name: i for i, name in enumerate(routes.samples)}
    if where.keys() != set(samples):
        lost, other = sorted(set(samples) - where.keys()), sorted(where.keys() - set(samples))
        raise ValueError(f"routes of samples {other[:4]} came with a micro-batch that lacks those of {lost[:4]}")
    order = torch.tensor([where[name] for name in samples])
    have = torch.tensor(routes.lengths)
    want = _lengths(cu_seqlens, at[real])
    if (wrong := have[order] != want).any():
        n = int(wrong.nonzero()[0])
        rows, fed = int(have[order[n]]), int(want[n])
        raise ValueError(f"sample {samples[n]!r}: {rows} rows of routes for the {fed} of its tokens that are fed")
    found = take_rows(routes.trace, ragged_arange((have.cumsum(0) - have)[order], want))
    return place_rows(found, torch.where(real, real.cumsum(0) - 1, -1))

"""The routes that one rank needs of a micro-batch: cut before they are shipped, found by sample where they arrive.

Letters: T packed tokens, N samples in a pack, R rows that a rank needs, P rows that it feeds (padding included), L MoE
layers of its pipeline stage, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routing_replay.align import RankPart, pack_rows, place_rows, select_layers, take_rows
from routing_replay.ids import of_samples, where
from routing_replay.seals import ragged_arange, row_seals
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRoutes:
    """What is shipped to the ranks of one part: no padding, no other rank's rows, no other stage's layers."""

    part: RankPart
    samples: tuple[str, ...]  # [N] names, each once
    lengths: tuple[int, ...]  # [N] rows of each
    trace: RoutingTrace  # [R, L, K]: the samples' rows end to end
    seals: Tensor  # [R] int32: the upper halves of the rows' seals, where the hash has its strength

    def __post_init__(self) -> None:
        assert len(self.samples) == len(self.lengths) and sum(self.lengths) == len(self.trace)
        if self.seals.shape != (len(self.trace),):
            raise ValueError(
                f"{of_samples(self.samples)}: {tuple(self.seals.shape)} seals for {len(self.trace)} rows of routes"
            )

    @property
    def nbytes(self) -> int:
        """Of the ids and what travels with them row by row; not of the names."""
        t = self.trace
        return self.seals.nbytes + sum(x.nbytes for x in (t.experts, t.weights) if x is not None)


def _owners(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """[R] int64: the number of the sample that each of `rows` (tokens of the pack) belongs to."""
    return torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)


def _upper(seals: Tensor) -> Tensor:
    return (seals >> 32).to(torch.int32)


def cut_routes(trace: RoutingTrace, samples: Sequence[str], cu_seqlens: Tensor, part: RankPart) -> RankRoutes:
    """Of the routes [T, ..] of a pack of `samples` that end at `cu_seqlens` [N+1], those that the rank of `part` needs.

    Raises ValueError naming the layers that the trace does not have, rows that it has too few or too many of, and for
    routes without seals: those that a rank's own routers choose never leave it (tape.OwnRoutes).
    """
    if len(trace) != int(cu_seqlens[-1]):
        raise ValueError(
            f"{of_samples(samples)}: {len(trace)} rows of routes for a micro-batch of {int(cu_seqlens[-1])} tokens"
        )
    if trace.seals is None:
        raise ValueError(
            f"{of_samples(samples)}: their routes have no seals, so nobody could tell on a rank whose they are: read "
            "them with RoutingTrace.from_wire"
        )
    rows = pack_rows(cu_seqlens, part).rows
    rows = rows[rows >= 0]
    lengths = torch.bincount(_owners(cu_seqlens, rows), minlength=len(samples))
    wanted = take_rows(select_layers(trace, part.layers), rows)
    assert wanted.seals is not None
    return RankRoutes(
        part=part,
        samples=tuple(samples),
        lengths=tuple(lengths.tolist()),
        trace=replace(wanted, seals=None),
        seals=_upper(wanted.seals),
    )


def fed_routes(
    routes: RankRoutes, samples: Sequence[str], tokens: Tensor, cu_seqlens: Tensor, part: RankPart
) -> RoutingTrace:
    """[P, L, K]: the routes of the rows that the rank of `part` feeds, padding filled by `place_rows`.

    `tokens` [T] and `cu_seqlens` [N+1] are the pack's, on the CPU. Each sample's rows are looked up by its name,
    wherever they stand in `routes`, and each row is held to the token that is fed with it. Raises ValueError for routes
    that were cut for another rank, a sample that has none or that is not in the pack, one with more or fewer rows than
    tokens that are fed, and a row whose ids or gate weights were sealed with another token, position or layer.
    """
    if routes.part != part:
        raise ValueError(f"routes cut for {routes.part} came to the rank of {part}")
    at = pack_rows(cu_seqlens, part).rows
    real = at >= 0
    rows = at[real]
    owner = _owners(cu_seqlens, rows)
    index = {name: i for i, name in enumerate(routes.samples)}
    if index.keys() != set(samples):
        lost, other = sorted(set(samples) - index.keys()), sorted(index.keys() - set(samples))
        raise ValueError(f"routes of samples {other[:4]} came with a micro-batch that lacks those of {lost[:4]}")
    order = torch.tensor([index[name] for name in samples])
    have = torch.tensor(routes.lengths)
    want = torch.bincount(owner, minlength=len(samples))
    if (wrong := have[order] != want).any():
        n = int(wrong.nonzero()[0])
        raise ValueError(
            f"sample {samples[n]}: {int(have[order[n]])} rows of routes for the {int(want[n])} of its tokens that are "
            "fed to this rank"
        )
    take = ragged_arange((have.cumsum(0) - have)[order], want)
    found = take_rows(routes.trace, take)
    positions = rows - cu_seqlens.long()[owner]
    now = row_seals(tokens[rows], found.experts, found.layers, weights=found.weights, positions=positions)
    broken = _upper(now) != routes.seals.index_select(0, take)
    if broken.any():
        i = int(broken.nonzero()[0])
        place = where(samples[int(owner[i])], found.layers, int(positions[i]))
        raise ValueError(f"{place}: its routes were not sealed with the token that is fed: another row's or changed")
    return place_rows(found, torch.where(real, real.cumsum(0) - 1, -1))

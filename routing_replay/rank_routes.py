"""The routes of a micro-batch that one rank needs: cut on the driver, looked up per sample on the rank.

Letters: T packed tokens, N samples in a pack, R rows that a rank needs, P rows that it feeds (padding included), L MoE
layers of its pipeline stage, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routing_replay.align import ShardSpec, pack_rows, place_rows, select_layers, take_rows
from routing_replay.checksums import ragged_arange, row_checksums
from routing_replay.ids import of_samples, where
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRoutes:
    """The routes shipped to the ranks of one shard: without padding, other ranks' rows or other stages' layers."""

    shard: ShardSpec
    samples: tuple[str, ...]  # [N] names, each once
    lengths: tuple[int, ...]  # [N] rows of each
    trace: RoutingTrace  # [R, L, K]: the samples' rows, concatenated
    checksums: Tensor  # [R] int32: upper halves of the rows' checksums; a multilinear hash is strongest there

    def __post_init__(self) -> None:
        assert len(self.samples) == len(self.lengths) and sum(self.lengths) == len(self.trace)
        if self.checksums.shape != (len(self.trace),):
            shape = tuple(self.checksums.shape)
            raise ValueError(
                f"{of_samples(self.samples)}: {shape} checksums do not fit {len(self.trace)} rows of routes"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of ids, gate weights and checksums, without the names."""
        t = self.trace
        return self.checksums.nbytes + sum(x.nbytes for x in (t.experts, t.weights) if x is not None)


def _owners(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """[R] int64: the index of the sample that each of `rows` (tokens of the pack) belongs to."""
    return torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)


def _upper(checksums: Tensor) -> Tensor:
    return (checksums >> 32).to(torch.int32)


def cut_routes(trace: RoutingTrace, samples: Sequence[str], cu_seqlens: Tensor, shard: ShardSpec) -> RankRoutes:
    """The routes that the rank of `shard` needs. trace: [T, ..] of a pack of `samples` that end at `cu_seqlens` [N+1].

    Raises ValueError for layers that the trace does not have, too few or too many rows, and routes without checksums:
    routes chosen by a rank's own routers never leave it (replay.RecordedRoutes).
    """
    if len(trace) != int(cu_seqlens[-1]):
        raise ValueError(
            f"{of_samples(samples)}: {len(trace)} rows of routes do not fit a micro-batch of "
            f"{int(cu_seqlens[-1])} tokens"
        )
    if trace.checksums is None:
        raise ValueError(
            f"{of_samples(samples)}: their routes have no checksums, so a rank could not verify them: read them with "
            "RoutingTrace.from_wire"
        )
    rows = pack_rows(cu_seqlens, shard).rows
    rows = rows[rows >= 0]
    lengths = torch.bincount(_owners(cu_seqlens, rows), minlength=len(samples))
    wanted = take_rows(select_layers(trace, shard.layers), rows)
    assert wanted.checksums is not None
    return RankRoutes(
        shard=shard,
        samples=tuple(samples),
        lengths=tuple(lengths.tolist()),
        trace=replace(wanted, checksums=None),
        checksums=_upper(wanted.checksums),
    )


def join_routes(parts: Sequence[RankRoutes]) -> RankRoutes:
    """The routes of several processes for one rank, each of other samples, as those of one. Raises ValueError for
    parts cut for different ranks, for a sample in two of them, and as `RoutingTrace.concat`."""
    first = parts[0]
    names = tuple(name for part in parts for name in part.samples)
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(
            f"{of_samples(names)}: two processes sent routes of sample {twice}: each holds its own samples"
        )
    for part in parts[1:]:
        if part.shard != first.shard:
            raise ValueError(f"routes cut for {part.shard} were sent to the rank of {first.shard}")
    return RankRoutes(
        shard=first.shard,
        samples=names,
        lengths=tuple(n for part in parts for n in part.lengths),
        trace=RoutingTrace.concat([part.trace for part in parts]),
        checksums=torch.cat([part.checksums for part in parts]),
    )


def fed_routes(
    routes: RankRoutes, samples: Sequence[str], tokens: Tensor, cu_seqlens: Tensor, shard: ShardSpec
) -> RoutingTrace:
    """[P, L, K]: the routes of the rows that the rank of `shard` feeds, padding filled by `place_rows`.

    `tokens` [T] and `cu_seqlens` [N+1] are the pack's, on the CPU. The rows of each sample are looked up by the
    sample's name, and the checksum of each row is recomputed with the token that is fed. Raises ValueError for routes
    cut for another rank, a sample without routes or outside the pack, a sample with more or fewer rows than fed tokens,
    and a row whose checksum belongs to another token, position, layer, ids or gate weights.
    """
    if routes.shard != shard:
        raise ValueError(f"routes cut for {routes.shard} were sent to the rank of {shard}")
    at = pack_rows(cu_seqlens, shard).rows
    real = at >= 0
    rows = at[real]
    owner = _owners(cu_seqlens, rows)
    index = {name: i for i, name in enumerate(routes.samples)}
    if index.keys() != set(samples):
        lost, other = sorted(set(samples) - index.keys()), sorted(index.keys() - set(samples))
        raise ValueError(f"routes of samples {other[:4]} were sent with a micro-batch that needs those of {lost[:4]}")
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
    now = row_checksums(tokens[rows], found.experts, found.layers, weights=found.weights, positions=positions)
    broken = _upper(now) != routes.checksums.index_select(0, take)
    if broken.any():
        i = int(broken.nonzero()[0])
        place = where(samples[int(owner[i])], found.layers, int(positions[i]))
        raise ValueError(
            f"{place}: the checksum does not match the token: the routes belong to another row, or were changed"
        )
    return place_rows(found, torch.where(real, real.cumsum(0) - 1, -1))

"""What a holder of samples sends to the ranks of one place for their micro-batches, and how a rank joins it.

A place is a data-parallel row and the part of it that a rank needs (ShardSpec). Each holder cuts the routes of the
samples that it has for the place, rows and layers, so that nothing else leaves it.

Letters: N samples, S tokens a sample, F tokens of the samples end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles_like.batch.filling import fill
from miles_like.records import PlannedMicroBatch
from miles_like.types import ADVANTAGES, MicroBatch, Sample
from routing_replay.align import ShardSpec, take_rows
from routing_replay.rank_routes import RankRoutes, cut_routes, join_routes
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleColumns:
    """The columns of a sample that a micro-batch is filled from (filling.Columns)."""

    token_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool
    logprobs: Tensor  # [S] fp32
    streams: Mapping[str, Tensor]  # name -> [S] or [S, C] fp32
    candidates: Tensor | None  # [S, C] int64
    advantages: Tensor | None  # [S] fp32; None: the planned micro-batch has a number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """The part of one holder in the micro-batches of a row, for the ranks of one place."""

    names: tuple[str, ...]  # [N]
    lengths: tuple[int, ...]  # [N]; 1 for a sample that only fills an empty cell
    columns: SampleColumns  # [F]
    routes: tuple[RankRoutes | None, ...]  # [micro], of the holder's samples; None: it has none in that micro-batch

    @property
    def route_bytes(self) -> int | None:
        """None: its samples have no routes."""
        routes = [r.nbytes for r in self.routes if r is not None]
        return sum(routes) if routes else None

    def by_name(self) -> dict[str, SampleColumns]:
        """The columns of each sample; they share memory with those of the portion."""

        def split(x: Tensor) -> Sequence[Tensor]:
            return torch.split(x, list(self.lengths))

        c = self.columns
        streams = {name: split(x) for name, x in c.streams.items()}
        parts = zip(self.names, split(c.token_ids), split(c.loss_mask), split(c.logprobs), strict=True)
        candidates = None if c.candidates is None else split(c.candidates)
        advantages = None if c.advantages is None else split(c.advantages)
        return {
            name: SampleColumns(
                token_ids=ids,
                loss_mask=mask,
                logprobs=logprobs,
                streams={of: x[i] for of, x in streams.items()},
                candidates=None if candidates is None else candidates[i],
                advantages=None if advantages is None else advantages[i],
            )
            for i, (name, ids, mask, logprobs) in enumerate(parts)
        }


def portion_of(
    cells: Sequence[PlannedMicroBatch],
    held: Mapping[str, Sample],
    part: ShardSpec,
    only: Sequence[str] | None = None,
) -> Portion | None:
    """What the holder of the samples `held`, by their names in `cells`, sends for a row; None: it has none of them.

    only: as in PlannedBatch. Advantages of tokens are the samples' stream ADVANTAGES. Raises ValueError as
    `cut_routes`, where samples differ in their streams, and where only some have routes.
    """
    whole = [name for cell in cells if not cell.filler for name in cell.samples if name in held]
    fillers = {name for cell in cells if cell.filler for name in cell.samples if name in held} - set(whole)
    names = [*whole, *sorted(fillers)]
    if not names:
        return None
    samples = [held[name] for name in names]
    lengths = [1 if name in fillers else s.length for name, s in zip(names, samples, strict=True)]

    def joined(columns: Sequence[Tensor]) -> Tensor:
        return torch.cat([x[:n] for x, n in zip(columns, lengths, strict=True)])

    streams = sorted({*samples[0].streams} - {ADVANTAGES}) if only is None else only
    candidates = [s.candidates for s in samples if s.candidates is not None and only is None]
    of_tokens = any(a is None for cell in cells for a in cell.advantages)
    return Portion(
        names=tuple(names),
        lengths=tuple(lengths),
        columns=SampleColumns(
            token_ids=joined([s.token_ids for s in samples]),
            loss_mask=joined([s.loss_mask for s in samples]),
            logprobs=joined([s.logprobs for s in samples]),
            streams={of: joined([s.streams[of] for s in samples]) for of in streams},
            candidates=joined(candidates) if candidates else None,
            advantages=joined([s.streams[ADVANTAGES] for s in samples]) if of_tokens else None,
        ),
        routes=tuple(None if only is not None else _routes(cell, held, part) for cell in cells),
    )


def _routes(cell: PlannedMicroBatch, held: Mapping[str, Sample], part: ShardSpec) -> RankRoutes | None:
    """The routes of the holder's own samples in a micro-batch."""
    names = [name for name in cell.samples if name in held]
    traces = [t for name in names if (t := held[name].routing) is not None]
    if not traces:
        return None
    if cell.filler:
        names, traces = [""], [take_rows(traces[0], torch.zeros(1, dtype=torch.int64))]
    ends = torch.tensor([0, *(len(t) for t in traces)]).cumsum(0)
    return cut_routes(RoutingTrace.concat(traces), names, ends, part)


def filled(cells: Sequence[PlannedMicroBatch], portions: Sequence[Portion]) -> list[MicroBatch]:
    """The micro-batches of a rank from the portions of all holders: those that `pack` makes, each with the rank's part
    of the routes. Raises ValueError as `fill` and `join_routes`, and for a sample that no portion has."""
    columns = {name: c for p in portions for name, c in p.by_name().items()}
    if missing := [name for cell in cells for name in cell.samples if name not in columns]:
        raise ValueError(f"sample {missing[0]} was planned, but none of the {len(portions)} holders has sent it")
    out = []
    advantages = {name: c.advantages for name, c in columns.items() if c.advantages is not None}
    for i, m in enumerate(fill(cells, columns, advantages)):
        routes = [r for p in portions if (r := p.routes[i]) is not None]
        out.append(replace(m, routing=join_routes(routes)) if routes else m)
    return out

"""Which trainer rank sends which bytes to which rank of which server, computed once from the two layouts.

A weight is encoded where its shards are if each of them ends at the blocks of its format (`Encoding.splits`); its codes
and scales are then sent from there. The others are gathered over the trainer's export, encoded whole by one rank each,
and sent by it. Weights are sent in pieces, in which no trainer rank sends and no server rank receives more than about
`piece_bytes`; a weight is in one piece.

Letters: n rows and k columns of a weight, bn x bk a block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from miles_like.types import WeightRegion
from quant.formats.quant_tensor import PerBlock
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import stored_name
from rollout.wire.flat import dtype_of
from rollout.wire.reshard.requests import HeldTensor, LayoutReply, Segment


class Part(NamedTuple):
    """A rectangle of a stored tensor, which one trainer rank has, as bytes of its rows."""

    name: str  # of the stored tensor
    leaf: str | None  # of codes and scales; None: of a weight that is not quantized
    row: int
    rows: int
    byte: int
    width: int


class Stored(NamedTuple):
    """A whole stored tensor."""

    leaf: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]


class Encoding:
    """The stored tensors of weights in one format, and of rectangles of them."""

    def __init__(self, spec: QuantSpec | None) -> None:
        self.spec, self.codec = spec, codec_or_none(spec)

    def covers(self, region: WeightRegion) -> bool:
        return self.codec is not None and self.spec is not None and self.spec.covers(region.name, region.shape)

    def splits(self, region: WeightRegion) -> bool:
        """Whether a rectangle of a weight has the codes and scales that the whole weight has there: it ends at blocks,
        or where the weight ends."""
        if not self.covers(region):
            return True
        assert self.codec is not None
        return all(
            start % block == 0 and (stop % block == 0 or stop == size)
            for (start, stop), block, size in zip(
                (region.rows, region.columns), self.codec.block, region.shape, strict=True
            )
        )

    def stored(self, region: WeightRegion) -> dict[str, Stored]:
        """Name -> the stored tensors of the whole weight, without those that a server's codec makes. Raises ValueError
        for a shape that the format cannot hold."""
        if not self.covers(region):
            return {region.name: Stored(None, dtype_of(region.dtype), region.shape)}
        assert self.codec is not None
        layout = self.codec.layout(region.shape, region.name)
        return {
            stored_name(region.name, leaf): Stored(leaf, dtype, shape)
            for leaf, (dtype, shape) in layout.items()
            if leaf not in self.codec.dropped
        }

    def parts(self, region: WeightRegion) -> list[Part]:
        """The stored tensors of a rectangle, in the order of `stored`. What applies to a whole weight is of the one
        with its first element."""
        (top, bottom), (left, right) = region.rows, region.columns
        out = []
        for name, (leaf, dtype, shape) in self.stored(region).items():
            kind = PerBlock(dtype) if leaf is None or self.codec is None else self.codec.stored[leaf]
            if isinstance(kind, PerBlock):
                rows, columns = _blocks(top, bottom, kind.rows), _blocks(left, right, kind.columns)
                out.append(Part(name, leaf, *rows, *(dtype.itemsize * c for c in columns)))
            elif top == left == 0:
                width = dtype.itemsize * math.prod(shape[1:])
                out.append(Part(name, leaf, 0, shape[0] if shape else 1, 0, width))
        return out

    def of_weight(self, leaf: str, region: WeightRegion, amax: Mapping[str, float]) -> Tensor | None:
        """The stored tensor `leaf` where it applies to the whole weight; None where it has elements for blocks. amax:
        name -> largest magnitude, of weights that share a scale."""
        assert self.codec is not None
        if isinstance(self.codec.stored[leaf], PerBlock):
            return None
        largest = torch.tensor(amax[region.name]) if region.name in amax else None
        return self.codec.whole((region.shape[0], region.shape[1]), largest)[leaf]


def _blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """(the first, number) of the blocks of a run."""
    return start // size, -(-stop // size) - start // size


class Send(NamedTuple):
    """A message of a piece. parts: place of each segment's part among those of the piece, of this rank."""

    rank: int  # of the group, that receives it
    segments: tuple[Segment, ...]  # `tensor` is the place of the part


class SourcePlan(NamedTuple):
    """What one trainer rank does for each piece."""

    regions: list[list[int]]  # its regions that it encodes and sends
    gathered: list[list[str]]  # weights that are gathered for the piece, the same on all ranks
    owned: list[list[str]]  # of these: which it encodes and sends
    sends: list[list[Send]]  # its parts are those of `regions`, then of `owned`


class ServerPlan(NamedTuple):
    """What each rank of one server gets: (piece, trainer rank, segments), in the order of pieces."""

    messages: list[list[tuple[int, int, list[Segment]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """pieces: their number. tensors: the stored tensors that are sent, to whose places the segments of servers refer.
    unsent: weights that no server has."""

    pieces: int
    tensors: list[tuple[str, Stored]]
    unsent: list[str]
    sources: list[SourcePlan]
    servers: list[ServerPlan]
    gathered_bytes: int  # of weights that are gathered, as the trainer has them
    gathered: int


class _Weight(NamedTuple):
    """One weight, and the trainer ranks that send it."""

    whole: WeightRegion
    senders: list[
        tuple[int, int, WeightRegion]
    ]  # rank, its number of the region, the region; gathered: rank, -1, whole
    is_gathered: bool


class _Loads:
    """How far each rank, of trainer or server, has come: piece p of a rank is its bytes from p * piece_bytes on."""

    def __init__(self, piece_bytes: int) -> None:
        self._size = piece_bytes
        self._at: defaultdict[Hashable, int] = defaultdict(int)

    def place(self, loads: Mapping[Hashable, int], first: int) -> int:
        """The piece of a weight of which the ranks send or receive so many bytes: the first one, from `first` on, in
        which all of them have room, or nothing yet."""
        piece = max(first, *(self._free(rank, nbytes) for rank, nbytes in loads.items()))
        for rank, nbytes in loads.items():
            self._at[rank] = min(max(self._at[rank], piece * self._size) + nbytes, (piece + 1) * self._size)
        return piece

    def _free(self, rank: Hashable, nbytes: int) -> int:
        piece, used = divmod(self._at[rank], self._size)
        return piece + (used > 0 and used + nbytes > self._size)


def make_plan(
    regions: Sequence[Sequence[WeightRegion]],
    names: Sequence[str],
    layouts: Sequence[LayoutReply],
    encoding: Encoding,
    piece_bytes: int,
) -> Plan:
    """regions: of each trainer rank. names: of all weights, in the order in which they are gathered. layouts: of each
    server, which serves these weights (`other_model`); the group's ranks are the trainer's, then those of each server.
    Raises ValueError for a weight that the format cannot hold."""
    return _Planner(regions, names, layouts, encoding, piece_bytes).plan()


class _Planner:
    def __init__(
        self,
        regions: Sequence[Sequence[WeightRegion]],
        names: Sequence[str],
        layouts: Sequence[LayoutReply],
        encoding: Encoding,
        piece_bytes: int,
    ) -> None:
        self._regions, self._layouts, self._encoding = regions, layouts, encoding
        self._ranks = len(regions)
        self._load = [0] * self._ranks  # elements that each trainer rank sends
        self._loads = _Loads(piece_bytes)
        self._tensors: list[tuple[str, Stored]] = []
        self._held = [{t.name: t for t in layout.tensors} for layout in layouts]
        self._names = names
        self._sources: list[dict[int, _Sending]] = [defaultdict(_Sending) for _ in regions]
        self._gathered: defaultdict[int, list[str]] = defaultdict(list)
        # of each server and rank: (piece, source) -> segments
        self._messages = [
            [defaultdict[tuple[int, int], list[Segment]](list) for _ in range(layout.ranks)] for layout in layouts
        ]

    def plan(self) -> Plan:
        weights = self._weights()
        unsent, gathered_bytes, gathered, last = [], 0, 0, 0
        for name in self._in_turns(weights):
            weight = weights[name]
            if not any(stored in held for stored in self._encoding.stored(weight.whole) for held in self._held):
                unsent.append(name)
                continue
            piece = self._send(weight, last if weight.is_gathered else 0)
            if weight.is_gathered:  # pieces have them in the order in which they are gathered
                last, gathered = piece, gathered + 1
                gathered_bytes += math.prod(weight.whole.shape) * dtype_of(weight.whole.dtype).itemsize
                self._gathered[piece].append(name)
        pieces = 1 + max((p for source in self._sources for p in source), default=0)
        return Plan(
            pieces=pieces,
            tensors=self._tensors,
            unsent=unsent,
            sources=[self._source(source, pieces) for source in self._sources],
            servers=[
                ServerPlan([[(p, s, segments) for (p, s), segments in sorted(rank.items())] for rank in server])
                for server in self._messages
            ],
            gathered_bytes=gathered_bytes,
            gathered=gathered,
        )

    def _weights(self) -> dict[str, _Weight]:
        """Every weight with the ranks that send it: of equal regions the rank that sends least, on the first pipeline
        stage that has one."""
        holders: dict[str, dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[int, int]]]] = defaultdict(dict)
        for rank, own in enumerate(self._regions):
            for number, r in enumerate(own):
                holders[r.name].setdefault((r.rows, r.columns), []).append((rank, number))
        out = {}
        for name in self._names:
            found = holders[name]
            first = self._region(next(iter(found.values()))[0])
            whole = first._replace(rows=(0, first.shape[0]), columns=(0, first.shape[1] if len(first.shape) > 1 else 1))
            if not all(self._encoding.splits(self._region(places[0])) for places in found.values()):
                rank = self._lightest(range(self._ranks), whole)
                out[name] = _Weight(whole, [(rank, -1, whole)], True)
                continue
            senders = []
            for places in found.values():
                stage = min(self._region(p).stage for p in places)
                there = {rank: number for rank, number in places if self._region((rank, number)).stage == stage}
                region = self._region(places[0])
                rank = self._lightest(there, region)
                senders.append((rank, there[rank], region))
            out[name] = _Weight(whole, senders, False)
        return out

    def _region(self, place: tuple[int, int]) -> WeightRegion:
        return self._regions[place[0]][place[1]]

    def _lightest(self, ranks: Iterable[int], region: WeightRegion) -> int:
        rank = min(ranks, key=self._load.__getitem__)
        self._load[rank] += (region.rows[1] - region.rows[0]) * (region.columns[1] - region.columns[0])
        return rank

    def _in_turns(self, weights: Mapping[str, _Weight]) -> list[str]:
        """The names so that all pipeline stages send at the same time, each in the order of its weights; those that
        are gathered in the order of `names`, at the end."""
        stages: defaultdict[int, list[str]] = defaultdict(list)
        late = []
        for name, weight in weights.items():
            if weight.is_gathered:
                late.append(name)
            else:
                stages[self._regions[weight.senders[0][0]][weight.senders[0][1]].stage].append(name)
        places = [((i + 1) / len(own), stage, name) for stage, own in stages.items() for i, name in enumerate(own)]
        return [name for _, _, name in sorted(places, key=lambda p: p[:2])] + late

    def _send(self, weight: _Weight, first: int) -> int:
        """Enters a weight into a piece; returns the piece."""
        places = {}
        for name, stored in self._encoding.stored(weight.whole).items():
            places[name] = len(self._tensors)
            self._tensors.append((name, stored))
        parts = [(rank, number, self._encoding.parts(region)) for rank, number, region in weight.senders]
        loads: defaultdict[Hashable, int] = defaultdict(int)
        links = []  # (sender's place in parts, place of its part, server, rank, segment of the whole tensor)
        for sender, (rank, _, own) in enumerate(parts):
            for i, part in enumerate(own):
                for server, at, segment in self._kept(part, places[part.name]):
                    links.append((sender, i, server, at, segment))
                    loads[rank] += segment.nbytes
                    loads[server, at] += segment.nbytes
        piece = self._loads.place(loads, first)
        base = [self._sources[rank][piece].add(number, weight.whole.name, own) for rank, number, own in parts]
        for sender, i, server, at, segment in links:
            rank = parts[sender][0]
            self._messages[server][at][piece, rank].append(segment)
            of_part = segment._replace(tensor=base[sender] + i)
            self._sources[rank][piece].sends.setdefault(self._member(server, at), []).append(of_part)
        return piece

    def _member(self, server: int, rank: int) -> int:
        return self._ranks + sum(layout.ranks for layout in self._layouts[:server]) + rank

    def _kept(self, part: Part, place: int) -> Iterator[tuple[int, int, Segment]]:
        """(server, its rank, what that keeps of a part)."""
        for server, (layout, held) in enumerate(zip(self._layouts, self._held, strict=True)):
            if (tensor := held.get(part.name)) is None:
                continue
            for rank, rows in enumerate(layout.rows[tensor.rows]):
                if rows is None:
                    continue
                first, last = max(rows[0], part.row), min(rows[1], part.row + part.rows)
                if first < last and part.width:
                    yield server, rank, Segment(place, first, last - first, part.byte, part.width)

    def _source(self, found: Mapping[int, _Sending], pieces: int) -> SourcePlan:
        ones = [found.get(piece, _Sending()) for piece in range(pieces)]
        return SourcePlan(
            regions=[one.regions for one in ones],
            gathered=[self._gathered.get(piece, []) for piece in range(pieces)],
            owned=[one.owned for one in ones],
            sends=[[Send(rank, tuple(s)) for rank, s in sorted(one.sends.items())] for one in ones],
        )


@dataclass(slots=True)
class _Sending:
    """What a trainer rank does for one piece."""

    regions: list[int] = field(default_factory=list)
    owned: list[str] = field(default_factory=list)
    parts: int = 0
    sends: dict[int, list[Segment]] = field(default_factory=dict)

    def add(self, number: int, name: str, parts: Sequence[Part]) -> int:
        """Enters a region, or where `number` is negative a gathered weight; returns the place of its first part."""
        if number >= 0:
            assert not self.owned, "parts of gathered weights come after those of shards"
            self.regions.append(number)
        else:
            self.owned.append(name)
        first, self.parts = self.parts, self.parts + len(parts)
        return first


def other_model(layout: LayoutReply, regions: Sequence[Sequence[WeightRegion]], encoding: Encoding) -> str:
    """The reason why a server of this layout cannot serve the weights, with a tensor that it would lack; "": it can."""
    published = {name: stored for own in regions for r in own for name, stored in encoding.stored(r).items()}
    for held in layout.tensors:
        if (stored := published.get(held.name)) is None or not _fits(held, stored):
            has = "publishes none" if stored is None else f"publishes {_described(stored.dtype, stored.shape)}"
            dtype = None if held.dtype is None else dtype_of(held.dtype)
            return (
                f"it holds {held.name} {_described(dtype, held.shape)}, but the trainer {has}: the model or the "
                "format differs; start a server of the run's model"
            )
    return ""


def _fits(held: HeldTensor, stored: Stored) -> bool:
    same = stored.leaf is None if held.dtype is None else dtype_of(held.dtype) is stored.dtype
    return same and held.shape == stored.shape


def _described(dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    return f"{list(shape)}" if dtype is None else f"{list(shape)} of {str(dtype).removeprefix('torch.')}"

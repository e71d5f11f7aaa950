"""One trainer rank's part: it encodes its shards of a piece and makes the messages to the servers' ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from miles_like.rank_protocols import WeightShards
from miles_like.types import NamedTensor, WeightRegion
from quant.formats.codec import QuantTensor
from rollout.publish.reshard.plan import Encoding, Part, Send, SourcePlan
from rollout.wire.reshard.messages import MessageHash, byte_rows, packed
from rollout.wire.reshard.requests import Segment


class Prepared(NamedTuple):
    """The messages of a piece: (rank of the group that receives it, bytes)."""

    messages: list[tuple[int, Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in memory: ranks that keep the same rows share one tensor."""
        return sum({t.data_ptr(): t.nbytes for _, t in self.messages}.values())


class Source:
    """Of one publication. gathered: the stream of weights that are gathered, if there are some; `prepare` drains it as
    far as a piece needs, the same on all ranks. amax: of weights that share a scale (`Encoding.largest`)."""

    def __init__(
        self,
        shards: WeightShards,
        encoding: Encoding,
        plan: SourcePlan,
        gathered: Iterator[NamedTensor],
        amax: Mapping[str, float],
    ) -> None:
        self._shards, self._encoding, self._plan, self._gathered, self._amax = shards, encoding, plan, gathered, amax
        self._hashes: defaultdict[int, MessageHash] = defaultdict(MessageHash)

    def prepare(self, piece: int) -> Prepared:
        """The messages of a piece; call it for all in order. Raises ValueError naming a weight that is not finite."""
        numbers, owned = self._plan.regions[piece], self._plan.owned[piece]
        whole = dict(self._drained(self._plan.gathered[piece], owned))
        regions = [self._shards.regions[n] for n in numbers] + [_whole(name, whole[name]) for name in owned]
        values = [*self._shards.values(numbers), *(whole[name].view(len(whole[name]), -1) for name in owned)]
        parts = list(self._parts(regions, values))
        messages = list(_messages(self._plan.sends[piece], parts))
        for rank, message in messages:
            self._hashes[rank].add(message)
        return Prepared(messages)

    @property
    def hashes(self) -> dict[str, str]:
        """Rank of the group -> hash of all messages that were made for it."""
        return {str(rank): found.hex for rank, found in self._hashes.items()}

    def _drained(self, names: Sequence[str], owned: Sequence[str]) -> Iterator[NamedTensor]:
        """The owned ones of the gathered weights of a piece."""
        missing, kept = set(names), set(owned)
        while missing:
            name, tensor = next(self._gathered)
            missing.discard(name)
            if name in kept:
                yield NamedTensor(name, tensor)

    def _parts(self, regions: Sequence[WeightRegion], values: Sequence[Tensor]) -> Iterator[tuple[Part, Tensor]]:
        """With the bytes of each, [rows, width], in the order of the plan."""
        codes = self._encoded(regions, values)
        for i, (region, value) in enumerate(zip(regions, values, strict=True)):
            for part in self._encoding.parts(region):
                if part.leaf is None:
                    yield part, byte_rows(value.contiguous())
                else:
                    of_weight = self._encoding.of_weight(part.leaf, region, self._amax)
                    yield part, byte_rows((codes[i].stored[part.leaf] if of_weight is None else of_weight).contiguous())

    def _encoded(self, regions: Sequence[WeightRegion], values: Sequence[Tensor]) -> dict[int, QuantTensor]:
        """The codes of the regions that are quantized, by their places."""
        named = {_label(r): i for i, r in enumerate(regions) if self._encoding.covers(r)}
        if not named or self._encoding.codec is None:
            return {}
        amax = {name: torch.tensor(self._amax[regions[i].name]) for name, i in named.items() if self._amax}
        encoded = self._encoding.codec.encode({name: values[i] for name, i in named.items()}, amax or None)
        return {i: encoded[name] for name, i in named.items()}


def _messages(sends: Sequence[Send], parts: Sequence[tuple[Part, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    made: dict[tuple[Segment, ...], Tensor] = {}

    def bytes_of(s: Segment) -> Tensor:
        part, rows = parts[s.tensor]
        return rows[s.row - part.row : s.row - part.row + s.rows, s.byte - part.byte : s.byte - part.byte + s.width]

    for send in sends:
        if send.segments not in made:
            made[send.segments] = packed(send.segments, bytes_of)
        yield send.rank, made[send.segments]


def _whole(name: str, t: Tensor) -> WeightRegion:
    columns = t.shape[1] if t.dim() > 1 else 1
    return WeightRegion(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), (0, len(t)), (0, columns), 0)


def _label(region: WeightRegion) -> str:
    """How a region is named in messages."""
    (a, b), (c, d) = region.rows, region.columns
    return f"{region.name} [{a}:{b}, {c}:{d}]"


def largest(shards: WeightShards, encoding: Encoding) -> dict[str, float]:
    """The largest magnitude in this rank's regions of each weight that shares a scale with others, or within itself;
    empty for formats without such scales. Raises ValueError naming a region that is not finite."""
    if encoding.codec is None or not encoding.codec.shared_amax:
        return {}
    found: dict[str, float] = {}
    numbers = [n for n, region in enumerate(shards.regions) if encoding.covers(region)]
    for number, value in zip(numbers, shards.values(numbers), strict=True):
        region, amax = shards.regions[number], encoding.codec.amax(value)
        if not math.isfinite(float(amax)):
            encoding.codec.encode({_label(region): value}, {_label(region): amax})  # says it in its words
        found[region.name] = max(float(amax), found.get(region.name, 0.0))
    return found


def of_bundles(ranks: Sequence[Mapping[str, float]], encoding: Encoding) -> dict[str, float]:
    """`largest` of all ranks -> of all weights with the same scale, for each of them. Raises ValueError naming one that
    shares its scale with a weight that is missing."""
    whole: dict[str, float] = {}
    for own in ranks:
        for name, amax in own.items():
            whole[name] = max(amax, whole.get(name, 0.0))
    out = {}
    for name in whole:
        assert encoding.codec is not None
        bundle = encoding.codec.bundle_of(name)
        if missing := [n for n in bundle if n not in whole]:
            raise ValueError(f"{name} shares a scale with {missing[0]}, which is missing: publish both")
        out[name] = max(whole[n] for n in bundle)
    return out

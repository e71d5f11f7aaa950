"""What each rank of a server holds, as a publisher asks for it, and the check of the plan that it makes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch

from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.updates.slices import HeldRows, Message, RankPlan
from rollout.wire.flat import dtype_of
from rollout.wire.reshard.requests import (
    HeldTensor,
    LayoutReply,
    PlannedMessage,
    PlannedTensor,
    PlanSlices,
    Segment,
    segments_of,
)

_Rows = tuple[tuple[int, int] | None, ...]


def layout_of(store: WeightStore, ranks: Sequence[Slices], most: int) -> LayoutReply:
    """The stored tensors and their rows on each rank. most: bytes that a rank receives at once."""
    patterns: dict[_Rows, int] = {}
    tensors = []
    for name, dtype, shape in store.whole_stored():
        whole = torch.empty(shape, dtype=dtype or torch.bfloat16, device="meta")
        rows = tuple(None if r is None else (r.start, r.stop) for r in store.rows_of(name, whole, ranks))
        text = None if dtype is None else str(dtype).removeprefix("torch.")
        tensors.append(HeldTensor(name=name, dtype=text, shape=shape, rows=patterns.setdefault(rows, len(patterns))))
    return LayoutReply(tensors=tuple(tensors), rows=tuple(patterns), most=most)


def rank_plans(store: WeightStore, asked: PlanSlices, ranks: Sequence[Slices], most: int) -> list[RankPlan]:
    """What each rank gets. Raises ValueError unless the plan brings each of them every byte of its slices once, each
    tensor in one piece, and at most `most` bytes at once."""
    if len(asked.messages) != len(ranks):
        raise ValueError(f"the plan is for {len(asked.messages)} ranks, but this server has {len(ranks)}: plan again")
    for name in asked.unsent:
        if not store.skips(name):
            raise ValueError(
                f"{name} is a weight of the trainer's model, but not of this server's: start a server of the "
                "trainer's model"
            )
    held = _held(store, asked.tensors, ranks)
    return [
        _plan_of(r, one, messages, asked, most)
        for r, (one, messages) in enumerate(zip(held, asked.messages, strict=True))
    ]


def _held(store: WeightStore, tensors: Sequence[PlannedTensor], ranks: Sequence[Slices]) -> list[dict[int, HeldRows]]:
    """Of each rank: what it holds of the tensors, by their places."""
    names = {t.name for t in tensors}
    if len(names) < len(tensors):
        raise ValueError("the plan lists a tensor twice: plan again")
    for name, _, _ in store.whole_stored():
        if name not in names:
            raise ValueError(f"the plan lacks {name}, which this server serves: start a server of the trainer's model")
    out: list[dict[int, HeldRows]] = [{} for _ in ranks]
    for place, t in enumerate(tensors):
        dtype, shape = dtype_of(t.dtype), tuple(t.shape)
        if store.skips(t.name):
            raise ValueError(f"{t.name} is not served: remove it from the plan")
        whole = torch.empty(shape, dtype=dtype, device="meta")
        for own, rows in zip(out, store.rows_of(t.name, whole, ranks), strict=True):
            if rows is not None:
                own[place] = HeldRows(t.name, dtype, (len(rows), *shape[1:]) if shape else shape, rows.start)
    return out


def _plan_of(
    rank: int, held: Mapping[int, HeldRows], messages: Iterable[PlannedMessage], asked: PlanSlices, most: int
) -> RankPlan:
    found: defaultdict[int, list[Message]] = defaultdict(list)
    parts: defaultdict[int, list[Segment]] = defaultdict(list)
    piece_of: dict[int, int] = {}
    sizes: defaultdict[int, int] = defaultdict(int)
    for message in messages:
        segments = segments_of(message.segments)
        for s in segments:
            if s.tensor not in held or message.piece >= asked.pieces:
                raise ValueError(
                    f"the plan of rank {rank} has {tuple(s)} in piece {message.piece}, but this rank does not "
                    "hold it: plan again"
                )
            parts[s.tensor].append(s)
            if piece_of.setdefault(s.tensor, message.piece) != message.piece:
                raise ValueError(f"the plan of rank {rank} has {held[s.tensor].name} in two pieces: plan again")
        sizes[message.piece] += sum(s.nbytes for s in segments)
        found[message.piece].append(Message(message.source, tuple(segments)))
    if sizes and (largest := max(sizes.values())) > most:
        raise ValueError(
            f"the plan of rank {rank} has a piece of {largest:,} bytes, but this server accepts {most:,} at once: "
            "lower publish.bucket_bytes, or start the server with a larger --bucket-bytes"
        )
    for place, rows in held.items():
        if not _covers(parts[place], rows):
            raise ValueError(
                f"the plan of rank {rank} does not send each byte of its rows of {rows.name} exactly once: plan again"
            )
    return RankPlan(held, {piece: tuple(ones) for piece, ones in found.items()})


def _covers(segments: Sequence[Segment], rows: HeldRows) -> bool:
    """Whether the segments are the held rows without a gap or an overlap."""
    count = rows.shape[0] if rows.shape else 1
    width = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    inside = all(
        rows.first <= s.row and s.row + s.rows <= rows.first + count and s.byte + s.width <= width for s in segments
    )
    return (
        inside
        and sum(s.nbytes for s in segments) == count * width
        and not any(
            a.row < b.row + b.rows
            and b.row < a.row + a.rows
            and a.byte < b.byte + b.width
            and b.byte < a.byte + a.width
            for a, b in combinations(segments, 2)
        )
    )

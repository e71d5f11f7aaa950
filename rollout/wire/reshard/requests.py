"""Requests and replies by which trainer ranks send each rank of an embedded server its slices of the weights.

A plan, sent once, lists for every rank of the server the messages that it gets, and where the bytes of each belong; a
request for each piece of the weights then only names the piece. The bytes travel in a process group of all trainer
ranks and all ranks of all servers, from the rank that holds them to the rank that keeps them. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from rollout.wire.bodies import MAX_TENSORS, Body, Count, DtypeName, Name, Shape, Version
from rollout.wire.control import MAX_GROUP, ControlRequest, GroupName, Outcome
from rollout.wire.endpoints import JOIN_SLICES, PLAN_SLICES, UPDATE_FROM_SLICES
from rollout.wire.replies import Reply

MAX_SEGMENTS = 1 << 20  # of one message
Rank = Annotated[int, Field(ge=0, le=MAX_GROUP)]
# tensor (its place in `PlanSlices.tensors`), first row and rows of the whole tensor, first byte of a row and bytes
SegmentBody = Annotated[list[Count], Field(min_length=5, max_length=5)]


class Segment(NamedTuple):
    """A rectangle of a stored tensor, as bytes of its rows. A tensor without dimensions is one row."""

    tensor: int  # place in the plan's list of tensors
    row: int  # in the whole tensor
    rows: int
    byte: int  # in a row
    width: int  # bytes of a row

    @property
    def nbytes(self) -> int:
        return self.rows * self.width


# ---- what a server holds


class HeldTensor(Reply):
    """A stored tensor of which a server's ranks hold rows. dtype: of codes and scales; None: any float dtype."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]  # of the whole tensor
    rows: int  # place of its rows in `LayoutReply.rows`


class LayoutReply(Reply):
    """The stored tensors of a server, and which rows of each its ranks hold."""

    tensors: tuple[HeldTensor, ...]
    rows: tuple[tuple[tuple[int, int] | None, ...], ...]  # of each rank: first row, the one after the last; None: none
    most: int  # bytes that a rank receives at once

    @property
    def ranks(self) -> int:
        return len(self.rows[0])


# ---- the plan


class PlannedTensor(Body):
    name: Name
    dtype: DtypeName
    shape: Shape  # of the whole stored tensor


class PlannedMessage(Body):
    """What a rank of the server gets from one trainer rank for one piece."""

    piece: Count
    source: Rank  # of the group
    segments: Annotated[list[SegmentBody], Field(fail_fast=True, min_length=1, max_length=MAX_SEGMENTS)]


class PlanSlices(ControlRequest):
    """Everything that the ranks of a server get in a publication. unsent: weights of the trainer that the server does
    not serve, as those of draft layers."""

    ENDPOINT = PLAN_SLICES
    pieces: Annotated[int, Field(ge=1, le=MAX_TENSORS)]
    tensors: Annotated[list[PlannedTensor], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    unsent: Annotated[list[Name], Field(fail_fast=True, max_length=MAX_TENSORS)]
    # of each rank of the server, in the order of pieces
    messages: Annotated[
        list[Annotated[list[PlannedMessage], Field(fail_fast=True, max_length=MAX_TENSORS)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_GROUP),
    ]


class JoinSlices(ControlRequest):
    """The ranks of a server join a process group at ranks from `rank_offset` on. It answers when all members have.
    timeout_s: of the join, and of each message."""

    ENDPOINT = JOIN_SLICES
    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=MAX_GROUP)]
    world_size: Annotated[int, Field(ge=2, le=MAX_GROUP)]
    group_name: GroupName
    timeout_s: Annotated[float, Field(gt=0, le=86_400)]


class UpdateFromSlices(ControlRequest):
    """The ranks receive one piece; valid only between BeginUpdate and EndUpdate. The answer is a SlicesReceived."""

    ENDPOINT = UPDATE_FROM_SLICES
    group_name: GroupName
    piece: Count
    weight_version: Version


class SlicesReceived(Outcome):
    """received: bytes that each rank has received of the piece."""

    received: tuple[int, ...] = ()


class HashesReply(Reply):
    """Of each rank of a server: trainer rank -> hash of what that rank holds of what it was sent (`messages`)."""

    ranks: tuple[Mapping[str, str], ...]


def segments_of(bodies: Sequence[Sequence[int]]) -> list[Segment]:
    return [Segment(*body) for body in bodies]

"""The part of trainer ranks other than rank 0 in a publication by shards: they follow rank 0's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from miles_like.rank_protocols import ShardedWeights, WeightShards
from miles_like.types import NamedTensor, PublishReport
from rollout.publish.publication import PublishTarget, Sent, publish_stream
from rollout.publish.reshard.membership import GroupFailed, Membership
from rollout.publish.reshard.plan import Encoding, Send, SourcePlan
from rollout.publish.reshard.source import Source, largest
from rollout.publish.reshard.talk import Talk
from rollout.wire.replies import Json
from rollout.wire.reshard.requests import segments_of

AHEAD = 2  # pieces that a rank has prepared before it sends one: rank 0 has as many, and what they gather is collective


class Member:
    """The publisher of trainer rank `rank` of `ranks`. Errors of servers are rank 0's; this one returns then."""

    every_rank = False

    def __init__(self, target: PublishTarget, *, rank: int, ranks: int) -> None:
        self._rank, self._ranks, self._encoding = rank, ranks, Encoding(target.spec)
        self._described = False  # rank 0 has the regions of this rank
        self._membership: Membership | None = None
        self._plan = SourcePlan([], [], [], [])

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """With ShardedWeights. Raises ValueError naming a weight of this rank that cannot be encoded, and
        RuntimeError."""
        own = sharded(weights)
        return publish_stream((), version=version, send=lambda _: self._take_part(own))

    def _take_part(self, weights: ShardedWeights) -> Sent:
        shards = weights.shards  # collective, as on rank 0 before it asks a server
        talk = Talk(weights.signals, number=weights.number, rank=self._rank, ranks=self._ranks)
        gathered: Iterator[NamedTensor] = iter(())
        try:
            if not self._described:
                talk.say(regions=[list(region) for region in shards.regions])
                self._described = True
            begin = _heard(talk)
            if "meeting" in begin:
                self._plan = source_plan(talk.hear_own())
            gathered = gathered_by(self._plan, weights)
            if "meeting" in begin:
                self._join(begin["meeting"])
            self._send(Source(shards, self._encoding, self._plan, gathered, self._amax(talk, shards)), talk)
        except _Stopped:
            self._leave()
        except GroupFailed as e:  # of a member that rank 0 names
            self._leave()
            talk.say(lost=str(e))
        except (ValueError, RuntimeError, OSError) as e:
            self._leave()
            talk.say(error=str(e))
            raise
        finally:
            for _ in gathered:
                pass
        return Sent(0)

    def _join(self, at: Json) -> None:
        self._leave()
        self._membership = Membership.of_another(
            at["address"],
            at["port"],
            name=at["name"],
            rank=self._rank,
            size=at["size"],
            timeout_s=at["timeout_s"],
        )

    def _amax(self, talk: Talk, shards: WeightShards) -> Mapping[str, float]:
        if self._encoding.codec is None or not self._encoding.codec.shared_amax:
            return {}
        talk.say(amax=largest(shards, self._encoding))
        found: Mapping[str, float] = _heard(talk)["amax"]
        return found

    def _send(self, source: Source, talk: Talk) -> None:
        assert self._membership is not None, "rank 0 has not named the meeting of the group"
        pieces = len(self._plan.sends)
        ready = [source.prepare(piece) for piece in range(min(AHEAD, pieces))]
        for piece in range(pieces):
            message = _heard(talk)
            assert message == {"piece": piece}, f"rank 0 sent {message} before piece {piece}"
            self._membership.send(ready.pop(0).messages)
            if piece + AHEAD < pieces:
                ready.append(source.prepare(piece + AHEAD))
            self._membership.wait()
        talk.say(hashes=source.hashes)

    def _leave(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()


def sharded(weights: Iterable[NamedTensor]) -> ShardedWeights:
    """Raises TypeError for a stream of whole tensors."""
    if not hasattr(weights, "gathered"):
        raise TypeError("publish.path = 'reshard' publishes the shards of trainer ranks, not a stream of tensors")
    return cast(ShardedWeights, weights)


class _Stopped(Exception):
    """Rank 0 has ended the publication."""


def _heard(talk: Talk) -> Json:
    message = talk.hear()
    assert message is not None
    if "stop" in message:
        raise _Stopped
    return message


def gathered_by(plan: SourcePlan, weights: ShardedWeights) -> Iterator[NamedTensor]:
    """The stream of the weights that are gathered. Draining it is collective, where there are some."""
    names = frozenset(name for piece in plan.gathered for name in piece)
    return weights.gathered(names) if names else iter(())


def plan_body(plan: SourcePlan) -> Json:
    """The JSON of a plan, which `source_plan` reads."""
    sends = [[[send.rank, [list(s) for s in send.segments]] for send in piece] for piece in plan.sends]
    return {"regions": plan.regions, "gathered": plan.gathered, "owned": plan.owned, "sends": sends}


def source_plan(body: Json) -> SourcePlan:
    def sends(piece: Sequence[tuple[int, Sequence[Sequence[int]]]]) -> list[Send]:
        return [Send(rank, tuple(segments_of(segments))) for rank, segments in piece]

    return SourcePlan(body["regions"], body["gathered"], body["owned"], [sends(piece) for piece in body["sends"]])

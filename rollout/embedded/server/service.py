"""The engine with its weights: loading, updates, versions. Runs on the engine's thread.

A server of several ranks has one `Service`, on rank 0. What it changes, the other ranks change too, or none does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from miles_like.hf.checkpoint import HFCheckpoint, generation_eos
from miles_like.types import NamedTensor
from quant.hf_config import spec_from_hf
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import plain_ops
from rollout.embedded.model.deltas import ReadDelta, read_delta
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import UpdateSession, WeightStore
from rollout.embedded.ranks.checksums import merged, rank_checksums
from rollout.embedded.ranks.crew import Crew, LedModel
from rollout.embedded.ranks.follower import Launch, SentTensor
from rollout.embedded.ranks.gloo import GlooExchange, RankLost
from rollout.embedded.ranks.part import Kept, Part, as_value_errors, opened, trim_heap
from rollout.embedded.ranks.slice_plans import layout_of, rank_plans
from rollout.embedded.server.memory import Memory
from rollout.embedded.updates.slices import Meeting, SliceReceiver
from rollout.wire.bodies import MemoryTag
from rollout.wire.deltas import DELTA, DeltaConfig
from rollout.wire.reshard.requests import LayoutReply, PlanSlices

SESSION_IDLE_S = 300.0


class RankBytes(NamedTuple):
    """Memory of one rank."""

    cache: int
    weights: int


def held_bytes(ranks: Sequence[RankBytes]) -> dict[str, int]:
    """Tag -> bytes of all ranks. Nothing is held for CUDA graphs: there are none."""
    return {
        MemoryTag.KV_CACHE.value: sum(r.cache for r in ranks),
        MemoryTag.WEIGHTS.value: sum(r.weights for r in ranks),
        MemoryTag.CUDA_GRAPH.value: 0,
    }


class Service:
    """One served model. An update of weights takes effect completely or not at all."""

    def __init__(
        self,
        model_path: Path,
        limits: EngineLimits,
        *,
        dtype: torch.dtype = torch.float32,
        weights: Literal["decoded", "codes"] = "decoded",
        activations: Literal["none", "fp8"] = "none",
        version: str = "default",
        ops: Operations = plain_ops,
        crew: Crew | None = None,
        ep_size: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        """weights, activations, device: as in `Kept`. crew: the other ranks of this server, whose caller stops them;
        None: there are none. ep_size: groups of ranks that the experts are divided over. Raises ValueError when the
        directory cannot be served, or the model does not divide over the ranks."""
        self.model_path = model_path
        checkpoint = opened(model_path)
        self._crew = crew or Crew(1)
        self.config = checkpoint.config
        slices = slices_of(checkpoint, tp_size=self._crew.size, ep_size=ep_size)
        self.arch = slices.arch
        self._exchange: GlooExchange | None = None
        kept = Kept(dtype=dtype, weights=weights, activations=activations, device=device)
        self.part = self._loaded(checkpoint, slices, kept, ops, limits)
        self.engine = Engine(self.part.model, limits, version=version)
        self._session: UpdateSession | None = None
        self._delta: ReadDelta | None = None  # prepared, to replace the weights
        self._memory = Memory()
        self._receiver, self._pieces = SliceReceiver(), 0  # pieces of its plan

    def _loaded(
        self, checkpoint: HFCheckpoint, slices: Slices, kept: Kept, ops: Operations, limits: EngineLimits
    ) -> Part:
        """The part of rank 0, when all ranks have loaded theirs."""
        crew = self._crew
        if crew.size == 1:
            return Part(checkpoint, slices, kept, ops)
        self._exchange = crew.meet()
        shards = None if ops is plain_ops else (ops.tp_shards, ops.expert_tp_shards)
        launch = partial(
            Launch, path=checkpoint.path, kept=kept, shards=shards, slots=limits.max_total_tokens, page=limits.page
        )
        own = partial(Part, checkpoint, slices, kept, ops, exchange=self._exchange, model=partial(LedModel, crew=crew))
        each = [(launch(slices=slices.of(rank)),) for rank in range(1, crew.size)]
        return crew.together(own, "build", each=each)[0]

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [os.getpid(), *self._crew.pids]

    @property
    def store(self) -> WeightStore:
        """The weights, or what rank 0 holds of them."""
        return self.part.store

    def begin_update(self, version: str | None = None, epoch: int = 0) -> None:
        """epoch: of the run whose process begins it; 0: of none.

        Raises ValueError while another update is unfinished, unless that is of the same or an older version or of an
        earlier epoch, or has received no request for SESSION_IDLE_S seconds: its publisher has failed or begins again,
        and it is dropped.
        Raises ValueError while the memory of the weights is released, as do the other methods that read or change
        weights."""
        self._memory.require_weights()
        session = self._session
        held = session is not None and session.epoch >= epoch and session.idle_s < SESSION_IDLE_S
        if session is not None and held and not _replaces(version, session.begun_as):
            other = "" if session.begun_as is None else f" of version {session.begun_as}"
            raise ValueError(
                f"a weight update{other} has already begun: end it first, or begin an update of this or a newer version"
            )
        self._crew.together(lambda: None, "begin")
        self._session = UpdateSession(self.store, begun_as=version, epoch=epoch)

    def require_update(self, version: str | None) -> None:
        """Raises ValueError outside of an update and in one of another version."""
        self._update_session(version)

    def update(self, tensors: Iterable[NamedTensor], *, flush_cache: bool, version: str | None) -> None:
        """Stages tensors. Raises ValueError outside of an update, in one of another version, and naming a tensor that
        does not fit the model."""
        session = self._update_session(version)
        self._memory.require_weights()
        self.require_flushable(flush_cache)
        try:
            self._stage(session, tensors)
        except Exception as e:  # some ranks may have tensors of this request that others lack
            session.refused = session.refused or f"{type(e).__name__}: {e}"
            raise
        session.version = version if version is not None else session.version
        session.touch()

    def _stage(self, session: UpdateSession, tensors: Iterable[NamedTensor]) -> None:
        """On all ranks."""
        others = [(self.part.slices.of(rank), list[SentTensor]()) for rank in range(1, self._crew.size)]
        for name, tensor in tensors:
            if session.add(name, tensor):
                for slices, sent in others:
                    if (piece := self.store.cut(name, tensor, slices)) is not None:
                        sent.append(SentTensor.of(name, piece))
        self._crew.together(lambda: None, "stage", each=[(sent,) for _, sent in others])

    # ---- slices, which trainer ranks send each rank

    def slices_layout(self, most: int) -> LayoutReply:
        """What each rank holds. most: bytes that it receives at once. Any thread may call it."""
        return layout_of(self.store, self._all_slices, most)

    def plan_slices(self, asked: PlanSlices, most: int) -> None:
        """Has each rank hold its part of a plan. Raises ValueError for one that does not fit this model and layout. As
        the next two it waits for no engine step, and one thread at a time may call it."""
        first, *others = rank_plans(self.store, asked, self._all_slices, most)
        self._crew.beside(partial(self._receiver.plan, first), "plan", [(plan,) for plan in others])
        self._pieces = asked.pieces

    def join_slices(self, at: Meeting) -> None:
        """All ranks join a group, this one at the rank that `at` names. Raises ValueError."""
        others = [(at.of(at.rank + i),) for i in range(1, self._crew.size)]
        self._crew.beside(partial(self._receiver.join, at), "join", others)

    def receive_slices(self, group: str, piece: int) -> list[int]:
        """Each rank receives a piece; returns the bytes of each. Raises ValueError; all ranks have left the group then,
        or lost it."""
        return self._crew.beside(
            partial(self._receiver.receive, group, piece), "receive", [(group, piece)] * (self._crew.size - 1)
        )

    def leave_slices(self, group: str) -> bool:
        """Whether the ranks were members of `group`."""
        return self._crew.beside(partial(self._receiver.leave, group), "leave", [(group,)] * (self._crew.size - 1))[0]

    def adopt_slices(self, piece: int, version: str) -> None:
        """Stages the piece that was received last. Raises ValueError as `update`."""
        session = self._update_session(version)
        self._memory.require_weights()
        try:
            self._crew.together(lambda: session.take(self._receiver.take()), "adopt_slices")
        except ValueError as e:
            session.refused = session.refused or str(e)
            raise
        session.pieces.add(piece)
        session.version, session.of_pieces = version, self._pieces
        session.touch()

    def slice_hashes(self) -> list[dict[str, str]]:
        """For each rank: trainer rank -> hash of the held bytes of its messages (`SliceReceiver.hashes`)."""
        self._memory.require_weights(defined=True)
        return self._crew.together(lambda: self._receiver.hashes(self.store.stored_tensor()), "slice_hashes")

    @property
    def _all_slices(self) -> list[Slices]:
        return [self.part.slices.of(rank) for rank in range(self._crew.size)]

    def end_update(self, version: str | None = None) -> None:
        """Applies the staged tensors. Raises ValueError when they are incomplete; all old weights then stay. After a
        release of the weights an update must bring every one of them."""
        session = self._update_session(version)
        self._memory.require_weights()
        self._session = None
        with self._all_or_none():
            new = session.finish()
            found = set[str]().union(*self._crew.together(lambda: list(new), "finish"))
            wanted, everything = self.store.whole_shapes, self._memory.undefined
            self._memory.require_all(sorted(wanted.keys() - found), len(wanted))
            self._crew.together(partial(self.part.prepare, new, all_of_them=everything), "prepare", everything)
        self._commit()
        if session.version is not None:
            self.engine.set_version(session.version)

    def _update_session(self, version: str | None) -> UpdateSession:
        session = self._session
        if session is None:
            raise ValueError("no weight update has begun, so none can be ended: call /begin_weight_update first")
        if None not in (version, session.begun_as) and version != session.begun_as:
            raise ValueError(
                f"the current weight update is of version {session.begun_as}, not {version}: another publisher "
                "began it; publish again"
            )
        return session

    def candidate(self, path: Path) -> HFCheckpoint:
        """Opens a directory that can replace the served one, judging by its headers. Does not access the engine, so any
        thread may call it. Raises ValueError."""
        checkpoint = opened(path)
        if DELTA in checkpoint.config:
            raise ValueError(f'{path} contains weight differences, not a model: send load_format "{DELTA}"')
        arch = architecture_of(checkpoint.config, eos_ids=self.arch.eos_ids)
        if arch != self.arch:
            raise ValueError(f"{path} is a different model from {self.model_path}: start a server for it")
        self.store.check_coverage(spec_from_hf(checkpoint.config), path)
        return checkpoint

    def update_from_disk(self, path: Path, *, flush_cache: bool, version: str | None) -> None:
        """Replaces all weights from a directory of the same architecture. On ValueError the old weights stay."""
        self.require_flushable(flush_cache)
        self.load(self.candidate(path), flush_cache=flush_cache, version=version)

    def load(self, checkpoint: HFCheckpoint, *, flush_cache: bool, version: str | None) -> None:
        """Replaces all weights by those of a `candidate`. On ValueError the old weights stay."""
        self._memory.require_weights()
        self.require_flushable(flush_cache)
        with self._all_or_none():
            self._crew.together(partial(self.part.prepare_from, checkpoint), "prepare_from", checkpoint.path)
        self._commit()
        self.model_path = checkpoint.path
        if version is not None:
            self.engine.set_version(version)

    def delta(self, path: Path, version: str | None) -> ReadDelta:
        """Reads a directory of weight differences and applies it to a copy of the weights that it changes. The engine
        may run meanwhile, and any thread may call it. version: that it must give; None: any. Raises ValueError."""
        self._memory.require_weights(defined=True)
        if self._crew.size > 1:
            raise ValueError(
                f"the {self._crew.size} ranks of this server hold slices, to which weight differences cannot be "
                "applied: publish the whole weights"
            )
        store = self.store
        checkpoint = opened(path)
        self._check_versions(DeltaConfig.of(checkpoint.config, path), path, version)
        with as_value_errors(path):
            return read_delta(checkpoint, store)

    def _check_versions(self, config: DeltaConfig, path: Path, version: str | None) -> None:
        if config.base != self.engine.version:
            raise ValueError(
                f"the weight differences in {path} are relative to version {config.base}, but this server serves "
                f"version {self.engine.version}: publish the whole weights"
            )
        if version not in (None, config.version):
            raise ValueError(
                f"the weight differences in {path} produce version {config.version}, not {version}: publish the "
                "whole weights"
            )

    def prepare_delta(self, read: ReadDelta) -> None:
        """Holds what `load_delta` needs, in place of what an earlier call brought."""
        self._delta = read

    def load_delta(self, path: Path, *, flush_cache: bool, version: str | None) -> None:
        """Replaces the weights by those that a directory of differences makes of the served ones: those that were
        prepared, if they are. On ValueError the old weights stay."""
        self._memory.require_weights(defined=True)
        self.require_flushable(flush_cache)
        read = self._delta
        if read is None or read.store is not self.store or read.checkpoint.path != path:
            read = self.delta(path, version)
        self._check_versions(read.config, path, version)
        with self._all_or_none():
            self.part.prepare(read.weights, all_of_them=False)
        self._commit()
        self.engine.set_version(read.config.version)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """For every step of an update that can fail: after an error no rank keeps anything of it."""
        try:
            yield
        except RankLost:
            raise
        except Exception:
            self._crew.together(self.part.discard, "discard")
            raise

    def _commit(self) -> None:
        """Replaces the weights that are served by those that all ranks have prepared."""
        self._crew.together(self.part.commit, "commit")
        self._delta = None
        self.engine.weights_changed()
        self._memory.undefined = False
        self.engine.refusal = self._memory.refusal

    # ---- memory

    def release(self, tags: Collection[MemoryTag]) -> dict[str, int]:
        """Frees the memory of `tags`; returns `held`. Until it is resumed, and after a release of the weights until all
        of them have been replaced, prompts are refused. The keys and values of all prefixes are dropped with the cache.
        Raises ValueError, without effect, while requests run or wait or an update of weights is unfinished, and for
        memory that is released already."""
        engine = self.engine
        if engine.running or engine.waiting:
            raise ValueError(
                f"{engine.running} samples run and {engine.waiting} wait: memory can only be released on an idle "
                "server: wait for them, or abort them first"
            )
        if self._session is not None and MemoryTag.WEIGHTS in tags:
            raise ValueError("a weight update has begun: end it before the weights are released")
        self._memory.release(tags)
        cache, weights = MemoryTag.KV_CACHE in tags, MemoryTag.WEIGHTS in tags
        self._crew.together(lambda: None, "release", cache, weights)
        if cache:
            engine.cache.free_memory()
        if weights:
            self.part.free()
            self._delta = None
        engine.refusal = self._memory.refusal
        trim_heap()
        return self.held()

    def resume(self, tags: Collection[MemoryTag]) -> dict[str, int]:
        """Makes the memory of `tags` usable again; returns `held`. The cache is empty; the weights take up memory with
        the update that replaces them. Raises ValueError, without effect, for memory that is not released, and without
        effect the error of an allocation that fails."""
        self._memory.resume(tags)
        own, cache = self.engine.cache, MemoryTag.KV_CACHE in tags
        try:
            self._crew.together(own.allocate_memory if cache else lambda: None, "resume", cache)
        except RankLost:
            raise
        except Exception:  # there is not enough: nothing of it is kept, so that the request can be sent again
            self._memory.release(tags)
            self._crew.together(own.free_memory if cache else lambda: None, "release", cache, False)
            raise
        self.engine.refusal = self._memory.refusal
        return self.held()

    def held(self) -> dict[str, int]:
        """As `held_bytes`."""
        return held_bytes(self.held_by_rank())

    def held_by_rank(self) -> list[RankBytes]:
        """Bytes in memory of each rank."""
        own = RankBytes(self.engine.cache.nbytes, self.part.nbytes)
        return [RankBytes(*r) for r in self._crew.together(lambda: own, "held")]

    def checksums(self) -> dict[str, str]:
        """As `WeightStore.checksums`, of whole tensors, whatever the ranks hold of them. Raises ValueError naming a
        tensor of which ranks hold different copies."""
        self._memory.require_weights(defined=True)
        if self._exchange is None:
            return self.store.checksums()
        return merged(self._crew.together(partial(rank_checksums, self.store, self._exchange), "checksums"))

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights: the store, prepared copies, and the buffer for decoded values."""
        return self.held()[MemoryTag.WEIGHTS.value]

    def require_flushable(self, flush_cache: bool) -> None:
        """Raises ValueError if the cache is to be flushed while frozen requests use it."""
        if flush_cache and self.engine.paused and not self.engine.idle:
            raise ValueError(
                f"{self.engine.running} requests are paused in place and use the cache: send flush_cache = false, "
                "or pause with mode retract"
            )


def slices_of(checkpoint: HFCheckpoint, *, tp_size: int, ep_size: int) -> Slices:
    """The slices of rank 0. Raises ValueError for a model that is not supported, or not divisible over the ranks."""
    arch = architecture_of(checkpoint.config, eos_ids=generation_eos(checkpoint.path))
    slices = Slices(arch=arch, tp=tp_size, ep=ep_size)
    slices.check()
    return slices


def _replaces(version: str | None, begun: str | None) -> bool:
    """Whether an update of `version` takes the place of one of version `begun`. Versions are compared as numbers; one
    that is not a number takes no place and leaves none."""
    return version is not None and begun is not None and _number(version) >= _number(begun) >= 0


def _number(version: str) -> int:
    return int(version) if version.isdecimal() and len(version) < 20 else -1

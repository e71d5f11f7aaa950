"""Forward and backward over one step's micro-batches by megatron's schedule. Knows no optimizer, no algorithm.

The gradient left behind is d/dw of (sum of per-token losses over every loss token of the global batch) / loss_tokens,
whatever the layout, the packing or the number of micro-batches. Letters: T packed tokens, P rows that a context-
parallel rank feeds, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from megatron_bridge.agree import check_equal, raise_together
from megatron_bridge.agreement import COVERAGE, agreement_stats
from megatron_bridge.model import unwrap
from megatron_bridge.mtp import mtp_loss
from megatron_bridge.overlap import leave_no_sync
from megatron_bridge.parallel import ParallelContext
from megatron_bridge.replay_hook import RoutingReplay, Source
from megatron_bridge.shard import Shard, shard, whole
from megatron_bridge.stats import Stats, gather, values
from miles_like.protocols import LossFn
from miles_like.types import MicroBatch, Scored, Stat
from routing_replay.agreement import RouteCounts
from routing_replay.align import RankPart
from routing_replay.tape import OwnRoutes

_Output = Sequence[Tensor]  # of the model, on the last stage: see PolicyModel
_After = Callable[[int, Shard, _Output], tuple[Tensor, Tensor, Any]]  # of a micro-batch's output: loss, count, rest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldPolicy:
    """What the weights that a rollout's first optimizer step begins with make of one mini-batch."""

    logprobs: Sequence[Tensor]  # [T] fp32 of each micro-batch: of labels with loss, 0 elsewhere
    routes: Sequence[OwnRoutes] | None  # of each micro-batch, this rank's rows and layers: what r2 replays
    agreement: Mapping[str, Stat]  # of the routers' own choice with the rollout's, over all ranks: agreement.py


class Step:
    """One rank's part in every step."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        transformer_config: Any,
        parallel: ParallelContext,
        replay: RoutingReplay,
        loss: LossFn,
        device: torch.device,
        mtp_coefficient: float = 0.0,
        token_multiple: int = 1,
    ) -> None:
        self.vocab, self.scalar = unwrap(chunks[0]).vocab_size, unwrap(chunks[0]).scalar
        self.chunks, self.config, self.parallel = chunks, transformer_config, parallel
        self.replay, self.loss, self.device = replay, loss, device
        self.part = RankPart(
            layers=replay.layers,
            cp=parallel.config.cp,
            cp_rank=parallel.cp_rank,
            multiple=parallel.config.tp * token_multiple,  # the rows of every rank, as FP8 products want
        )
        self.depths, self.mtp_coefficient = transformer_config.mtp_num_layers or 0, mtp_coefficient
        self.prepare: Callable[[], None] = lambda: None  # collective; what weights that have changed ask for

    def run(self, row: Sequence[MicroBatch], loss_tokens: int, **how: Any) -> dict[str, float]:
        """`stats` as numbers."""
        return values(self.stats(row, loss_tokens, **how))

    def stats(
        self,
        row: Sequence[MicroBatch],
        loss_tokens: int,
        *,
        forward_only: bool = False,
        refs: Sequence[Tensor] | None = None,
        old: OldPolicy | None = None,
    ) -> Stats:
        """Accumulate the gradients of this data-parallel row; statistics, equal on every rank. Collective.

        `refs`: the reference log-probabilities of each micro-batch, [T] fp32, handed on to the loss function, as are
        `old`'s. In mode r2 the routes of `old` are replayed; a forward pass alone may do without and chooses by itself.

        Raises ValueError, on every rank, when a row or a micro-batch is empty, rows differ in their number of
        micro-batches, a token is outside the vocabulary, loss_tokens is not the number of labels with loss over all
        rows, or in mode r3 when a micro-batch has no routing or a recorded row was not used exactly once. A micro-batch
        without loss is legal beside others.
        """
        if loss_tokens < 1:
            raise ValueError(f"a batch with {loss_tokens} loss tokens teaches nothing: drop it")
        routes = None if old is None else old.routes
        shards = self._shards(row, forward_only=forward_only, routes=routes)
        self.config.finalize_model_grads_func = partial(_finalize, loss_tokens, self.parallel)
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        olds = None if old is None else old.logprobs
        outputs: list[Stats] = self._schedule(shards, partial(self._loss, refs, olds), forward_only=forward_only)
        stats = gather(outputs, self.parallel, self.device)
        count = int(stats["train/loss"].count)
        if count != loss_tokens:
            raise ValueError(f"loss_tokens = {loss_tokens}, but the loss masks of all rows hold {count} tokens")
        return stats | self._routing(updated=old is not None)

    def logprobs(self, row: Sequence[MicroBatch], *, candidates: bool = False) -> list[Tensor]:
        """[T] fp32 for each micro-batch, on every rank that has the row: log-probability of each label with loss, 0
        elsewhere; or those of its candidates, [T, C]. Collective. Forward only; the weights choose their experts
        themselves; nothing changes."""
        return self._logprobs(self._shards(row if candidates else _labels_alone(row), forward_only=True, source="own"))

    def score(self, row: Sequence[MicroBatch], *, replay: bool) -> Scored:
        """Each micro-batch's log-probabilities and what this rank's own routers chose meanwhile. With `replay` the
        experts are those that came with the rollout, whatever replay.mode says, and nothing is noted. All on the
        CPU: who asks may be on a machine without a device. Collective, and raises as `logprobs` does, and for a
        micro-batch without routes that are to be replayed."""
        row = _labels_alone(row)
        logprobs = self._logprobs(self._shards(row, forward_only=True, source="rollout" if replay else "record"))
        routes = () if replay else tuple(self.replay.recorded())
        return Scored(logprobs=[x.cpu() for x in logprobs], routes=[own.on_cpu() for own in routes])

    def old_policy(self, row: Sequence[MicroBatch]) -> OldPolicy:
        """The old-log-prob pass over a mini-batch: as `logprobs`, but with the routes that its update will replay: the
        rollout's in mode r3; in mode r2 the routers' own, which are recorded. Collective, and raises as `stats`."""
        record, row = self.replay.mode == "r2", _labels_alone(row)
        logprobs = self._logprobs(self._shards(row, forward_only=True, source="record" if record else "mode"))
        routes = self.replay.recorded() if record else None
        own = {k: stat for k, stat in self._routing(updated=False).items() if k != COVERAGE}
        return OldPolicy(logprobs=logprobs, routes=routes, agreement=own)

    def _logprobs(self, shards: list[Shard]) -> list[Tensor]:
        found: list[Tensor] = self._schedule(shards, self._labels, forward_only=True)
        if self.parallel.config.pp == 1:
            return found
        lengths, asked = [len(s.batch.tokens) for s in shards], shards[0].batch.candidates
        width = () if asked is None else asked.shape[1:]
        last = self.parallel.is_last_stage
        values = torch.cat(found) if last else torch.empty(sum(lengths), *width, device=self.device)
        dist.broadcast(values, self.parallel.last_stage_rank, group=self.parallel.pp_group)
        return list(values.split(lengths))

    def _shards(
        self,
        row: Sequence[MicroBatch],
        *,
        forward_only: bool,
        source: Source = "mode",
        routes: Sequence[OwnRoutes] | None = None,
    ) -> list[Shard]:
        """The row as this rank feeds it, with its routes loaded. What one rank cannot take, every rank raises."""
        experts, error, out = self.config.num_moe_experts or 0, None, []
        stages = self.parallel.config.pp
        fixed = {"part": self.part, "num_experts": experts, "depths": self.depths}
        try:
            if not row:
                raise ValueError("a row without micro-batches: give each data-parallel rank at least one")
            if len(self.chunks) > 1 and len(row) % stages:
                raise ValueError(
                    f"{len(row)} micro-batches do not divide over the {stages} stages of an interleaved pipeline "
                    f"(parallel.vpp = {len(self.chunks)}): pack with micro_multiple = {stages}"
                )
            for batch in row:
                if self.scalar and batch.candidates is not None:
                    raise ValueError(
                        "candidates of a model with a scalar head, which predicts no token: leave them out"
                    )
                _check_vocabulary(batch, self.vocab)
                out.append(shard(batch, self.parallel, self.device, **fixed))
            self.replay.load(out, forward_only=forward_only, source=source, routes=routes)
        except ValueError as e:
            error = e
        raise_together(error, self.device)
        check_equal("micro-batches", len(out), self.device, remedy="give every data-parallel row as many")
        return out

    def _schedule(self, shards: list[Shard], after: _After, *, forward_only: bool) -> list[Any]:
        """Megatron's schedule; what `after` made of each micro-batch, in order, on the last stage."""
        virtual = len(self.chunks) > 1
        self.prepare()
        try:
            with torch.no_grad() if forward_only else nullcontext():
                outputs: list[Any] = get_forward_backward_func()(
                    forward_step_func=partial(self._forward, after),
                    data_iterator=[iter(enumerate(shards)) for _ in self.chunks]
                    if virtual
                    else iter(enumerate(shards)),
                    model=self.chunks if virtual else self.chunks[0],
                    num_microbatches=len(shards),
                    seq_length=shards[0].tokens.shape[1],  # each micro-batch announces its own
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
        finally:
            leave_no_sync(self.config)
        self.replay.finish()
        return outputs

    def _forward(self, after: _After, batches: Iterator[tuple[int, Shard]], model: Any) -> tuple[Tensor, Any]:
        micro, s = next(batches)
        self.replay.forward_of(micro)
        output = model(s.tokens, s.positions, None, labels=s.labels, loss_mask=s.loss_mask, packed_seq_params=s.packed)
        for x in (output,) if isinstance(output, Tensor) else output:
            if x.requires_grad:
                # The first thing that happens in this micro-batch's backward, before any layer is recomputed.
                x.register_hook(lambda _grad: self.replay.backward_of(micro))
        return output, partial(after, micro, s)

    def _loss(
        self, refs: Sequence[Tensor] | None, olds: Sequence[Tensor] | None, micro: int, s: Shard, output: _Output
    ) -> tuple[Tensor, Tensor, Stats]:
        """(sum of the losses, number of loss tokens, statistics) of one micro-batch."""
        batch = s.batch
        logprobs, entropy, *more = whole(s, output, self.parallel.cp_group)
        nll, candidates = more[: self.depths], more[self.depths :]
        per_token, stats = self.loss(
            logprobs=logprobs,
            entropy=entropy,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            ref_logprobs=None if refs is None else refs[micro],
            old_logprobs=None if olds is None else olds[micro],
            streams=batch.streams,
            candidate_logprobs=candidates[0] if candidates else None,
        )
        if batch.weights is not None:
            per_token = per_token * batch.weights
        total = torch.where(batch.loss_mask, per_token, 0.0).sum()  # a masked label may well be infinite
        count = batch.loss_mask.sum()
        # a statistic that hangs on the graph would keep it until the end of the step
        stats = {name: Stat(x.total.detach(), x.count, x.reduce) for name, x in stats.items()}
        stats["train/loss"] = Stat(total.detach(), count)
        if nll:
            of_depths, stats["train/mtp_loss"] = mtp_loss(
                torch.stack(nll), batch.loss_mask, batch.cu_seqlens, self.mtp_coefficient
            )
            total = total + of_depths
        return total, count.to(torch.int), stats

    def _labels(self, micro: int, s: Shard, output: _Output) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probabilities alone, [T], where a loss would have its statistics; where there are candidates, theirs
        instead, [T, C]."""
        [logprobs] = whole(s, output[:1] if s.batch.candidates is None else output[-1:], self.parallel.cp_group)
        return logprobs.sum(), s.batch.loss_mask.sum().to(torch.int), logprobs

    def _routing(self, *, updated: bool) -> Stats:
        """Over all ranks: each counted its own rows of its own layers. `updated`: after an old-log-prob pass, so that
        agreement may be of weights that have moved since."""
        r = self.replay
        # a row for each layer of the whole model, then one for what all layers have in common
        counts = torch.zeros(
            self.config.num_layers + 1, len(RouteCounts._fields), dtype=torch.float64, device=self.device
        )
        if r.counts:
            layers = torch.tensor(list(r.counts), device=self.device)
            counts[layers] = torch.stack(list(r.counts.values())).double()
        counts[-1, 0] += r.replayed
        counts[-1, 1] += r.routed
        dist.all_reduce(counts)
        of_layers = {i: RouteCounts(*row) for i, row in enumerate(counts[:-1].tolist()) if row[0]}
        coverage = {COVERAGE: Stat(counts[-1, 0], counts[-1, 1])}
        return coverage | agreement_stats(of_layers, self.config.moe_router_topk, updated=updated)


def _labels_alone(row: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Nobody asks for the candidates."""
    return [batch if batch.candidates is None else replace(batch, candidates=None) for batch in row]


def _check_vocabulary(batch: MicroBatch, size: int) -> None:
    """Raises ValueError for a token, or a label or candidate with loss, outside the vocabulary: over tensor-parallel
    ranks, and for a label on any, lookups would take it for one that another rank has."""
    asked = [batch.labels] if batch.candidates is None else [batch.labels, batch.candidates]
    ids = torch.cat([batch.tokens, *(x[batch.loss_mask].flatten() for x in asked)])
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise ValueError(
            f"token {int(wrong[0])} is outside the model's vocabulary of {size}: check that rollout and trainer have "
            "the same tokenizer and config.json"
        )


def _finalize(
    loss_tokens: int, parallel: ParallelContext, model: list[Any], num_tokens: Tensor | None, **kwargs: Any
) -> None:
    """Megatron adds `num_tokens` up over data-parallel ranks and divides by the sum: let the sum be loss_tokens."""
    assert num_tokens is not None
    share = torch.full_like(num_tokens, loss_tokens if parallel.dp_cp_group.rank() == 0 else 0)
    finalize_model_grads(model, share, **kwargs)

"""Forward and backward over one step's micro-batches with megatron's schedule, independent of optimizer and algorithm.

The accumulated gradient is d/dw of (sum of per-token losses over every loss token of the global batch) / loss_tokens,
for any layout, packing and number of micro-batches. Letters: T packed tokens, P rows that a context-parallel rank
feeds, C candidates per token.
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

from megatron_bridge.device.collective_errors import check_equal, raise_on_every_rank
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.build import unwrap
from megatron_bridge.model.kernels.chosen import fused_parts
from megatron_bridge.model.mtp import mtp_loss
from megatron_bridge.step.layer_states import StateRecorder
from megatron_bridge.step.overlap import leave_no_sync
from megatron_bridge.step.replay_hook import RoutingReplay, Source
from megatron_bridge.step.routing_check import COVERAGE, agreement_stats
from megatron_bridge.step.shard import Shard, gather_tokens, shard
from megatron_bridge.step.stats import Stats, reduce_stats, values
from miles_like.protocols import LossFn
from miles_like.types import LossInputs, MicroBatch, Scored, SharedExperts, Stat
from routing_replay.agreement import RouteCounts
from routing_replay.align import ShardSpec
from routing_replay.replay import RecordedRoutes

_Output = Sequence[Tensor]  # the model's output on the last stage: see PolicyModel
_After = Callable[[int, Shard, _Output], tuple[Tensor, Tensor, Any]]  # (loss, token count, result) of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldPolicy:
    """Log-probabilities and routes of one mini-batch under the weights before a rollout's first optimizer step."""

    logprobs: Sequence[Tensor]  # [T] fp32 per micro-batch: of labels with loss, 0 elsewhere
    routes: Sequence[RecordedRoutes] | None  # per micro-batch, of this rank's rows and layers: what r2 replays
    agreement: Mapping[str, Stat]  # of the routers' own choice with the rollout's, over all ranks: routing_check.py
    samples: Mapping[str, SharedExperts]  # the same of each sample, of this rank


class Step:
    """Runs one rank's forward and backward passes."""

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
        self.shard_spec = ShardSpec(
            layers=replay.layers,
            cp=parallel.config.cp,
            cp_rank=parallel.cp_rank,
            multiple=parallel.config.tp * token_multiple,  # FP8 products need such a number of rows on every rank
        )
        self.depths, self.mtp_coefficient = transformer_config.mtp_num_layers or 0, mtp_coefficient
        self.prepare: Callable[[], None] = lambda: None  # collective; called before each pass to refresh weights

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss_tokens: int,
        *,
        forward_only: bool = False,
        refs: Sequence[Tensor] | None = None,
    ) -> dict[str, float]:
        """As `stats`, with each statistic as a number."""
        return values(self.stats(batches, loss_tokens, forward_only=forward_only, refs=refs))

    def stats(
        self,
        batches: Sequence[MicroBatch],
        loss_tokens: int,
        *,
        forward_only: bool = False,
        refs: Sequence[Tensor] | None = None,
        old: OldPolicy | None = None,
    ) -> Stats:
        """Accumulate the gradients of this rank's micro-batches; returns statistics, equal on every rank. Collective.

        `refs`: the reference log-probabilities of each micro-batch, [T] fp32, passed to the loss function, as are
        `old`'s. In mode r2 the routes of `old` are replayed; a forward-only pass without `old` uses the routers' own.

        Raises ValueError, on every rank, for an empty list or micro-batch, numbers of micro-batches that differ between
        ranks, a token outside the vocabulary, a loss_tokens that is not the number of labels with loss over all ranks,
        and in mode r3 for a micro-batch without routes or a recorded row that was not used exactly once. A micro-batch
        without loss is valid if others have some.
        """
        if loss_tokens < 1:
            raise ValueError(f"a batch with {loss_tokens} loss tokens has nothing to train on: skip it")
        routes = None if old is None else old.routes
        shards = self._shards(batches, forward_only=forward_only, routes=routes)
        self.config.finalize_model_grads_func = partial(_finalize, loss_tokens, self.parallel)
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        olds = None if old is None else old.logprobs
        fused_parts()  # of what this process computed before
        outputs: list[Stats] = self._schedule(shards, partial(self._loss, refs, olds), forward_only=forward_only)
        stats = reduce_stats(outputs, self.parallel, self.device)
        count = int(stats["train/loss"].count)
        if count != loss_tokens:
            raise ValueError(f"loss_tokens = {loss_tokens}, but the loss masks of all ranks have {count} tokens")
        return stats | self._routing(updated=old is not None)

    def logprobs(self, batches: Sequence[MicroBatch], *, candidates: bool = False) -> list[Tensor]:
        """[T] fp32 for each micro-batch, on every rank of the data-parallel shard: log-probability of each label with
        loss, 0 elsewhere; or those of its candidates, [T, C]. Collective. Forward only, with the routers' own choices;
        no state changes."""
        return self._pass_logprobs(
            self._shards(batches if candidates else _without_candidates(batches), forward_only=True, source="own")
        )

    def score(self, batches: Sequence[MicroBatch], *, replay: bool, states: bool = False) -> Scored:
        """Each micro-batch's log-probabilities and the choices of this rank's routers. With `replay` the experts are
        the rollout's, regardless of replay.mode, and no choices are returned. states: return the residual stream at
        this rank's layers too. Results are on the CPU, since the caller may run on a machine without a device.
        Collective; raises as `logprobs`, and for missing routes to replay."""
        batches = _without_candidates(batches)
        shards = self._shards(batches, forward_only=True, source="rollout" if replay else "record")
        recorder = StateRecorder(self.chunks, lambda: self.replay.micro)
        with recorder if states else nullcontext():
            logprobs = self._pass_logprobs(shards)
        routes = () if replay else tuple(self.replay.recorded())
        return Scored(
            logprobs=[x.cpu() for x in logprobs],
            routes=[own.on_cpu() for own in routes],
            states=recorder.states([s.fed for s in shards]) if states else (),
        )

    def old_policy(self, batches: Sequence[MicroBatch]) -> OldPolicy:
        """The old-log-prob pass over a mini-batch: as `logprobs`, but with the routes that its update will replay,
        which are the rollout's in mode r3, and the routers' own, recorded here, in r2. Collective; raises as `stats`.
        """
        record, batches = self.replay.mode == "r2", _without_candidates(batches)
        logprobs = self._pass_logprobs(self._shards(batches, forward_only=True, source="record" if record else "mode"))
        routes = self.replay.recorded() if record else None
        own = {k: stat for k, stat in self._routing(updated=False).items() if k != COVERAGE}
        return OldPolicy(logprobs=logprobs, routes=routes, agreement=own, samples=self.replay.agreement())

    def _pass_logprobs(self, shards: list[Shard]) -> list[Tensor]:
        found: list[Tensor] = self._schedule(shards, self._label_logprobs, forward_only=True)
        if self.parallel.config.pp == 1:
            return found
        lengths, candidates = [len(s.batch.tokens) for s in shards], shards[0].batch.candidates
        width = () if candidates is None else candidates.shape[1:]
        last = self.parallel.is_last_stage
        values = torch.cat(found) if last else torch.empty(sum(lengths), *width, device=self.device)
        dist.broadcast(values, self.parallel.last_stage_rank, group=self.parallel.pp_group)
        return list(values.split(lengths))

    def _shards(
        self,
        batches: Sequence[MicroBatch],
        *,
        forward_only: bool,
        source: Source = "mode",
        routes: Sequence[RecordedRoutes] | None = None,
    ) -> list[Shard]:
        """The micro-batches as this rank feeds them, with their routes loaded. Every rank raises one rank's error."""
        experts, out = self.config.num_moe_experts or 0, list[Shard]()
        stages, error = self.parallel.config.pp, None
        try:
            if not batches:
                raise ValueError("a data-parallel rank has no micro-batches: give each rank at least one")
            if len(self.chunks) > 1 and len(batches) % stages:
                raise ValueError(
                    f"{len(batches)} micro-batches are not divisible by the {stages} stages of an interleaved pipeline "
                    f"(parallel.vpp = {len(self.chunks)}): pack with micro_multiple = {stages}"
                )
            for batch in batches:
                if self.scalar and batch.candidates is not None:
                    raise ValueError(
                        "a model with a scalar head predicts no tokens, so it cannot score candidates: remove them"
                    )
                _check_vocabulary(batch, self.vocab)
                out.append(
                    shard(
                        batch,
                        self.parallel,
                        self.device,
                        shard_spec=self.shard_spec,
                        num_experts=experts,
                        depths=self.depths,
                    )
                )
            self.replay.load(out, forward_only=forward_only, source=source, routes=routes)
        except ValueError as e:
            error = e
        raise_on_every_rank(error, self.device)
        check_equal("micro-batches", len(out), self.device, remedy="give every data-parallel rank the same number")
        return out

    def _schedule(self, shards: list[Shard], after: _After, *, forward_only: bool) -> list[Any]:
        """Run megatron's schedule; returns the results of `after` for each micro-batch, in order, on the last stage."""
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
                # Runs first in this micro-batch's backward, before any layer is recomputed.
                x.register_hook(lambda _grad: self.replay.backward_of(micro))
        return output, partial(after, micro, s)

    def _loss(
        self, refs: Sequence[Tensor] | None, olds: Sequence[Tensor] | None, micro: int, s: Shard, output: _Output
    ) -> tuple[Tensor, Tensor, Stats]:
        """(sum of the losses, number of loss tokens, statistics) of one micro-batch."""
        batch = s.batch
        logprobs, entropy, *more = gather_tokens(s, output, self.parallel.cp_group)
        nll, candidates = more[: self.depths], more[self.depths :]
        per_token, stats = self.loss(
            LossInputs(
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
        )
        if batch.weights is not None:
            per_token = per_token * batch.weights
        total = torch.where(batch.loss_mask, per_token, 0.0).sum()  # a masked label may be infinite
        count = batch.loss_mask.sum()
        # a statistic with a gradient would keep the graph alive until the end of the step
        stats = {name: Stat(x.total.detach(), x.count, x.reduce) for name, x in stats.items()}
        stats["train/loss"] = Stat(total.detach(), count)
        if nll:
            of_depths, stats["train/mtp_loss"] = mtp_loss(
                torch.stack(nll), batch.loss_mask, batch.cu_seqlens, self.mtp_coefficient
            )
            total = total + of_depths
        return total, count.to(torch.int), stats

    def _label_logprobs(self, micro: int, s: Shard, output: _Output) -> tuple[Tensor, Tensor, Tensor]:
        """Like `_loss`, with the log-probabilities [T] in place of the statistics; with candidates theirs, [T, C]."""
        [logprobs] = gather_tokens(s, output[:1] if s.batch.candidates is None else output[-1:], self.parallel.cp_group)
        return logprobs.sum(), s.batch.loss_mask.sum().to(torch.int), logprobs

    def _routing(self, *, updated: bool) -> Stats:
        """Coverage and agreement summed over all ranks, each of which counts its rows of its layers. `updated`: an
        old-log-prob pass came before, so weights may have changed since."""
        r = self.replay
        # one row per layer of the whole model, then one for the coverage
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


def _without_candidates(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Drop the candidates, which would be scored in addition to the labels."""
    return [batch if batch.candidates is None else replace(batch, candidates=None) for batch in batches]


def _check_vocabulary(batch: MicroBatch, size: int) -> None:
    """Raise ValueError for a token, or a label or candidate with loss, outside the vocabulary. Lookups in a sharded
    vocabulary would treat it as an id that another rank holds and raise no error."""
    scored = [batch.labels] if batch.candidates is None else [batch.labels, batch.candidates]
    ids = torch.cat([batch.tokens, *(x[batch.loss_mask].flatten() for x in scored)])
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise ValueError(
            f"token {int(wrong[0])} is outside the model's vocabulary of {size}: check that rollout and trainer have "
            "the same tokenizer and config.json"
        )


def _finalize(
    loss_tokens: int, parallel: ParallelContext, model: list[Any], num_tokens: Tensor | None, **kwargs: Any
) -> None:
    """Finalize gradients divided by loss_tokens; megatron divides by the data-parallel sum of `num_tokens`."""
    assert num_tokens is not None
    share = torch.full_like(num_tokens, loss_tokens if parallel.dp_cp_group.rank() == 0 else 0)
    finalize_model_grads(model, share, **kwargs)

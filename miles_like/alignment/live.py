"""The scorers of a running job: trainer ranks over Ray, servers over HTTP; and the comparison of both.

Letters: S tokens a sample, T packed tokens, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from miles_like.algorithms.terms.bounds import Bounds
from miles_like.alignment.attribution import attribute
from miles_like.alignment.evidence import Evidence, RolloutScorer, Sampled, SampleTokens, Scores
from miles_like.alignment.report import Report
from miles_like.alignment.weights import WeightEvidence
from miles_like.batch.packer import Packer
from miles_like.batch.unpacking import unpack
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.protocols import TrainerRanks
from miles_like.types import (
    Finish,
    MicroBatch,
    NamedTensor,
    Prompt,
    Sample,
    SampleGroup,
    SamplingParams,
    Scored,
    ServerLost,
    TrainBatch,
    VersionSpan,
)
from quant.formats.codec import QuantTensor
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import coded_weight_of, pair_stream, quantize_stream, stored_name
from rollout.episodes.pool import EnginePool
from rollout.episodes.serving import Serving
from rollout.publish.stock_hashes import stock_checksum, stored_parts
from rollout.sglang.client import ServerClient
from rollout.sglang.samples import RoutingShape
from rollout.wire.checksum import tensor_checksum
from routing_replay.replay import RecordedRoutes
from routing_replay.trace import RoutingTrace

_PROMPT = Prompt(id="verify", token_ids=(0,), answer="")  # placeholder: samples carry their prompt tokens themselves
_SHORT = 256  # tokens per answer in the short comparison, where a run samples tens of thousands


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTrainer:
    """A TrainerScorer over all trainer ranks, with samples packed as in training."""

    trainer: TrainerRanks
    packer: Packer
    shape: RoutingShape | None  # None: a dense model

    async def score(self, tokens: SampleTokens, *, temperature: float, routes: Sequence[Tensor] | None) -> Scores:
        samples, batch = self._packed(tokens, routes)
        replay = routes is not None
        found = merged(batch, await self.trainer.score(batch, temperature=temperature, replay=replay), self.shape)
        pairs = [found[s.name] for s in samples]
        own = tuple(r for _, r in pairs if r is not None)
        return Scores(
            tokens=_packed_tokens(batch, [s.name for s in samples]),
            logprobs=tuple(p for p, _ in pairs),
            routes=own if len(own) == len(pairs) and not replay else None,
        )

    async def states(
        self, tokens: SampleTokens, *, routes: Sequence[Tensor] | None
    ) -> tuple[TrainBatch, list[tuple[int, Scored]]]:
        """The batch of these samples, and the results of all ranks with the residual stream at every layer. routes: as
        in `score`."""
        _, batch = self._packed(tokens, routes)
        return batch, await self.trainer.score(batch, temperature=1.0, replay=routes is not None, states=True)

    def _packed(self, tokens: SampleTokens, routes: Sequence[Tensor] | None) -> tuple[list[Sample], TrainBatch]:
        samples = [self._sample(tokens, i, None if routes is None else routes[i]) for i in range(len(tokens.ids))]
        return samples, self.packer.batch([SampleGroup(prompt=_PROMPT, samples=tuple(samples))])

    def _sample(self, tokens: SampleTokens, i: int, routes: Tensor | None) -> Sample:
        ids, mask = tokens.ids[i], tokens.masks[i]
        trace = None
        if routes is not None:
            assert self.shape is not None, "routes of a dense model"
            rows = (VersionSpan(0, 0, len(routes)),)
            experts = routes.to(torch.uint8 if self.shape.num_experts <= 256 else torch.int16)
            trace = RoutingTrace(experts=experts, layers=self.shape.moe_layers, num_experts=self.shape.num_experts)
            trace = trace.with_checksums(ids[:-1], versions=rows)
        return Sample(
            prompt_id=_PROMPT.id,
            index=i,
            token_ids=ids,
            loss_mask=mask,
            logprobs=torch.zeros(len(ids)),
            routing=trace,
            versions=(VersionSpan(0, 0, int(mask.sum())),),
            finish=Finish.STOP,
            text="",
        )


def _packed_tokens(batch: TrainBatch, names: Sequence[str]) -> SampleTokens:
    """The samples read back from the micro-batches of all ranks."""
    ids: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for micro in (m for row in batch.grid for m in row):
        ends = micro.cu_seqlens.tolist()
        for name, a, b in zip(micro.samples, ends, ends[1:], strict=False):
            ids[name] = torch.cat([micro.tokens[a:b], micro.labels[b - 1 : b]])
            masks[name] = torch.cat([micro.loss_mask.new_zeros(1), micro.loss_mask[a:b]])
    return SampleTokens(ids=tuple(ids[n] for n in names), masks=tuple(masks[n] for n in names))


def merged(
    batch: TrainBatch, scores: Sequence[tuple[int, Scored]], shape: RoutingShape | None
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Sample name -> (log-probabilities [S], 0 outside the loss mask; the trainer's routes [S-1, L, K]), merged from
    the (DP shard, result) of every rank, each of which has part of the rows and layers of its shard."""
    of_row = dict(reversed(scores))  # per DP shard, the result of its first rank
    logprobs = unpack(batch.grid, [of_row[number].logprobs for number in range(len(batch.grid))])
    out: dict[str, tuple[Tensor, Tensor | None]] = {}
    for number, row in enumerate(batch.grid):
        ranks = [scored for dp, scored in scores if dp == number]
        for i, micro in enumerate(row):
            routes = None if shape is None else _routes(micro, [r.routes[i] for r in ranks if r.routes], shape)
            ends = micro.cu_seqlens.tolist()
            for name, a, b in zip(micro.samples, ends, ends[1:], strict=False):
                if name:
                    out[name] = logprobs[name], None if routes is None else routes[a:b]
    return out


def _routes(micro: MicroBatch, ranks: Sequence[RecordedRoutes], shape: RoutingShape) -> Tensor | None:
    """[T, L, K] int64 of all ranks' parts; None where no rank reports its routes."""
    if not ranks:
        return None
    out = torch.full((len(micro.tokens), len(shape.moe_layers), shape.top_k), -1)
    for own in ranks:
        real = own.fed.tokens >= 0
        columns = torch.tensor([shape.moe_layers.index(layer) for layer in own.trace.layers])
        rows = own.fed.tokens[real]
        out[rows[:, None], columns[None, :]] = own.trace.experts.cpu()[real].long()
    assert int(out.min()) >= 0, "a row or layer that no rank fed"
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRollout:
    """A RolloutScorer on the first server; publication checks that the other servers hold the same weights."""

    client: ServerClient
    publish: Callable[[], Awaitable[object]] | None  # the trainer's weights to every server; None: not allowed
    sample: Callable[[], Awaitable[Sequence[SampleGroup]]]
    prompts_per_request: int

    async def score(self, tokens: SampleTokens) -> tuple[Tensor, ...]:
        found: list[tuple[Tensor, RoutingTrace | None]] = []
        n = self.prompts_per_request
        for i in range(0, len(tokens.ids), n):
            found += await self.client.score(tokens.ids[i : i + n])
        return tuple(
            torch.where(mask, torch.cat([p.new_zeros(1), p]), 0.0)
            for (p, _), mask in zip(found, tokens.masks, strict=True)
        )

    async def republish(self) -> Sampled | None:
        if self.publish is None:
            return None
        await self.publish()
        return sampled(await self.sample())


class Published:
    """The tensors that the trainer publishes, computed from the BF16 weights that it wrote into a directory."""

    def __init__(self, wholes: Path, spec: QuantSpec | None) -> None:
        self._wholes, self.spec = HFCheckpoint(wholes), spec
        self._codec = codec_or_none(spec)

    def hashes(self, same_as: HFCheckpoint | None = None) -> dict[str, str]:
        """Stored name -> hash of what the trainer publishes. same_as: a checkpoint whose codes, possibly of another
        quantizer, replace the trainer's where they decode to exactly the trainer's weight."""
        out = {n: tensor_checksum(n, t) for n, t in quantize_stream(self._wholes.stream(), self.spec)}
        if same_as is None or self._codec is None:
            return out

        def stored(name: str) -> Tensor | None:
            return same_as.read(name) if name in same_as else None

        for name, value in pair_stream(same_as.stream(), self.spec, lookup=stored):
            if isinstance(value, QuantTensor) and name in self._wholes:
                whole = self.whole(name)
                if torch.equal(self._codec.decode(value, whole.dtype), whole):
                    parts = ((stored_name(name, leaf), part) for leaf, part in value.stored.items())
                    out |= {n: tensor_checksum(n, part) for n, part in parts if n in out}
        return out

    def names(self) -> list[str]:
        """Names of the weights before encoding."""
        return self._wholes.names()

    def whole(self, name: str) -> Tensor:
        return self._wholes.read(name)

    def tensor(self, stored: str) -> Tensor:
        """One stored tensor, encoded together with the weights that share its scale."""
        names = [stored]
        if self._codec is not None and self.spec is not None:
            part = next(
                (p for d in _CODE_DTYPES for p in [coded_weight_of(self._codec, stored, d)] if p is not None), None
            )
            if part is not None and self.spec.covers(part[0], self.whole(part[0]).shape):
                names = list(self._codec.bundle_of(part[0]))
        stream = quantize_stream([NamedTensor(n, self.whole(n)) for n in names], self.spec)
        return dict(stream)[stored]


_CODE_DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.int32)


def weight_evidence(
    published: Published, expected: Mapping[str, str], served: Mapping[str, str], earlier: HFCheckpoint
) -> WeightEvidence:
    """expected: `published.hashes()`; served: a server's hashes; earlier: the checkpoint that the job starts from."""

    def before(name: str) -> Tensor | None:
        return earlier.read(name) if name in earlier else None

    return WeightEvidence(
        published=expected,
        served=served,
        hash=tensor_checksum,
        tensor=published.tensor,
        whole=published.whole,
        spec=published.spec,
        earlier=before,
    )


def opaque_evidence(after: Mapping[str, str], before: Mapping[str, str], published: Published) -> WeightEvidence:
    """Evidence from a server that hashes its fused tensors: hashes before and after the trainer published to it."""
    return WeightEvidence(
        published=after,
        served=before,
        hash=tensor_checksum,
        tensor=None,
        whole=published.whole,
        spec=published.spec,
        difference="changed when the trainer published its weights",
    )


def stacked_evidence(served: Mapping[str, str], published: Published) -> WeightEvidence | None:
    """Evidence from a stock CPU server that stacks BF16 tensors, without publishing to it. None where no hash is as
    expected, because the server then fuses or hashes its tensors in an unknown way."""
    stored = set(published.names())
    parts = {name: found for name in served if (found := stored_parts(name, stored))}
    expected = {name: stock_checksum(found, published.whole) for name, found in parts.items()}
    if not any(served[name] == hashed for name, hashed in expected.items()):
        return None
    return WeightEvidence(
        published=expected,
        served={name: served[name] for name in expected},
        hash=tensor_checksum,
        tensor=None,
        whole=published.whole,
        spec=None,
        unknown=tuple(sorted(served.keys() - expected.keys())),
    )


def sampled(groups: Sequence[SampleGroup], prompts: Sequence[Sequence[int]] | None = None) -> Sampled:
    """Samples as a server sent them. prompts: each group's, as the tokenizer and template encode it now. Raises
    ValueError where no sample has a response token."""
    kept = [(i, s) for i, g in enumerate(groups) for s in g.samples if s.response_len]
    if not kept:
        raise ValueError(
            f"0 response tokens in {len(groups)} groups: the servers aborted or stopped every request; see their logs"
        )
    samples = [s for _, s in kept]
    traces = [s.routing for s in samples if s.routing is not None]
    return Sampled(
        names=tuple(s.name for s in samples),
        tokens=SampleTokens(ids=tuple(s.token_ids for s in samples), masks=tuple(s.loss_mask for s in samples)),
        logprobs=tuple(s.logprobs for s in samples),
        routes=tuple(t.experts.long() for t in traces) if traces and len(traces) == len(samples) else None,
        prompts=None if prompts is None else tuple(prompts[i] for i, _ in kept),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares trainer and rollout of one job, with the settings that all comparisons of the job have in common."""

    trainer: LiveTrainer
    replay: bool  # whether the run replays the rollout's routes
    prompts: Sequence[Prompt]  # to sample
    params: SamplingParams  # as in a training step
    bounds: Bounds
    allowed: Bounds  # on the remaining gap

    async def short(
        self, clients: Sequence[ServerClient], *, flush: bool = True, serving: Serving | None = None
    ) -> Report:
        """Compare new samples of at most 256 tokens, without weight hashes. flush: empty the servers' caches
        afterwards, which servers refuse while other requests are in flight. serving: as of EnginePool."""
        params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, _SHORT))
        report = await self.of(await EnginePool(clients, serving).generate(self.prompts, n=1, params=params))
        if flush:
            for client in clients:
                try:
                    if serving is None or client in serving:
                        await client.flush_cache()
                except ServerLost:
                    if serving is None:
                        raise
        return report

    async def sample(self, clients: Sequence[ServerClient]) -> Sequence[SampleGroup]:
        return await EnginePool(clients).generate(self.prompts, n=1, params=self.params)

    async def of(
        self,
        groups: Sequence[SampleGroup],
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        weights: WeightEvidence | str = "not included in this check",
        rollout: RolloutScorer | None = None,
    ) -> Report:
        """Compare given samples. prompts: each group's, as the tokenizer and template encode it now. weights: a string
        is the reason why weights are not compared. Raises ValueError where no sample has a response token."""
        shape = self.trainer.shape
        evidence = Evidence(
            sampled=sampled(groups, prompts),
            layers=() if shape is None else shape.moe_layers,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            top_k=self.params.top_k,
            trainer=self.trainer,
            replay=self.replay,
            weights=weights,
            rollout=rollout,
        )
        return await attribute(evidence, self.bounds, self.allowed)

"""The two sides of a running job as `verify` asks them: trainer ranks over Ray, servers over HTTP.

Letters: S tokens a sample, T packed tokens, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from miles_like.algorithms.bounds import Bounds
from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.types import (
    Finish,
    MicroBatch,
    NamedTensor,
    Prompt,
    Sample,
    SampleGroup,
    SamplingParams,
    Scored,
    TrainBatch,
    VersionSpan,
)
from miles_like.unpacking import unpack
from miles_like.verify.attribution import attribute
from miles_like.verify.findings import Report
from miles_like.verify.sides import Evidence, Fed, RolloutSide, Sampled, Scores
from miles_like.verify.weights import WeightEvidence
from miles_like.workers import RayTrainer
from quant.codec import QuantTensor
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import pair_stream, part_of, quantize_stream, stored_name
from rollout.checksum import tensor_checksum
from rollout.client import SGLangClient
from rollout.pool import EnginePool
from rollout.samples import RoutingShape
from rollout.stock_hashes import made_of, stock_checksum
from routing_replay.tape import OwnRoutes
from routing_replay.trace import RoutingTrace

_PROMPT = Prompt(id="verify", token_ids=(0,), answer="")  # a name for samples whose prompts are known by their tokens
_SHORT = 256  # tokens of an answer: enough to see a gap, where a run samples tens of thousands
Pack = Callable[[Sequence[SampleGroup], Sequence[Sequence[float]]], TrainBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTrainer:
    """All ranks, fed by packs as in training."""

    trainer: RayTrainer
    pack: Pack
    shape: RoutingShape | None  # None: a dense model

    async def score(self, told: Fed, *, temperature: float, routes: Sequence[Tensor] | None) -> Scores:
        samples = [self._sample(told, i, None if routes is None else routes[i]) for i in range(len(told.tokens))]
        batch = self.pack([SampleGroup(prompt=_PROMPT, samples=tuple(samples))], [[0.0] * len(samples)])
        replay = routes is not None
        found = merged(batch, await self.trainer.score(batch, temperature=temperature, replay=replay), self.shape)
        pairs = [found[s.name] for s in samples]
        own = tuple(r for _, r in pairs if r is not None)
        return Scores(
            fed=_fed(batch, [s.name for s in samples]),
            logprobs=tuple(p for p, _ in pairs),
            routes=own if len(own) == len(pairs) and not replay else None,
        )

    def _sample(self, told: Fed, i: int, ids: Tensor | None) -> Sample:
        tokens, mask = told.tokens[i], told.masks[i]
        trace = None
        if ids is not None:
            assert self.shape is not None, "routes of a dense model"
            rows = (VersionSpan(0, 0, len(ids)),)
            experts = ids.to(torch.uint8 if self.shape.num_experts <= 256 else torch.int16)
            trace = RoutingTrace(experts=experts, layers=self.shape.moe_layers, num_experts=self.shape.num_experts)
            trace = trace.seal(tokens[:-1], versions=rows)
        return Sample(
            prompt_id=_PROMPT.id,
            index=i,
            token_ids=tokens,
            loss_mask=mask,
            logprobs=torch.zeros(len(tokens)),
            routing=trace,
            versions=(VersionSpan(0, 0, int(mask.sum())),),
            finish=Finish.STOP,
            text="",
        )


def _fed(batch: TrainBatch, names: Sequence[str]) -> Fed:
    """The samples as they stand in the packs that ranks are given."""
    tokens: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for micro in (m for row in batch.grid for m in row):
        ends = micro.cu_seqlens.tolist()
        for name, a, b in zip(micro.samples, ends, ends[1:], strict=False):
            tokens[name] = torch.cat([micro.tokens[a:b], micro.labels[b - 1 : b]])
            masks[name] = torch.cat([micro.loss_mask.new_zeros(1), micro.loss_mask[a:b]])
    return Fed(tokens=tuple(tokens[n] for n in names), masks=tuple(masks[n] for n in names))


def merged(
    batch: TrainBatch, scores: Sequence[tuple[int, Scored]], shape: RoutingShape | None
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Name -> (log-probabilities [S] of each token, 0 where not under loss; own choice [S-1, L, K]) from what each rank
    said of its rows and layers of its row of the grid."""
    of_row = dict(reversed(scores))  # of each row, what the first rank that has it said
    logprobs = unpack(batch, [of_row[number].logprobs for number in range(len(batch.grid))])
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


def _routes(micro: MicroBatch, ranks: Sequence[OwnRoutes], shape: RoutingShape) -> Tensor | None:
    """[T, L, K] int64; None where no rank chose for itself."""
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
    """The first server; the others hold the same weights, which publication checks."""

    client: SGLangClient
    publish: Callable[[], Awaitable[object]] | None  # the trainer's weights, to every server; None: it must not
    sample: Callable[[], Awaitable[Sequence[SampleGroup]]]
    prompts_per_request: int

    async def score(self, told: Fed) -> tuple[Tensor, ...]:
        found: list[tuple[Tensor, RoutingTrace | None]] = []
        n = self.prompts_per_request
        for i in range(0, len(told.tokens), n):
            found += await self.client.score(told.tokens[i : i + n])
        return tuple(
            torch.where(mask, torch.cat([p.new_zeros(1), p]), 0.0)
            for (p, _), mask in zip(found, told.masks, strict=True)
        )

    async def mend(self) -> Sampled | None:
        if self.publish is None:
            return None
        await self.publish()
        return sampled(await self.sample())


class Published:
    """What the trainer publishes, of whole weights that it wrote into a directory: hashes of all, tensors by name."""

    def __init__(self, wholes: Path, spec: QuantSpec | None) -> None:
        self._wholes, self.spec = HFCheckpoint(wholes), spec
        self._codec = codec_or_none(spec)

    def hashes(self, same_as: HFCheckpoint | None = None) -> dict[str, str]:
        """Stored name -> hash of what the trainer publishes. same_as: a checkpoint whose codes are taken instead where
        they decode to exactly the trainer's weight; another quantizer may have chosen them."""
        out = {n: tensor_checksum(n, t) for n, t in quantize_stream(self._wholes.stream(), self.spec)}
        if same_as is None or self._codec is None:
            return out

        def stored(name: str) -> Tensor | None:
            return same_as.read(name) if name in same_as else None

        for name, value in pair_stream(same_as.stream(), self.spec, lookup=stored):
            if isinstance(value, QuantTensor) and name in self._wholes:
                whole = self.whole(name)
                if torch.equal(self._codec.decode(value, whole.dtype), whole):
                    parts = ((stored_name(name, leaf), part) for leaf, part in value.parts.items())
                    out |= {n: tensor_checksum(n, part) for n, part in parts if n in out}
        return out

    def names(self) -> list[str]:
        """Of the whole weights."""
        return self._wholes.names()

    def whole(self, name: str) -> Tensor:
        return self._wholes.read(name)

    def tensor(self, stored: str) -> Tensor:
        """One stored part: its weight is encoded again, with those that share its scale."""
        names = [stored]
        if self._codec is not None and self.spec is not None:
            part = next((p for d in _STORED for p in [part_of(self._codec, stored, d)] if p is not None), None)
            if part is not None and self.spec.covers(part[0], self.whole(part[0]).shape):
                names = list(self._codec.bundle_of(part[0]))
        stream = quantize_stream([NamedTensor(n, self.whole(n)) for n in names], self.spec)
        return dict(stream)[stored]


_STORED = (torch.float8_e4m3fn, torch.uint8, torch.int32)


def weight_evidence(
    published: Published, expected: Mapping[str, str], served: Mapping[str, str], earlier: HFCheckpoint
) -> WeightEvidence:
    """expected: `published.hashes()`; served: a server's own hashes of what it holds; earlier: the checkpoint that the
    job begins with."""

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
    """Of a server whose hashes are of its own tensors, before and after the trainer published to it."""
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
    """Of a stock server on a CPU that stacks BF16 tensors, with nothing sent to it. None where no hash is as expected:
    then the server does not make or hash its tensors in the known way."""
    stored = set(published.names())
    parts = {name: found for name in served if (found := made_of(name, stored))}
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
    """Samples as a server sent them. prompts: of each group, as tokenizer and template make it now. Raises ValueError
    where no sample has a response token."""
    kept = [(i, s) for i, g in enumerate(groups) for s in g.samples if s.response_len]
    if not kept:
        raise ValueError(
            f"0 response tokens in {len(groups)} groups: the servers abort or stop at once; see their logs"
        )
    samples = [s for _, s in kept]
    traces = [s.routing for s in samples if s.routing is not None]
    return Sampled(
        names=tuple(s.name for s in samples),
        told=Fed(tokens=tuple(s.token_ids for s in samples), masks=tuple(s.loss_mask for s in samples)),
        logprobs=tuple(s.logprobs for s in samples),
        routes=tuple(t.experts.long() for t in traces) if traces and len(traces) == len(samples) else None,
        prompts=None if prompts is None else tuple(prompts[i] for i, _ in kept),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that does not change between two comparisons of one job."""

    trainer: LiveTrainer
    replay: bool  # whether the run replays the rollout's routes
    prompts: Sequence[Prompt]  # that are sampled
    params: SamplingParams  # as in a step
    bounds: Bounds
    allowed: Bounds  # what the precision may leave

    async def short(self, clients: Sequence[SGLangClient], *, flush: bool = True) -> Report:
        """Of new samples of at most 256 tokens, without looking at weights. flush: leave the servers' caches empty,
        which they refuse while other requests are under way."""
        params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, _SHORT))
        report = await self.of(await EnginePool(clients).generate(self.prompts, n=1, params=params))
        if flush:
            for client in clients:
                await client.flush_cache()
        return report

    async def sample(self, clients: Sequence[SGLangClient]) -> Sequence[SampleGroup]:
        return await EnginePool(clients).generate(self.prompts, n=1, params=self.params)

    async def of(
        self,
        groups: Sequence[SampleGroup],
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        weights: WeightEvidence | str = "not part of this check",
        rollout: RolloutSide | None = None,
    ) -> Report:
        """prompts: of each group, as tokenizer and template make it now. weights: a string is the reason why they are
        not compared."""
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

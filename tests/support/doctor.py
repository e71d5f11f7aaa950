"""A trainer and an engine of one process, in which faults are planted and looked for.

Letters: S tokens a sample, L MoE layers, K experts a token, R response tokens.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_like.algorithms.terms.bounds import Bounds
from miles_like.alignment.attribution import attribute
from miles_like.alignment.evidence import Evidence, Sampled, SampleTokens
from miles_like.alignment.live import LiveTrainer, sampled
from miles_like.alignment.report import Report
from miles_like.alignment.weights import WeightEvidence
from miles_like.batch.packer import Packer
from miles_like.types import NamedTensor, Sample, SampleGroup, SamplingParams, TrainBatch
from quant.hf_config import quantized_config
from quant.spec import QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.engine.requests import PromptSpec
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.server.service import Service
from rollout.wire.checksum import tensor_checksum
from rollout.wire.generate import GenerateReply
from tests.support import exactly
from tests.support.tiny_models import write_checkpoint

# what miles_like.alignment.allowance has where nothing may differ, for kernels, and where one side alone rounds
EXACT = Bounds(kl_max=0.0, logprob_abs_diff_max=0.0, extreme_frac_max=0.0)
KERNELS = Bounds(kl_max=1e-3, extreme_frac_max=1e-2)
ROUNDED = Bounds(kl_max=9e-2)
Sent = Callable[[GenerateReply, int], GenerateReply]  # what a server sends of its number-th sample


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How the engine is asked, and what it or the trainer does wrong."""

    samples: int = 1  # of each of exactly.PROMPTS
    tokens: int = exactly.NEW
    temperature: float = 1.0  # of the engine
    meant: float | None = None  # of the run; None: the same
    top_p: float = 1.0
    top_k: int = -1
    replay: bool = False
    allowed: Bounds = KERNELS
    sends: tuple[Sent, ...] = ()
    packs: Callable[[Sequence[SampleGroup]], Sequence[SampleGroup]] = field(default=lambda groups: groups)
    now: Callable[[Sequence[int]], Sequence[int]] = field(default=lambda prompt: prompt)  # template and tokenizer
    service: Service | None = None  # another than the pair's


class Ranks:
    """As RayTrainer, of the one rank in this process."""

    def __init__(self, t: Any) -> None:
        self.t = t

    async def score(
        self, batch: TrainBatch, *, temperature: float, replay: bool, states: bool = False
    ) -> list[tuple[int, Any]]:
        return [(0, self.t.score(batch.grid[0], temperature=temperature, replay=replay, states=states))]


@dataclass(frozen=True, kw_only=True)
class _Packer(Packer):
    """Packs the groups as `ask` changes them."""

    ask: Ask

    def batch(self, groups: Sequence[SampleGroup], advantages: Any = None) -> TrainBatch:
        return super().batch(self.ask.packs(groups), advantages)


def packer_of(dp_size: int) -> Packer:
    """As a comparison packs."""
    return Packer(dp_size=dp_size, max_tokens=4096, replayed=False)


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """A RolloutScorer in this process."""

    bench: Bench
    ask: Ask

    async def score(self, tokens: SampleTokens) -> tuple[Tensor, ...]:
        specs = [
            PromptSpec(
                rid=f"score {i}",
                token_ids=tuple(ids.tolist()),
                sampling=SamplingParams(max_new_tokens=0),
                logprob_start=0,
            )
            for i, ids in enumerate(tokens.ids)
        ]
        done = [c for (c,) in exactly.generate(self.bench.engine_of(self.ask).engine, specs)]
        return tuple(
            torch.where(m, torch.tensor([0.0, *c.prompt_logprobs]), 0.0)
            for c, m in zip(done, tokens.masks, strict=True)
        )

    async def republish(self) -> Sampled | None:
        self.bench.pair.publish()
        return self.bench.sampled(self.ask)


class Bench:
    """A pair whose weights have moved since the first publication, and what is compared of it."""

    def __init__(self, t: Any, where: Path, dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the engine. The trainer computes in bf16: kernels alone hardly differ on so small a model."""
        self.t, self.where = t, where
        self.pair = exactly.Pair(t, where / "served", dtype=dtype)
        self.earlier = self.stored()
        with torch.no_grad():
            for p in t.models[0].parameters():
                p.mul_(1.001 + 0.01 * torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        t.optimizer.reload_model_params()
        t.weights_changed()
        self.pair.publish()
        self.shape = exactly.shape_of(t)
        self.found: dict[str, Any] = {}  # case -> (causes as (step, cause), (KL before, after) by step, sentence)

    @property
    def service(self) -> Service:
        assert self.pair.service is not None
        return self.pair.service

    def engine_of(self, ask: Ask) -> Service:
        return ask.service or self.service

    def sampled(self, ask: Ask) -> Sampled:
        """What the engine sends, as the run reads it."""
        specs = [
            replace(s, sampling=replace(s.sampling, max_new_tokens=ask.tokens, top_p=ask.top_p, top_k=ask.top_k))
            for s in exactly.prompt_specs(3, n=ask.samples, temperature=ask.temperature)
        ]
        done = exactly.generate(self.engine_of(ask).engine, specs)
        number = 0
        for of_prompt in done:
            for i, c in enumerate(of_prompt):
                reply = c.reply
                for send in ask.sends:
                    reply = send(reply, number)
                of_prompt[i] = replace(c, reply=reply)
                number += 1
        return sampled(self.pair._read(specs, done), [ask.now(p) for p in exactly.PROMPTS])

    def look(self, case: str, ask: Ask | None = None, *, weights: bool = True) -> Report:
        """What `verify` says of it; without `weights` as before a run's first step."""
        ask = ask or Ask()

        ranks: Any = Ranks(self.t)
        evidence = Evidence(
            sampled=self.sampled(ask),
            layers=() if self.shape is None else self.shape.moe_layers,
            temperature=ask.temperature if ask.meant is None else ask.meant,
            top_p=ask.top_p,
            top_k=ask.top_k,
            trainer=LiveTrainer(
                trainer=ranks, packer=_Packer(dp_size=1, max_tokens=4096, replayed=False, ask=ask), shape=self.shape
            ),
            replay=ask.replay,
            weights=self._hashes(self.engine_of(ask)) if weights else "not part of this check",
            rollout=_Engine(bench=self, ask=ask) if weights else None,
        )
        report = asyncio.run(attribute(evidence, Bounds(), ask.allowed))
        kls = {f.step: (f.before.kl, None if f.after is None else f.after.kl) for f in report.findings}
        self.found[case] = [(s, c) for s, c, _ in report.causes], kls, report.sentence()
        return report

    def _hashes(self, service: Service) -> WeightEvidence:
        wholes = {n: x.clone() for n, x in self.t.export()}
        stored = dict(quantize_stream(iter(wholes.items()), self.pair.spec))
        return WeightEvidence(
            published={n: tensor_checksum(n, x) for n, x in stored.items()},
            served=service.store.checksums(),
            hash=tensor_checksum,
            tensor=stored.__getitem__,
            whole=wholes.__getitem__,
            spec=self.pair.spec,
            earlier=self.earlier.get,
        )

    def allow_states(self) -> None:
        """The engine gives the residual stream at every layer."""
        self.service.engine.limits = replace(self.service.engine.limits, states=True)

    def plant(self, tensors: dict[str, Tensor]) -> None:
        """Serve these in place of what was published."""
        self.service.begin_update()
        self.service.update([NamedTensor(n, x) for n, x in tensors.items()], flush_cache=False, version=None)
        self.service.end_update()

    def stored(self, spec: QuantSpec | None = None) -> dict[str, Tensor]:
        """What is published; or would be, by another quantizer."""
        wholes = iter([(n, x.clone()) for n, x in self.t.export()])
        return dict(quantize_stream(wholes, spec or self.pair.spec))

    def elsewhere(self, spec: QuantSpec, changed: Callable[[dict[str, Tensor]], None] | None = None) -> Service:
        """An engine on the same weights by another quantizer."""
        stored = self.stored(spec)
        if changed is not None:
            changed(stored)
        path = self.where / f"{spec.format.value} {spec.block} {changed is not None}"
        write_checkpoint(path, quantized_config(self.t.hf, spec, list(stored)), stored)
        limits = EngineLimits(max_total_tokens=4096, context_length=256)
        return Service(path, limits, dtype=torch.float32, ops=ExactOps(1, 1), version="1")


# ---- what a server sends


def logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Sent:
    """change: of [R] fp32."""
    return lambda reply, _: replace(reply, logprobs=np.ascontiguousarray(change(_told(reply)), np.float32))


def _told(reply: GenerateReply) -> np.ndarray:
    assert reply.logprobs is not None
    return reply.logprobs


def routes(change: Callable[[np.ndarray], np.ndarray], *, layers: Sequence[int], depth: int, only: int = -1) -> Sent:
    """change: of the wire's ids [rows, L, K] of MoE layers `layers` of `depth`. only: of that one sample."""

    def sent(reply: GenerateReply, number: int) -> GenerateReply:
        if only >= 0 and number != only:
            return reply
        rows = reply.prompt_tokens + len(reply.output_ids) - 1
        ids = np.frombuffer(base64.b64decode(reply.routed_experts or ""), "<i4").reshape(rows, depth, -1).copy()
        ids[:, list(layers)] = change(ids[:, list(layers)])
        return replace(reply, routed_experts=base64.b64encode(ids.tobytes()).decode())

    return sent


def sharpen(t: Any) -> None:
    """A model that was never trained hardly tells tokens apart: larger heads and routers, as training makes them."""
    with torch.no_grad():
        for name, p in t.models[0].named_parameters():
            if name.endswith("router.weight") or name == "output_layer.weight":
                p.mul_(20)
    t.optimizer.reload_model_params()
    t.weights_changed()


def packs(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Sequence[SampleGroup]]:
    """A trainer that packs `change` of each sample's tokens and loss mask [S]."""

    def packed(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        return [
            replace(g, samples=tuple(_repacked(s, *change(s.token_ids, s.loss_mask)) for s in g.samples))
            for g in groups
        ]

    return packed


def _repacked(s: Sample, tokens: Tensor, mask: Tensor) -> Sample:
    spans = (s.versions[0]._replace(start=0, end=int(mask.sum())),)
    return replace(s, token_ids=tokens, loss_mask=mask, logprobs=torch.zeros(len(tokens)), routing=None, versions=spans)

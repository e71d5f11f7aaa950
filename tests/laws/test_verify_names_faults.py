"""Law: of a fault that is planted between trainer and rollout, `verify` names the cause, and of a healthy pair none.

A gap in log-probabilities alone looks the same whatever made it. But each cause leaves something that no other does: a
hash that is another known tensor's, rows that agree once they are moved, log-probabilities that agree once they are of
another temperature. The pair is megatron's model on one rank and the embedded engine on what it publishes, with plain
kernels on one side and exact ones on the other, so that there is always some honest gap.

Not covered: two faults at once; a fault that both sides share; ranks (tests/e2e); stock SGLang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.bounds import Bounds
from miles_like.packing import pack
from miles_like.types import NamedTensor, SamplingParams, TrainBatch
from miles_like.verify.attribution import Evidence, Fed, Scores, attribute
from miles_like.verify.findings import Cause, Report
from miles_like.verify.pictures import write_pictures
from miles_like.verify.weights import WeightEvidence
from miles_like.verify_live import LiveTrainer, evidence
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.checksum import tensor_checksum
from rollout.embedded.engine import EngineLimits
from rollout.embedded.exact_ops import ExactOps
from rollout.embedded.requests import PromptSpec
from rollout.embedded.service import Service
from rollout.samples import RoutingShape
from routing_replay.trace import RoutingTrace
from tests.laws import exactly
from tests.megatron_bridge import toy
from tests.megatron_bridge.tiny_models import write_checkpoint
from tests.spawn import run_ranks

MODEL, LAYER = "mla, four layers", "model.layers.2."
ALLOWED = Bounds(kl_max=1e-3)
Found = dict[str, Any]  # case -> (causes as (step, cause), KL before, KL after each step)


class _Ranks:
    """As RayTrainer, of the one rank in this process."""

    def __init__(self, t: Any) -> None:
        self.t = t

    async def score(self, batch: TrainBatch, *, temperature: float, replay: bool) -> list[tuple[int, Any]]:
        return [(0, self.t.score(batch.grid[0], temperature=temperature, replay=replay))]


class _Engine:
    """A RolloutSide in this process."""

    def __init__(self, pair: exactly.Pair, service: Service) -> None:
        self.pair, self.service = pair, service

    async def score(self, fed: Fed) -> Scores:
        family, hf = self.pair.t.family, self.pair.t.hf
        specs = [
            PromptSpec(
                rid=f"score {i}",
                token_ids=tuple(tokens.tolist()),
                sampling=SamplingParams(max_new_tokens=0),
                logprob_start=0,
                routing_start=0,
            )
            for i, tokens in enumerate(fed.tokens)
        ]
        done = [c for (c,) in exactly.generate(self.service.engine, specs)]
        logprobs, routes = [], []
        for c, tokens, mask in zip(done, fed.tokens, fed.masks, strict=True):
            logprobs.append(torch.where(mask, torch.tensor([0.0, *c.prompt_logprobs]), 0.0))
            assert c.reply.routed_experts is not None
            trace = RoutingTrace.from_wire(
                c.reply.routed_experts,
                tokens=tokens,
                num_layers=family.num_layers(hf),
                layers=family.moe_layers(hf),
                top_k=family.top_k(hf),
                num_experts=family.num_experts(hf),
            )
            routes.append(trace.experts.long())
        return Scores(logprobs=tuple(logprobs), routes=tuple(routes))

    async def mend(self) -> bool:
        self.pair.publish()
        return True


def _sharpen(t: Any) -> None:
    """A model that was never trained hardly tells tokens apart: larger heads and routers, as training makes them."""
    with torch.no_grad():
        for name, p in t.models[0].named_parameters():
            if name.endswith("router.weight") or name == "output_layer.weight":
                p.mul_(20)
    t.optimizer.reload_model_params()
    t.weights_changed()


def _weights(pair: exactly.Pair, served: dict[str, str], earlier: dict[str, Tensor]) -> WeightEvidence:
    wholes = {n: x.clone() for n, x in pair.t.export()}
    stored = dict(quantize_stream(iter(wholes.items()), pair.spec))
    return WeightEvidence(
        published={n: tensor_checksum(n, x) for n, x in stored.items()},
        served=served,
        hash=tensor_checksum,
        tensor=stored.__getitem__,
        whole=wholes.__getitem__,
        spec=pair.spec,
        earlier=earlier.get,
    )


class _Bench:
    """A pair, and what is compared of it."""

    def __init__(self, t: Any, where: Path) -> None:
        self.t, self.where = t, where
        self.pair = exactly.Pair(t, where / "served")
        self.earlier = {n: x.clone() for n, x in quantize_stream(iter(list(t.export())), self.pair.spec)}
        with torch.no_grad():
            for p in t.models[0].parameters():
                p.mul_(1.001 + 0.01 * torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        t.optimizer.reload_model_params()
        t.weights_changed()
        self.pair.publish()
        family, hf = t.family, t.hf
        shape = RoutingShape(
            num_layers=family.num_layers(hf),
            moe_layers=family.moe_layers(hf),
            num_experts=family.num_experts(hf),
            top_k=family.top_k(hf),
        )
        packing = partial(pack, dp_size=1, max_tokens=4096, replayed=False)
        ranks: Any = _Ranks(t)
        self.trainer = LiveTrainer(trainer=ranks, pack=packing, shape=shape)
        self.out: Found = {}

    @property
    def service(self) -> Service:
        assert self.pair.service is not None
        return self.pair.service

    def evidence(self, *, service: Service | None = None, temperature: float = 1.0, replay: bool = False) -> Evidence:
        """Of new samples; `temperature`: at which they are drawn, while the run means to draw at 1."""
        service = service or self.service
        specs = exactly.prompt_specs(3, temperature=temperature)
        groups = self.pair._read(specs, exactly.generate(service.engine, specs))
        return evidence(
            groups,
            self.trainer,
            temperature=1.0,
            replay=replay,
            prompts=exactly.PROMPTS,
            weights=_weights(self.pair, service.store.checksums(), self.earlier),
            rollout=_Engine(self.pair, service),
        )

    def judge(self, case: str, e: Evidence) -> Report:
        report = asyncio.run(attribute(e, Bounds(), ALLOWED))
        kls = [(f.before.kl, None if f.after is None else f.after.kl) for f in report.findings]
        self.out[case] = [(s, c) for s, c, _ in report.causes], kls, report.sentence()
        return report

    def plant(self, tensors: dict[str, Tensor]) -> None:
        """Serve these in place of what was published."""
        self.service.begin_update()
        self.service.update([NamedTensor(n, x) for n, x in tensors.items()], flush_cache=False, version=None)
        self.service.end_update()

    def stored(self) -> dict[str, Tensor]:
        return dict(quantize_stream(iter([(n, x.clone()) for n, x in self.t.export()]), self.pair.spec))

    def elsewhere(self, spec: QuantSpec) -> Service:
        """An engine on the same weights by another quantizer."""
        stored = dict(quantize_stream(iter([(n, x.clone()) for n, x in self.t.export()]), spec))
        path = self.where / f"{spec.format.value} {spec.block}"
        write_checkpoint(path, quantized_config(self.t.hf, spec, list(stored)), stored)
        limits = EngineLimits(max_total_tokens=4096, context_length=256)
        return Service(path, limits, dtype=torch.bfloat16, ops=ExactOps(1, 1), version="1")


def _parts(stored: dict[str, Tensor], weight: str) -> dict[str, Tensor]:
    """leaf -> part of one weight."""
    module = weight.removesuffix("weight")
    return {n.removeprefix(module): x for n, x in stored.items() if n.startswith(module)}


def _tokens(b: _Bench) -> None:
    e = b.evidence()
    told = e.told
    cut = Fed(tokens=tuple(t[:-2] for t in told.tokens), masks=tuple(m[:-2] for m in told.masks))
    headless = Fed(tokens=tuple(t[1:] for t in told.tokens), masks=tuple(m[1:] for m in told.masks))
    moved = Fed(tokens=tuple(t.roll(1) for t in told.tokens), masks=told.masks)
    late = tuple(_within(x, m, lambda v: v.roll(1)) for x, m in zip(e.logprobs, told.masks, strict=True))
    b.judge("shifted log-probs", replace(e, logprobs=late))
    b.judge("shifted tokens", replace(e, fed=moved))
    b.judge("truncated", replace(e, fed=cut))
    b.judge("template of the trainer", replace(e, fed=headless))
    assert e.prompts is not None
    b.judge("template of the rollout", replace(e, prompts=tuple([1, *p] for p in e.prompts)))


def _within(x: Tensor, mask: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    out = x.clone()
    out[mask] = change(x[mask])
    return out


def _served(b: _Bench) -> None:
    stored, expert = b.stored(), LAYER + "mlp.experts.1."
    bias = LAYER + "mlp.gate.e_score_correction_bias"
    gate, up = _parts(stored, expert + "gate_proj.weight"), _parts(stored, expert + "up_proj.weight")
    swapped = {f"{expert}gate_proj.{leaf}": x for leaf, x in up.items()}
    swapped |= {f"{expert}up_proj.{leaf}": x for leaf, x in gate.items()}
    o_proj = LAYER + "self_attn.o_proj."
    own = _parts(stored, o_proj + "weight")
    faults = {
        "stale": {o_proj + leaf: x for leaf, x in _parts(b.earlier, o_proj + "weight").items()},
        "bias": {bias: torch.zeros_like(stored[bias])},
        "gate and up": swapped,
        "another expert's": {
            f"{expert}down_proj.{leaf}": x
            for leaf, x in _parts(stored, LAYER + "mlp.experts.5.down_proj.weight").items()
        },
        "other values": {o_proj + leaf: x * 1.5 if "scale" in leaf else x for leaf, x in own.items()},
    }
    for case, tensors in faults.items():
        b.plant(tensors)
        b.judge(case, b.evidence())  # who is mended is healthy again
    b.plant(faults["stale"])
    e = b.evidence()
    assert e.weights is not None
    b.judge("hashes of fused tensors", replace(e, weights=replace(e.weights, tensor=None)))


def _rounded(b: _Bench) -> None:
    spec = b.pair.spec
    assert spec is not None
    b.judge("group size", b.evidence(service=b.elsewhere(replace(spec, block=(32, 32)))))
    b.judge("scale dtype", b.evidence(service=b.elsewhere(replace(spec, format=QuantFormat.FP8_UE8M0))))
    b.judge("format", b.evidence(service=b.elsewhere(QuantSpec(format=QuantFormat.MXFP8))))


def _routes(b: _Bench) -> None:
    e = b.evidence(replay=True)
    assert e.routes is not None
    bad = [r.clone() for r in e.routes]
    bad[2][7] = torch.stack([_other_experts(ids, b.trainer.shape) for ids in bad[2][7]])
    b.judge("routes shifted", replace(e, routes=tuple(r.roll(1, 0) for r in e.routes)))
    b.judge("layers rotated", replace(e, routes=tuple(r.roll(1, 1) for r in e.routes)))
    b.judge("a bad row", replace(e, routes=tuple(bad)))
    b.judge("other samples'", replace(e, routes=tuple(_of_others(e.routes))))


def _other_experts(ids: Tensor, shape: RoutingShape | None) -> Tensor:
    """As many, none of them in [K] ids."""
    assert shape is not None
    return torch.tensor([i for i in range(shape.num_experts) if i not in ids.tolist()][: len(ids)])


def _of_others(routes: Sequence[Tensor]) -> list[Tensor]:
    """For each sample as many rows, in reverse, of those that begin with the second sample's."""
    every = torch.cat(list(routes[1:]) + list(routes[:1]))
    return [every[: len(r)].flip(0) for r in routes]


def _one_rank(rank: int, world: int, port: int, where: Path) -> Found:
    cfg = exactly.config(where, MODEL, "fp8", deterministic=False)
    with toy.trainer(cfg, rank, world, port) as t:
        toy.scramble(t)
        _sharpen(t)
        b = _Bench(t, where)
        report = b.judge("healthy", b.evidence())
        b.out["pictures"] = [p.stat().st_size for p in write_pictures(report, where / "pictures")]
        b.out["json"] = report.to_json()
        b.judge("healthy, replayed", b.evidence(replay=True))
        _tokens(b)
        b.judge("temperature", b.evidence(temperature=0.6))
        _served(b)
        _rounded(b)
        _routes(b)
        b.judge("healthy again", b.evidence(replay=True))
    return b.out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(_one_rank, 1, tmp_path_factory.mktemp("verify"), timeout_s=600, keep=True)[0]  # type: ignore[no-any-return]


FAULTS = {
    "shifted log-probs": ("tokens", Cause.TOKENS_SHIFTED),
    "shifted tokens": ("tokens", Cause.TOKENS_SHIFTED),
    "truncated": ("tokens", Cause.TOKENS_TRUNCATED),
    "template of the trainer": ("tokens", Cause.TEMPLATE),
    "template of the rollout": ("tokens", Cause.TEMPLATE),
    "temperature": ("sampling", Cause.TEMPERATURE),
    "stale": ("weights", Cause.STALE),
    "bias": ("weights", Cause.EXPERT_BIAS),
    "gate and up": ("weights", Cause.GATE_UP),
    "another expert's": ("weights", Cause.MISPLACED),
    "other values": ("weights", Cause.WEIGHTS),
    "hashes of fused tensors": ("weights", Cause.WEIGHTS),
    "group size": ("quantizer", Cause.GROUP_SIZE),
    "scale dtype": ("quantizer", Cause.SCALE_DTYPE),
    "format": ("quantizer", Cause.FORMAT),
    "routes shifted": ("routing", Cause.ROUTES_SHIFTED),
    "layers rotated": ("routing", Cause.LAYERS_ROTATED),
    "a bad row": ("routing", Cause.BAD_ROWS),
    "other samples'": ("routing", Cause.ROUTES),
}
STEPS = ("tokens", "sampling", "weights", "quantizer", "routing", "numerics")


@pytest.mark.parametrize("case", FAULTS)
def test_the_cause_is_named_and_no_other(case: str, found: Found) -> None:
    causes, _, said = found[case]
    assert causes == [FAULTS[case]], said


@pytest.mark.parametrize("case", ["healthy", "healthy, replayed", "healthy again"])
def test_a_healthy_pair_has_no_cause(case: str, found: Found) -> None:
    """Though both sides compute by other kernels, and differ."""
    causes, kls, said = found[case]
    assert causes == [], said
    assert 0 < kls[0][0] < 1e-3


@pytest.mark.parametrize("case", ["shifted log-probs", "shifted tokens", "template of the trainer", "temperature"])
def test_the_step_explains_the_gap(case: str, found: Found) -> None:
    """What is left once it is set right is a healthy pair's."""
    kls = found[case][1]
    before, after = kls[STEPS.index(FAULTS[case][0])]
    assert before > 10 * after and after < 1e-3


def test_a_step_that_cannot_be_set_right_says_so(found: Found) -> None:
    """An engine keeps its quantizer: nothing is known of the gap without it, and nothing is put down to kernels."""
    for case in ("group size", "scale dtype", "format"):
        assert found[case][1][STEPS.index("quantizer")][1] is None


def test_the_report_is_flat_and_drawn(found: Found) -> None:
    report = found["json"]
    assert report.pop("verdicts") == report.pop("bounds_broken") == []
    assert all(isinstance(v, int | float) for v in report.values())
    assert {"mismatch/kl", "mismatch/logprob_abs_diff_max", "verify/routing/kl_explained"} <= set(report)
    assert len(found["pictures"]) == 3 and min(found["pictures"]) > 5000

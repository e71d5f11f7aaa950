"""What the laws of invariance share: small models, a loss over whole samples, and a run in a given layout.

Every run starts from one checkpoint, which the single rank writes. Letters: T packed tokens, N samples in a pack.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_like.types import LossInputs, LossOutput, MicroBatch, Stat
from routing_replay.align import ShardSpec
from tests.support import toy
from tests.support.spawn import free_port
from tests.support.tiny_models import tiny, tiny_dense, tiny_glm, tiny_qwen

STEPS = 2
PATIENCE = 900.0  # seconds for one call of run_ranks: four ranks share two cores
Layout = Mapping[str, Any]
Metrics = list[dict[str, float]]
Rows = tuple[list[list[MicroBatch]], int]
EXPERTS = 8  # of which toy.TOP_K a token; half the tiny model's: most of a run's time goes by the number of tensors
ROUTED = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 2}
Sized = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4}
Dense = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 24, "torch_dtype": "float32"}

# four layers, so that two stages of two virtual stages divide; fp32, so that gradients are compared unrounded
MLA: dict[str, Any] = tiny(
    **Sized,
    **ROUTED,
    torch_dtype="float32",
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
MODELS: dict[str, dict[str, Any]] = {
    "mla": MLA,
    "gqa": tiny_qwen(**Sized, num_experts=EXPERTS, torch_dtype="float32", head_dim=24, mlp_only_layers=[0]),
    "mtp": MLA | {"num_nextn_predict_layers": 2, "attention_bias": True},
    "dense": tiny_dense(**Dense, attention_bias=True, tie_word_embeddings=True),
    # part of each head turns; biases of query, key and value; a draft layer of grouped queries
    "glm": tiny_glm(**Dense, n_routed_experts=EXPERTS, moe_intermediate_size=32, num_nextn_predict_layers=1),
    "six layers": MLA | {"num_hidden_layers": 6},
    "candidates": MLA,  # of batches that have such
}
MOE_LAYERS = (1, 2, 3)  # of the models with experts
KL = 0.5  # coefficient, where there is a reference


class WholeSamples(toy.PolicyGradient):
    """A loss whose every token depends on its whole sample, as a sequence-level ratio does: a rank that sees a part of
    a sample, or gives gradient to its own part alone, gets another one."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        loss, stats = super().__call__(inputs)
        logprobs = inputs.logprobs
        lengths = inputs.cu_seqlens.diff().long()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
        kept = torch.where(inputs.loss_mask, logprobs, 0.0)
        sums = torch.zeros(len(lengths)).index_add(0, owner, kept)  # [N]
        stats = dict(stats) | {"sample/logprob": Stat(sums.detach().sum(), torch.tensor(len(lengths)))}
        loss = loss * (1 + 0.1 * sums[owner])
        if (asked := inputs.candidate_logprobs) is not None:
            # as distillation does: sums over the candidates, weighted by their own probability; and an entropy bonus
            known = inputs.streams["teacher_candidates"]  # [T, C]
            loss = loss + (asked.exp() * (asked - known)).sum(1) - 0.3 * inputs.entropy
            stats["sample/candidates"] = Stat((asked.sum(1) * inputs.loss_mask).sum(), inputs.loss_mask.sum())
        if inputs.ref_logprobs is None:
            return loss, stats
        gap = torch.where(inputs.loss_mask, inputs.ref_logprobs - logprobs, 0.0)
        penalty = gap.exp() - gap - 1
        stats["train/kl_ref"] = Stat(penalty.detach().sum(), inputs.loss_mask.sum())
        return loss + KL * penalty, stats


@dataclass(frozen=True)
class Case:
    """One run: a model in a layout, with `micros` micro-batches over all data-parallel rows. `settings` change what is
    computed, so the single rank it is compared with has them too; `given` changes what its ranks are given."""

    model: str
    layout: Layout = field(default_factory=dict)
    settings: Layout = field(default_factory=dict)
    micros: int = 4
    given: Callable[[MicroBatch, ShardSpec], MicroBatch] | None = None  # what a rank gets for each micro-batch
    rows: Callable[[int, tuple[int, ...], int, int], Rows] | None = None  # of seed, layers, dp, micros; None: `plain`

    @property
    def key(self) -> str:
        """Of the single rank's run that this one is compared with."""
        words = [self.model, *(f"{name}-{value}" for name, value in sorted(self.settings.items()))]
        return re.sub(r"[^\w.]+", "-", "-".join(words))


@dataclass(frozen=True)
class Run:
    """What a run gave. `worst` is the parameter whose gradient is farthest from the single rank's, relative to its own
    norm, and how far."""

    metrics: Metrics
    worst: tuple[str, float]
    bias: list[float]  # the routing biases after the steps
    rounding: dict[str, float]  # in bf16, of each parameter's gradient: its distance from fp32's, relative to its norm


def batch(seed: int, layers: tuple[int, ...] = MOE_LAYERS) -> list[MicroBatch]:
    """16 samples of 5 to 17 tokens: four a micro-batch, of lengths that are multiples of nothing."""
    return toy.samples(16, seed=seed, layers=layers, experts=EXPERTS)


def plain(seed: int, layers: tuple[int, ...], dp: int, micros: int) -> Rows:
    """([dp][micro] micro-batches, number of loss tokens) of `batch`."""
    return toy.grid(batch(seed, layers), dp=dp, micros=micros)


def with_candidates(seed: int, layers: tuple[int, ...], dp: int, micros: int) -> Rows:
    """`plain`, with three candidates of every label, which belong to it wherever it is packed."""

    def add(m: MicroBatch) -> MicroBatch:
        step = torch.arange(1, 4)
        candidates = (m.labels[:, None] * 5 + step * (m.positions[:, None] + 1)) % toy.VOCAB
        return replace(m, candidates=candidates, streams={"teacher_candidates": -0.1 * candidates.float()})

    rows, tokens = plain(seed, layers, dp, micros)
    return [[add(m) for m in row] for row in rows], tokens


def _row(t: Any, seed: int, case: Case) -> tuple[list[MicroBatch], int]:
    dp = t.config.parallel.dp
    rows, tokens = (case.rows or plain)(seed, t.family.moe_layers(t.hf), dp, case.micros // dp)
    return [m if case.given is None else case.given(m, t.shard_spec) for m in rows[t.dp_rank]], tokens


def train(t: Any, case: Case) -> Metrics:
    """STEPS optimizer steps, each on another batch."""
    out = []
    for step in range(STEPS):
        row, tokens = _row(t, step, case)
        out.append(dict(t.step(row, tokens, step + 1).metrics))
    return out


def gradients(t: Any, case: Case) -> Iterator[tuple[str, Tensor]]:
    """Every parameter's whole gradient under its Hugging Face name: put in the weights' place and exported, since the
    exporter knows where each shard belongs. The weights are lost. Collective."""
    t.optimizer.zero_grad()
    t._step.run(*_row(t, 0, case))
    for chunk in t.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets if t.config.distributed_optimizer else ():
                ranks = group.intra_distributed_optimizer_instance_group  # each holds the sum of its part only
                mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)
    if t.config.lora.rank:
        yield from _of_adapters(t)
        return
    for param in (p for chunk in t.chunks for p in chunk.parameters()):
        # into separate memory: what is computed in bf16 has its gradient in fp32, and is compared unrounded
        param.data = param.main_grad.clone()
    yield from t.export()


def _of_adapters(t: Any) -> Iterator[tuple[str, Tensor]]:
    """An adapter is published inside its weight, W + scale * B A: with W at zero, A's gradient shows beside B's values
    and B's beside A's, all of it, since B's columns and A's rows are independent."""
    from megatron_bridge.optim.te_names import local_name

    named = [(local_name(name), p) for model in t.models for name, p in model.named_parameters()]
    held = {id(p): p.detach().clone() for _, p in named}
    for adapter in ("lora_a", "lora_b"):
        with torch.no_grad():
            for name, p in named:
                if name.endswith(adapter):
                    p.copy_(p.main_grad)
                elif "lora_" in name:
                    p.copy_(held[id(p)])
                else:
                    p.zero_()
        for name, x in t.export():
            yield f"{name}, {adapter}", x


def bend(t: Any) -> None:
    """Every adapter's B away from zero, where A has no gradient; the same in every layout of the ranks."""
    from megatron_bridge.optim.param_names import named_tensors

    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in sorted(named_tensors(t.models, t.parallel), key=lambda pair: pair[0]):
            if name.endswith("lora_b"):
                x.copy_(0.2 * torch.randn(x.shape, generator=g))
    t.optimizer.reload_model_params()


def bias(t: Any) -> list[float]:
    """All routing biases of this rank's layers, gathered on every rank of its pipeline, in layer order."""
    from megatron_bridge.model.build import routers

    own = [(r.layer_number, r.expert_bias.tolist()) for r in routers(t.chunks) if r.expert_bias is not None]
    stages: list[Any] = [None] * t.parallel.config.pp
    dist.all_gather_object(stages, own, group=t.parallel.pp_group)
    return [x for _, values in sorted(v for stage in stages for v in stage) for x in values]


def references(rank: int, world: int, port: int, where: Path, cases: Mapping[str, Case]) -> dict[str, Run]:
    """The single rank's run for each key of `cases`; it writes its start and its gradients."""
    alone = {case.key: Case(case.model, settings=case.settings, rows=case.rows) for case in cases.values()}
    return {key: run_case(rank, world, free_port(), where, case, write=True) for key, case in alone.items()}


def in_layouts(rank: int, world: int, port: int, where: Path, cases: Mapping[str, Case]) -> dict[str, Run]:
    """The runs of `cases` over all ranks, each in a separate world."""
    out = {}
    for i, (name, case) in enumerate(cases.items()):
        port = agree_on_port(where / f"port-{world}-{i}", rank)
        out[name] = run_case(rank, world, port, where, case)
    return out


def agree_on_port(file: Path, rank: int) -> int:
    """A free port, picked by rank 0 just before it is used: one that is picked minutes ahead may be taken by then."""
    if rank == 0:
        file.with_suffix(".new").write_text(str(free_port()))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


def run_case(rank: int, world: int, port: int, where: Path, case: Case, *, write: bool = False) -> Run:
    """write: the single rank's run, which the others start from and are compared with."""
    start, whole = where / f"{case.key}-start", where / f"{case.key}-gradients.pt"
    hf = toy.hf_dir(where / f"{case.model}-hf-{rank}", MODELS[case.model])
    cfg = toy.config(hf, **case.settings, **case.layout)
    with toy.trainer(cfg, rank, world, port, WholeSamples()) as t:
        if write:
            toy.scramble(t)
            bend(t)
            t.save(start)
        t.load_weights(start)
        held = [(x, x.detach().clone()) for model in t.models for x in (*model.parameters(), *model.buffers())]
        metrics, biases = train(t, case), bias(t)
        with torch.no_grad():
            for x, value in held:  # as they were loaded, for a fraction of the time
                x.copy_(value)
        found = {name: x.clone() for name, x in gradients(t, case)}
    exact = whole.with_suffix(".exact.pt")
    if write:
        torch.save(found, whole)
        if cfg.params_dtype == "bfloat16":
            exactly = toy.config(hf, **{**case.settings, "dtype": "float32"})
            with toy.trainer(exactly, rank, world, free_port(), WholeSamples()) as t:
                t.load_weights(start)
                torch.save({name: x.clone() for name, x in gradients(t, case)}, exact)
    rounding = _distances(found, torch.load(exact)) if exact.exists() else {}
    errors = _distances(found, torch.load(whole))
    worst = max(errors, key=lambda name: errors[name])
    return Run(metrics, (worst, errors[worst]), biases, rounding)


def _distances(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys(), f"gradients of {sorted(got.keys() ^ want.keys())[:3]} are of one run only"
    return {name: _distance(x, want[name]) for name, x in got.items()}


def _distance(got: Tensor, want: Tensor) -> float:
    norm = float(want.norm())
    return float((got - want).norm()) / norm if norm else float(got.norm())

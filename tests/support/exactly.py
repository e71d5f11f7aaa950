"""A trainer and an embedded engine on its weights, in one process: what the laws of exact log-probabilities share.

Letters: T packed tokens, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_like.batch.packing import pack
from miles_like.types import MicroBatch, Prompt, Sample, SampleGroup, SamplingParams
from quant.hf_config import quantized_config
from quant.spec import QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.engine.requests import Completed, PromptSpec
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.server.service import Service
from rollout.sglang.samples import RoutingShape, SampleReader, empty_sample
from tests.support import toy
from tests.support.tiny_models import tiny, tiny_dense, tiny_qwen, write_checkpoint

_SIZED = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "mla": tiny(**_SIZED, **_MLA),
    "gqa": tiny_qwen(**_SIZED, head_dim=32, mlp_only_layers=[0]),
}
MODELS |= {
    "mla, four layers": MODELS["mla"] | {"num_hidden_layers": 4},
    "gqa, four layers": MODELS["gqa"] | {"num_hidden_layers": 4},
    # sums of more columns than one fp32 product takes
    "gqa, deep": MODELS["gqa"] | {"hidden_size": 1088, "head_dim": 64, "num_attention_heads": 16},
    "dense": tiny_dense(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32),
    "mla, mtp": MODELS["mla"] | {"num_nextn_predict_layers": 1},
    # inputs that divide into groups of 128
    "mla, wide": tiny(
        **_SIZED | {"hidden_size": 128, "moe_intermediate_size": 128},
        **_MLA | {"q_lora_rank": 128, "kv_lora_rank": 128},
    ),
}
_BLOCKS = {"block": [16, 16], "qat": True}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"format": "bf16"},
    "fp8": {"format": "fp8", **_BLOCKS},
    "fp8-ue8m0": {"format": "fp8-ue8m0", **_BLOCKS},
    "int4": {"format": "int4", "qat": True},
    "mxfp8": {"format": "mxfp8", "qat": True},
    "mxfp4": {"format": "mxfp4", "qat": True},
    "nvfp4": {"format": "nvfp4", "qat": True},
}
NEW = 12  # tokens a sample
PROMPTS = [torch.randint(2, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 41, 17, 65, 9)]


def prompt_specs(seed: int, *, n: int = 2, temperature: float = 1.0) -> list[PromptSpec]:
    """`n` samples of each of PROMPTS."""
    return [
        PromptSpec(
            rid=str(i),
            token_ids=tuple(ids),
            sampling=SamplingParams(max_new_tokens=NEW, sampling_seed=100 * seed + i, temperature=temperature),
            n=n,
            ignore_eos=True,
            routing_start=0,
        )
        for i, ids in enumerate(PROMPTS)
    ]


def generate(engine: Engine, specs: Sequence[PromptSpec]) -> list[list[Completed]]:
    out: list[list[Completed]] = [[] for _ in specs]
    for spec, into in zip(specs, out, strict=True):
        engine.submit(spec, into.extend)
    while engine.step():
        pass
    return out


def shape_of(t: Any) -> RoutingShape | None:
    """Of the routes of a trainer's model; None: a dense one."""
    family, hf = t.family, t.hf
    if not family.moe_layers(hf):
        return None
    return RoutingShape(
        num_layers=family.num_layers(hf),
        moe_layers=family.moe_layers(hf),
        top_k=family.top_k(hf),
        num_experts=family.num_experts(hf),
    )


class Pair:
    """The trainer `t`, on every rank, and an engine on rank 0 that serves what it publishes."""

    def __init__(self, t: Any, where: Path, **how: Any) -> None:
        """how: of the Service."""
        self.t, self.where, self.how = t, where, how
        self.spec: QuantSpec | None = t.config.precision.spec()
        self.version = 0
        self.service: Service | None = None
        self.alone = dist.get_world_size() == 1
        self.publish()

    @property
    def engine(self) -> Engine:
        assert self.service is not None, "rank 0 has the engine"
        return self.service.engine

    def _stream(self) -> Iterator[Any]:
        return quantize_stream(iter(list(self.t.export())), self.spec)

    def publish(self) -> None:
        """As a run does: the exported weights, encoded, with their names."""
        stream = self._stream()
        if self.t.parallel.rank:
            return
        self.version += 1
        if self.service is not None:
            self.service.begin_update()
            self.service.update(stream, flush_cache=False, version=str(self.version))
            self.service.end_update()
            return
        stored = dict(stream)
        hf = self.t.hf
        if self.spec is not None:
            hf = quantized_config(hf, self.spec, list(stored))
        write_checkpoint(self.where, hf, stored)
        limits = EngineLimits(max_total_tokens=4096, context_length=256)
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.t.config.params_dtype]
        layout = self.t.config.parallel
        ops = ExactOps(layout.tp, layout.etp)
        of_run = {"version": str(self.version), "activations": self.t.config.precision.activations, "dtype": dtype}
        self.service = Service(self.where, limits, ops=ops, **(of_run | self.how))

    def groups(self, seed: int) -> list[SampleGroup]:
        """What the engine samples, on every rank."""
        found: list[Any] = [None]
        if not self.t.parallel.rank:
            specs = prompt_specs(seed, temperature=self.t.config.temperature)
            found = [self._read(specs, generate(self.engine, specs))]
        if not self.alone:
            dist.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[no-any-return]

    def _read(self, specs: Sequence[PromptSpec], done: Sequence[Sequence[Completed]]) -> list[SampleGroup]:
        reader, out = SampleReader(routing=shape_of(self.t)), []
        for spec, completed in zip(specs, done, strict=True):
            prompt = Prompt(id=spec.rid, token_ids=spec.token_ids, answer="", source="")
            new = [empty_sample(prompt, i) for i in range(len(completed))]
            samples: list[Sample] = reader.extend(new, [[]] * len(new), [c.reply for c in completed])
            out.append(SampleGroup(prompt=prompt, samples=tuple(samples)))
        return out

    def packed(self, groups: Sequence[SampleGroup], max_tokens: int = 4096) -> tuple[list[MicroBatch], int]:
        """(this rank's row, loss tokens of all rows) in micro-batches of up to `max_tokens`."""
        layout = self.t.config.parallel
        advantages = [[1.0 - i for i in range(len(g.samples))] for g in groups]
        batch = pack(groups, advantages, dp_size=layout.dp, max_tokens=max_tokens, micro_multiple=layout.micro_multiple)
        return list(batch.grid[self.t.dp_rank]), batch.loss_tokens

    def differing(self, row: Sequence[MicroBatch]) -> int:
        """Tokens under loss whose log-probability, by a forward pass that routes by itself, is not the engine's."""
        return sum(
            int((own != batch.rollout_logprobs)[batch.loss_mask].sum())
            for own, batch in zip(self.t.logprobs(row), row, strict=True)
        )


def config(where: Path, model: str, format: str = "bf16", dtype: str = "bfloat16", **settings: Any) -> Any:
    """Of a deterministic trainer in replay.mode r3."""
    hf = toy.hf_dir(where / f"{model}-{dtype}", MODELS[model] | {"torch_dtype": dtype})
    how: dict[str, Any] = {"deterministic": True, "precision": FORMATS[format]} | settings
    return toy.config(hf, dtype=dtype, **how)


Found = list[tuple[int, int, bool]]  # a step's (tokens that differ, the same packed otherwise, what its metrics say)


def steps(pair: Pair, n: int) -> Found:
    """`n` times: the engine samples, the trainer scores that in two packings, takes a step, and publishes."""
    out = []
    for step in range(n):
        groups = pair.groups(step)
        row, tokens = pair.packed(groups)
        other, _ = pair.packed(groups, max_tokens=100)
        before = pair.differing(row), pair.differing(other)
        metrics = pair.t.step(row, tokens, step + 1).metrics
        out.append((*before, exact(metrics)))
        pair.publish()
    return out


def exact(metrics: Mapping[str, float]) -> bool:
    """As a step's metrics say."""
    largest, agreed = metrics["mismatch/logprob_abs_diff_max"], metrics["routing/agreement"]
    return largest == 0.0 and agreed == 1.0

"""What a step of reinforcement learning changes of the published weights, and the size of the exact differences.

A model of random weights (as its config initializes them, standard deviation 0.02) trains real steps: policy gradient
with clipped ratios on samples of random tokens, AdamW with fp32 masters, lr 1e-6, quantization-aware where the format
is not BF16. After each step the weights are encoded as a publication encodes them, and compared with the step before:
`changed` is the share of encoded bytes that differ, `sent` the bytes of the differences (`rollout/wire/deltas.py`,
headers included) over the encoded bytes. Both are medians over the steps after the first, per kind of tensor.

`diff_of_memcpy` and `apply_of_memcpy` are rates of one thread, bytes of the tensor a second over those of a copy in the
same run, for the experts of one layer of Qwen3-30B-A3B of which one element in fifty differs.

A weight of BF16 changes when its update crosses the middle between two of its values, which are 2^-8 of it apart: the
share grows with lr over the size of the weights, so that models with smaller weights change more.

    python benchmarks/weight_changes.py [--quick] [--steps N] [--lr LR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import add_write, finish
from torch import Tensor
from train_step import WIDE, model_config
from transformers_step import LOSS

from megatron_bridge.config import OptimizerConfig, ParallelConfig, PrecisionConfig, ReplayConfig, TrainerConfig
from miles_like.batch.packing import pack
from miles_like.types import Finish, Prompt, Sample, SampleGroup, TrainBatch, VersionSpan
from quant.stream import quantize_stream
from rollout.publish.directory.encoded_weights import EncodedWeights
from rollout.sglang.ports import free_port
from rollout.wire.deltas import Delta, content_hash, encode_delta

GOALS = {"sent_bf16_max": 0.05, "sent_fp8_max": 0.05, "sent_int4_max": 0.05}
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "vocab_size": 2048,
    "initializer_range": 0.02,
}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": model_config(**WIDE | SIZES | {"n_routed_experts": 16}),
    "qwen3_moe": QWEN | SIZES,
}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"format": "bf16"},
    "fp8": {"format": "fp8", "qat": True},
    "int4": {"format": "int4", "qat": True},
}
KINDS = {
    "scales": ("_scale_inv", "_scale"),
    "router": (".mlp.gate.",),
    "experts": (".mlp.experts.",),
    "attention": (".self_attn.",),
    "embeddings": ("embed_tokens", "lm_head"),
}


class Change(NamedTuple):
    """Bytes of the encoded tensors of a kind."""

    encoded: int
    changed: int
    sent: int


def kind_of(name: str) -> str:
    if "norm" in name:
        return "norms"
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other linears")


def made_batch(vocabulary: int, samples: int) -> TrainBatch:
    g = torch.Generator().manual_seed(2)
    groups = []
    for i in range(samples):
        prompt, response = 16, int(torch.randint(16, 112, (), generator=g))
        ids, mask = torch.randint(2, vocabulary, (prompt + response,), generator=g), torch.arange(prompt + response)
        sample = Sample(
            prompt_id=str(i),
            index=0,
            token_ids=ids,
            loss_mask=mask >= prompt,
            logprobs=torch.zeros(prompt + response),
            routing=None,
            versions=(VersionSpan(0, 0, response),),
            finish=Finish.STOP,
            text="",
        )
        groups.append(
            SampleGroup(prompt=Prompt(id=str(i), token_ids=tuple(ids[:prompt].tolist()), answer=""), samples=(sample,))
        )
    advantages = [[float(a)] for a in torch.randn(samples, generator=g)]
    return pack(groups, advantages, dp_size=1, max_tokens=4096)


def steps_of(trainer: Any, batch: TrainBatch, count: int) -> Iterator[None]:
    """Each on the same prompts and answers, whose log-probs are those of the weights before the step."""
    [row] = batch.grid
    for version in range(count):
        own = [replace(m, rollout_logprobs=p) for m, p in zip(row, trainer.logprobs(row), strict=True)]
        trainer.step(own, batch.loss_tokens, version + 1)
        yield


def changes(held: EncodedWeights, stream: Iterable[tuple[str, Tensor]]) -> dict[str, Change]:
    encoded, changed, sent = Counter[str](), Counter[str](), Counter[str]()
    for name, tensor in stream:
        one, kind = held.advance(name, tensor), kind_of(name)
        encoded[kind] += tensor.nbytes
        changed[kind] += one.changed
        sent[kind] += len(one.payload)
    found = {kind: Change(encoded[kind], changed[kind], sent[kind]) for kind in encoded}
    return found | {"all": Change(encoded.total(), changed.total(), sent.total())}


def measured(hf: dict[str, Any], precision: dict[str, Any], lr: float, steps: int) -> dict[str, tuple[float, float]]:
    """Kind -> (changed, sent), of the encoded bytes."""
    from megatron_bridge.trainer import MegatronTrainer

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf))
        config = TrainerConfig(
            hf_config=folder,
            parallel=ParallelConfig(),
            precision=PrecisionConfig(**precision),
            optimizer=OptimizerConfig(lr=lr),
            replay=ReplayConfig(mode="off"),
        )
        trainer = MegatronTrainer(
            config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), loss=LOSS
        )
    spec, held, rows = config.precision.spec(), EncodedWeights(), defaultdict[str, list[Change]](list)
    changes(held, quantize_stream(trainer.export(), spec))
    for step, _ in enumerate(steps_of(trainer, made_batch(hf["vocab_size"], 16), steps)):
        for kind, change in changes(held, quantize_stream(trainer.export(), spec)).items():
            if step:  # the first update of Adam is lr for every weight that has a gradient
                rows[kind].append(change)
    trainer.close()
    return {
        kind: (
            statistics.median(c.changed / c.encoded for c in found),
            statistics.median(c.sent / c.encoded for c in found),
        )
        for kind, found in rows.items()
    }


def rates(rounds: int) -> dict[str, float]:
    """Of taking and applying differences, over memcpy's: medians over the rounds of ratios within one."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(128 * 768, 2048, generator=g).mul_(0.02).bfloat16()
    bits = old.clone().view(torch.int16)
    bits ^= (torch.rand(bits.shape, generator=g) < 0.02).short()
    new, target = bits.view(torch.bfloat16), torch.empty_like(old)
    hashes, found = (content_hash(old), content_hash(new)), []
    for _ in range(rounds + 1):
        times = [time.perf_counter()]
        target.copy_(new)
        times.append(time.perf_counter())
        payload = encode_delta(old, hashes[0], new, content_hash(new)).payload
        times.append(time.perf_counter())
        made = Delta("experts", torch.frombuffer(bytearray(payload), dtype=torch.uint8)).applied(old)
        times.append(time.perf_counter())
        assert made.view(torch.int16).equal(bits)
        copy, diff, apply = (b - a for a, b in pairwise(times))
        found.append((copy / diff, copy / apply, old.nbytes / copy / 1e9))
    diff_of, apply_of, rate = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return {"diff_of_memcpy": diff_of, "apply_of_memcpy": apply_of, "memcpy_gb_s": rate}


def main() -> int:
    """0 when the goals hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(p)
    p.add_argument("--quick", action="store_true", help="three steps")
    p.add_argument("--steps", type=int, default=None)
    p.add_argument("--lr", type=float, default=1e-6)
    args = p.parse_args()
    torch.set_num_threads(1)
    steps = args.steps or (3 if args.quick else 8)
    figures: dict[str, float] = {"steps": steps, "lr": args.lr}
    kinds = ("all", "experts", "attention", "other linears", "router", "embeddings", "norms", "scales")
    lines = [f"| changed -> sent, % of the encoded bytes | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for family, hf in FAMILIES.items():
        for name, precision in FORMATS.items():
            found = measured(hf, precision, args.lr, steps)
            cells = [f"{100 * found[k][0]:.2f} -> {100 * found[k][1]:.2f}" if k in found else "" for k in kinds]
            lines.append(f"| {family}, {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            for kind, (changed, sent) in found.items():
                key = f"{family}_{name}_{kind.replace(' ', '_')}"
                figures |= {f"changed_{key}": round(changed, 5), f"sent_{key}": round(sent, 5)}
    for name in FORMATS:
        figures[f"sent_{name}"] = max(figures[f"sent_{family}_{name}_all"] for family in FAMILIES)
    speeds = rates(3 if args.quick else 7)
    figures |= speeds
    holds = all(figures[key.removesuffix("_max")] <= goal for key, goal in GOALS.items())
    lines += ["", "| " + " | ".join(speeds) + " |", "|---" * len(speeds) + "|"]
    lines += ["| " + " | ".join(f"{value:.3g}" for value in speeds.values()) + " |"]
    lines += ["", f"Medians of {steps - 1} steps of lr {args.lr:g}."]
    lines.append(f"Goal: all differences together at most {100 * GOALS['sent_bf16_max']:g} % of the encoded bytes.")
    finish("weight_changes", figures, GOALS, holds, lines=lines)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""Model FLOPs utilization of one training step on one CUDA device: a mixture of experts of about a billion parameters.

Forward, loss, backward, clip and AdamW of one rank in BF16 with fp32 gradients and masters, its own routes, nothing
recomputed. A step is 4 micro-batches of 16 samples of 2,048 tokens, 131,072 tokens, as a step of reinforcement learning
has them: the optimizer's time is a share of such a step, and a micro-batch of a quarter of them is one pack. The
FLOPs are those of `megatron_bridge/plan/flops.py`: three times the forward's matrix products and causal attention,
output rows under loss only. Utilization is FLOPs over the median step's seconds and the given peak of the device.
Without CUDA it says so and measures nothing, unless `--tiny` asks for a look at the script itself.

    python benchmarks/mfu.py --peak-tflops 989 [--spec local|te] [--samples N] [--micro-batches N] [--profile] [--tiny]

MILES_LIKE_TRITON=0 in the environment leaves Triton's kernels out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from figures import add_write, finish
from transformers_step import LOSS, OPTIMIZER, seconds_of

from megatron_bridge.config import KernelsConfig, ParallelConfig, PrecisionConfig, ReplayConfig, TrainerConfig
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.flops import train_flops
from miles_like.types import MicroBatch
from rollout.sglang.ports import free_port

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
TINY = {"vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 8}
LENGTH = 2048  # inputs of a sample
WARM, ROUNDS = 3, 8
FUSED = "perf/fused/"
GOALS = {"mfu_min": 0.25}


def micro_batch(samples: int, length: int, vocab: int, seed: int) -> MicroBatch:
    """`samples` rows of `length` inputs, three quarters of each under loss."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocab, (samples, length + 1), generator=g)
    count = samples * length
    return MicroBatch(
        samples=tuple(f"random/{i}" for i in range(samples)),
        tokens=tokens[:, :-1].reshape(-1),
        labels=tokens[:, 1:].reshape(-1),
        positions=torch.arange(length).repeat(samples),
        cu_seqlens=torch.arange(0, count + 1, length, dtype=torch.int32),
        loss_mask=(torch.arange(length) >= length // 4).repeat(samples),
        advantages=torch.randn(samples, generator=g).repeat_interleave(length),
        rollout_logprobs=torch.full((count,), -10.0),
        routing=None,
    )


def step_seconds(
    hf: dict[str, Any], spec: str, row: list[MicroBatch], loss_tokens: int, *, profiled: bool, memory: int | None
) -> tuple[float, dict[str, float]]:
    """Median over ROUNDS steps, the device idle before and after each; and the last step's metrics. memory: MiB of a
    block of logits, None for the default. On CUDA it prints the kernels of one more step, the calls if `profiled`."""
    from megatron_bridge.trainer import MegatronTrainer

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf))
        kernels = KernelsConfig.model_validate({"spec": spec, "grouped_gemm": spec == "te"})
        config = TrainerConfig(
            hf_config=folder,
            parallel=ParallelConfig(),
            precision=PrecisionConfig(),
            optimizer=OPTIMIZER,
            replay=ReplayConfig(mode="off"),
            kernels=kernels,
            **({} if memory is None else {"logprob_memory_mib": memory}),
        )
        trainer = MegatronTrainer(
            config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), loss=LOSS
        )
        metrics: dict[str, float] = {}
        took = [seconds_of(lambda: metrics.update(_settled(trainer, row, loss_tokens))) for _ in range(WARM + ROUNDS)]
        print("seconds of each step:", *(f"{s:.3f}" for s in took))
        if profiled or torch.cuda.is_available():
            _profile(lambda: _settled(trainer, row, loss_tokens), calls=profiled)
        trainer.close()
    return statistics.median(took[WARM:]), metrics


def _settled(trainer: Any, row: list[MicroBatch], loss_tokens: int) -> dict[str, float]:
    metrics = dict(trainer.step(row, loss_tokens, 1).metrics)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return metrics


def _profile(work: Callable[[], Any], *, calls: bool) -> None:
    """Prints the kernels with the most time, of torch's profiler; calls: the calls by their time on the host too."""
    with torch.profiler.profile() as profiler:
        work()
    found = profiler.key_averages()
    kernels = [event for event in found if event.device_type.name != "CPU"]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"kernels: {total / 1e6:.3f} s; ms, share, launches, name:")
    for event in kernels[:30]:
        took = event.self_device_time_total
        print(f"{took / 1e3:9.2f} {took / total:6.1%} {event.count:6}  {event.key[:110]}")
    if calls:
        print(found.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=80))


def main() -> int:
    """0; 1 below the goal; 2 when the peak is missing."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peak-tflops", type=float, help="of the device in BF16, dense: 989 for an H100 or H200 SXM")
    p.add_argument("--spec", choices=("local", "te"), default="local", help="modules")
    p.add_argument("--micro-batches", type=int, default=4, help="of a step")
    p.add_argument("--samples", type=int, default=16, help="of 2,048 tokens each, in a micro-batch")
    p.add_argument("--logprob-memory-mib", type=int, help="of a block of logits and its temporaries")
    add_write(p)
    p.add_argument("--profile", action="store_true", help="also print the calls of one step by their time on the host")
    p.add_argument("--quick", action="store_true", help="one micro-batch")
    p.add_argument("--tiny", action="store_true", help="a tiny model and short samples, on any device")
    args = p.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("no CUDA device here: nothing was measured")
        return 0
    if args.peak_tflops is None and not args.tiny:
        p.error("--peak-tflops: the device's peak in BF16, without sparsity")
    hf = MODEL | (TINY if args.tiny else {})
    samples, length = (4, 32) if args.tiny else (args.samples, LENGTH)
    micros = 1 if args.quick else args.micro_batches
    row = [micro_batch(samples, length, hf["vocab_size"], i) for i in range(micros)]
    loss_tokens = sum(int(m.loss_mask.sum()) for m in row)
    flops = train_flops(hf, [length] * (samples * micros), head_rows=loss_tokens)
    seconds, metrics = step_seconds(
        hf, args.spec, row, loss_tokens, profiled=args.profile, memory=args.logprob_memory_mib
    )
    figures: dict[str, Any] = {
        "parameters": family_of(hf).parameter_count(hf),
        "tokens_per_step": samples * micros * length,
        "tokens_per_s": round(samples * micros * length / seconds, 1),
        "step_s": round(seconds, 4),
        "tflops": round(flops / seconds / 1e12, 3),
        "mfu": round(flops / seconds / 1e12 / args.peak_tflops, 4) if args.peak_tflops else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
        "fused": " ".join(k.rpartition("/")[2] for k, on in sorted(metrics.items()) if k.startswith(FUSED) and on),
        "loss": round(metrics["train/loss"], 6),
        "grad_norm": round(metrics["train/grad_norm"], 6),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
    }
    for name, value in figures.items():
        print(f"{name:16}{value!s:>28}")
    holds = args.tiny or figures["mfu"] >= GOALS["mfu_min"]
    finish("mfu", figures, GOALS, holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

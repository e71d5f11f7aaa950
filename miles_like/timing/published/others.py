"""Published figures of prime-rl's trainer, and of verl's modes relative to each other.

prime-rl: benchmarks/results/BENCHMARKS.md of 2026-02-07, its rows on H100 and H200 with FlashAttention-2 or -3. The
trainer is FSDP2 with full recomputation, in micro-batches of one whole sequence; "RL Full" writes the weights in each
step of two micro-batches, by one process (its steps take as much longer than those of "SFT Full").

verl: docs/advance/v1_async_trainer.md, its modes relative to `sync`, with Qwen3-30B-A3B for Qwen3.5-35B-A3B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import GIB, device
from miles_like.timing.engine import EngineSetup, cache_tokens
from miles_like.timing.layers import LayerSetup
from miles_like.timing.publish import PublishSetup
from miles_like.timing.published.models import Row, Shapes
from miles_like.timing.rates.calibration import ONE_WRITER, REACHED
from miles_like.timing.shape import ModelShape
from miles_like.timing.step import StepSetup, step_time
from miles_like.timing.train import TrainSetup, train_time
from miles_like.timing.workload import Lengths, Workload, lengths_with_mean

# Model, device, GPUs, kind, tokens of a sequence, tokens/s in thousands.
MFU = (
    ("qwen3_0_6b", "H100", 1, "RL Full", 16384, 11.90),
    ("qwen3_0_6b", "H100", 1, "RL Full", 65536, 10.15),
    ("qwen3_0_6b", "H100", 1, "SFT Full", 8192, 26.01),
    ("qwen3_4b", "H100", 1, "RL LoRA", 65536, 4.16),
    ("qwen3_4b", "H200", 8, "RL Full", 65536, 29.54),
    ("qwen3_30b_a3b", "H200", 8, "RL Full", 65536, 12.75),
    ("glm45_air", "H200", 8, "RL LoRA", 65536, 9.76),
)
_MORE = (
    ("qwen3_0_6b", "H100", 1, "RL LoRA", 16384, 13.34),
    ("qwen3_0_6b", "H100", 1, "RL LoRA", 65536, 9.97),
    ("qwen3_0_6b", "H100", 1, "SFT Full", 16384, 25.49),
    ("qwen3_4b", "H100", 1, "RL LoRA", 16384, 6.23),
    ("qwen3_4b", "H200", 8, "RL Full", 16384, 27.44),
    ("qwen3_4b", "H100", 8, "RL Full", 16384, 26.03),
    ("qwen3_4b", "H100", 8, "RL Full", 65536, 28.97),
    ("qwen3_4b", "H200", 8, "RL LoRA", 16384, 52.38),
    ("qwen3_4b", "H100", 8, "RL LoRA", 16384, 48.72),
    ("qwen3_4b", "H200", 8, "RL LoRA", 65536, 33.43),
    ("qwen3_4b", "H100", 8, "RL LoRA", 65536, 32.80),
    ("qwen3_4b", "H200", 8, "SFT Full", 16384, 53.14),
    ("qwen3_4b", "H100", 8, "SFT Full", 16384, 49.72),
    ("qwen3_30b_a3b", "H100", 8, "RL Full", 16384, 6.11),
    ("qwen3_30b_a3b", "H200", 8, "RL Full", 16384, 5.94),
    ("qwen3_30b_a3b", "H200", 8, "RL LoRA", 16384, 36.77),
    ("qwen3_30b_a3b", "H100", 8, "RL LoRA", 16384, 33.10),
    ("qwen3_30b_a3b", "H200", 8, "RL LoRA", 65536, 24.41),
    ("qwen3_30b_a3b", "H100", 8, "RL LoRA", 65536, 23.39),
    ("qwen3_30b_a3b", "H200", 8, "SFT Full", 16384, 35.03),
    ("glm45_air", "H200", 8, "RL LoRA", 16384, 16.69),
)


def prime_rl(shapes: Shapes, *, more: bool = False) -> Iterator[Row]:
    """Tokens/s of the trainer. more: the other rows of the page, instead of one or two of each model."""
    for model, name, gpus, kind, length, seen in _MORE if more else MFU:
        shape, lora = shapes[model], "LoRA" in kind
        parallel = ParallelConfig(dp=gpus)
        layer = LayerSetup(device=device(name), parallel=parallel, recompute="full", adapters=lora, imbalance=1.0)
        setup = TrainSetup(layer=layer, pack_tokens=length, fully_sharded=True, trained=0.01 if lora else 1.0)
        load = Workload(groups=2 * gpus, samples_per_group=1, prompt=0.0, responses=Lengths((float(length),)))
        phase = train_time(shape, setup, load).times(1 / REACHED[name])
        written = 2 * shape.parameters / ONE_WRITER if kind == "RL Full" else 0.0
        yield Row(
            source="prime-rl",
            name=f"{model}, {gpus} {name}, {kind}, {length}",
            seen=1000 * seen,
            predicted=load.tokens / (phase.seconds + written),
            unit="tokens/s",
            decides="one writer" if written > phase.terms[phase.decides] else phase.decides,
        )


def verl(shapes: Shapes) -> Iterator[Row]:
    """Seconds of a step of each mode relative to `sync`'s: 547, 353 and 338 s."""
    shape = shapes["qwen3_30b_a3b"]
    sync = step_time(shape, verl_mode(shape, colocated=True, staleness=0))
    for name, seen, colocated in (("colocate_async", 14.72 / 22.79, True), ("separate_async", 14.10 / 22.79, False)):
        time = step_time(shape, verl_mode(shape, colocated=colocated, staleness=8))
        yield Row(
            source="verl",
            name=f"{name} over sync, 32 H100",
            seen=seen,
            predicted=time.seconds / sync.seconds,
            unit="of sync",
            decides=time.decides,
        )


def verl_mode(shape: ModelShape, *, colocated: bool, staleness: float) -> StepSetup:
    """64 prompts of 8 samples (tokens/s times seconds over the mean length), four updates, TP2 PP2 CP2 EP4, vLLM TP4;
    separate_async has two of the four nodes for each side. One warm-up batch is ahead, 8 versions old at most."""
    card, ranks = device("H100"), 32 if colocated else 16
    parallel = ParallelConfig(tp=2, pp=2, cp=2, ep=4, dp=ranks // 8)
    load = Workload(
        groups=64,
        samples_per_group=8,
        prompt=150.0,
        responses=lengths_with_mean(12_720.0, 32_768.0),
        steps_per_rollout=4,
    )
    layer = LayerSetup(device=card, parallel=parallel, recompute="full")
    train = TrainSetup(layer=layer, pack_tokens=34_816, passes=1, overlap_grads=True, overlap_params=True)
    engine = EngineSetup(device=card, servers=(32 if colocated else 16) // 4, tp=4)
    free = 0.7 * card.memory - 2 * shape.parameters / 4 - 3 * GIB
    engine = replace(engine, cache_tokens=cache_tokens(shape, engine, free))
    publish = PublishSetup(path="ipc" if colocated else "distributed", device=card, ranks=ranks, engine=engine)
    return StepSetup(
        train=train, publish=publish, load=load, gpus=32, colocated=colocated, staleness=staleness, ahead=1.0
    )

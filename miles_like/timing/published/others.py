"""Published figures of prime-rl's trainer, and of verl's modes relative to each other.

prime-rl: benchmarks/results/BENCHMARKS.md of 2026-02-07, its rows on H100 and H200 with FlashAttention-2 or -3, and the
code of the runs (2026-01-15, commit d8f290ef). A step is two micro-batches of one whole sequence a GPU
(benchmarks/scripts/run_single_benchmark.py), with FSDP2 in FP32, also of gradients' sums, and full recomputation. The
row of GLM-4.5-Air at 65,536 tokens keeps activations on the host, which these formulas leave out.
prime-rl has, by file of src/prime_rl/trainer:

- separate kernels in a layer (model.py: a checkpoint around it, then the compiler): the compiler leaves a checkpoint
  whole to PyTorch if it cannot trace what is inside (torch/utils/checkpoint.py), here an adapter's reading of token
  counts (models/layers/lora), or a test of positions in transformers' attention;
- in RL logits in blocks of 2,048 entries, in FP32 (models/layers/lm_head.py, rl/config.py);
- in RL for each position a comparison on the device that the host reads, between forward and backward
  (`get_response_lengths` of utils.py);
- four adapters beside each matrix with LoRA, which change nothing: the runs have no optimizer for them (optim.py);
- in full RL all weights copied to the host by one process (weights.py), a tied head twice. Nothing is written, since no
  run waits for weights (rl/broadcast/filesystem.py). Tokens/s include it (perf.py), the step's own seconds do not.

These seconds are not divided by `REACHED`, which stands for what the formulas of fused kernels leave out: the kernels
of such a layer take their formulas' time (`tests/miles_like/timing/test_separate.py`).

verl: docs/advance/v1_async_trainer.md, its modes relative to `sync`, with Qwen3-30B-A3B for Qwen3.5-35B-A3B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import GIB, device
from miles_like.timing.engine import EngineSetup, cache_tokens
from miles_like.timing.layers import LayerSetup
from miles_like.timing.phase import Phase
from miles_like.timing.publish import PublishSetup
from miles_like.timing.published.models import Row, Shapes
from miles_like.timing.rates.calibration import FLASH_2, ONE_WRITER, READ_BACK
from miles_like.timing.separate import Separate
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

# Rows with FlashAttention-2; GLM-4.5-Air has no norms of queries and keys, and angles for half of their channels.
_FLASH_2 = {("qwen3_4b", "SFT Full")}
_SEPARATE = {"glm45_air": Separate(query_norms=False, rotated=0.5)}


def prime_rl(shapes: Shapes, *, more: bool = False) -> Iterator[Row]:
    """Tokens/s of the trainer. more: the other rows of the page, instead of one or two of each model."""
    for model, name, gpus, kind, length, seen in _MORE if more else MFU:
        phase = _prime_rl_step(shapes[model], model, name, gpus, kind, length)
        yield Row(
            source="prime-rl",
            name=f"{model}, {gpus} {name}, {kind}, {length}",
            seen=1000 * seen,
            predicted=2 * gpus * length / phase.seconds,
            unit="tokens/s",
            decides=phase.decides,
        )


def _prime_rl_step(shape: ModelShape, model: str, name: str, gpus: int, kind: str, length: int) -> Phase:
    lora, learns = "LoRA" in kind, kind.startswith("RL")
    layer = LayerSetup(
        device=device(name),
        parallel=ParallelConfig(dp=gpus),
        recompute="full",
        adapters=lora,
        imbalance=1.0,
        separate=_SEPARATE.get(model, Separate()),
        attention_rate=FLASH_2 if (model, kind) in _FLASH_2 else 1.0,
    )
    setup = TrainSetup(
        layer=layer,
        pack_tokens=length,
        fully_sharded=True,
        trained=0.01 if lora else 1.0,
        head_columns=2048 if learns else None,
    )
    load = Workload(groups=2 * gpus, samples_per_group=1, prompt=0.0, responses=Lengths((float(length),)))
    terms = dict(train_time(shape, setup, load).terms)
    if learns:
        terms["positions read one by one"] = 2 * length * READ_BACK
    if kind == "RL Full":
        terms["copy to the host"] = 2 * (shape.parameters + shape.tied * shape.hidden * shape.vocab) / ONE_WRITER
    return Phase(terms)


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

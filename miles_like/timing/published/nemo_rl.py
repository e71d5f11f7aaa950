"""NeMo-RL's published runs as setups of this model, with the seconds that their steps took.

docs/about/performance-summary.md of v0.6.0, and examples/configs/recipes/llm/performance of that tag: all rows of
DeepSeek-V3, Qwen3-235B-A22B and Qwen3-30B-A3B. Of the same page of v0.5.0 the dense models, which calibrate `REACHED`.

Their prompts have about 108 tokens: tokens/s/GPU times GPUs and seconds, over the samples, is that much above the given
length. Two forward passes precede an update (the policy's log-probabilities and, after a swap, the reference's),
optimizer states go to pageable host memory and back in every step, engines keep their weights on the host while they
sleep, weights go by CUDA IPC where engines are colocated and by a broadcast of one rank otherwise. At most k steps'
samples are outstanding: with k = 1 in rounds (nemo_rl/algorithms/async_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import GIB, Device, device
from miles_like.timing.engine import EngineSetup, cache_tokens
from miles_like.timing.layers import LayerSetup
from miles_like.timing.publish import PublishSetup
from miles_like.timing.published.models import Row, Shapes
from miles_like.timing.rates.calibration import PAGEABLE, REACHED
from miles_like.timing.shape import ModelShape
from miles_like.timing.step import StepSetup, StepTime, step_time
from miles_like.timing.train import TrainSetup
from miles_like.timing.workload import Workload, lengths_with_mean

PROMPT = 108.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One row of NeMo-RL's tables. limit: tokens of prompt and response; engine_gpus: of a separate pool, None where
    engines are colocated; passed: sequences of full length in a micro-batch of a log-prob pass."""

    model: str
    device: str
    gpus: int
    k: int
    mean: float
    engine_tp: int
    layout: tuple[int, int, int, int]  # TP, CP, EP, PP
    seen: float
    limit: int
    samples: tuple[int, int]
    recompute: bool
    ends: tuple[int, int] | None = None  # layers of the first and the last stage
    engine_gpus: int | None = None
    memory: float = 0.6
    passed: int = 1
    updates: int = 1
    fp8: bool = False
    max_running: int = 1024


def _deep(device: str, gpus: int, k: int, mean: float, tp: int, ep: int, seen: float, **more: object) -> Recipe:
    pp, ends = (16, (3, 2)) if device == "H100" else (8, (7, 6))
    at: dict[str, object] = {"device": device, "gpus": gpus, "k": k, "mean": mean, "engine_tp": tp, "seen": seen}
    apart: dict[str, object] = {"engine_gpus": gpus // 2, "memory": 0.8, "passed": 2} if k else {}
    fixed = {"model": "deepseek_v3", "limit": 1536, "samples": (32, 16), "recompute": True}
    return Recipe(**{**at, **fixed, **apart, **more}, layout=(1, 1, ep, pp), ends=ends)  # type: ignore[arg-type]


def _large(device: str, gpus: int, k: int, mean: float, tp: int, seen: float, **more: object) -> Recipe:
    pp, ends = (8, (11, 11)) if device == "H100" else (4, (23, 23))
    at: dict[str, object] = {"device": device, "gpus": gpus, "k": k, "mean": mean, "engine_tp": tp, "seen": seen}
    apart: dict[str, object] = {"engine_gpus": gpus // 2, "memory": 0.8} if k else {}
    fixed = {"model": "qwen3_235b_a22b", "limit": 8192, "samples": (16, 32), "recompute": True, "ends": ends}
    layout = (4, 1, 16, pp) if k else (2, 2, 16, pp)
    return Recipe(**{**at, **fixed, **apart, **more}, layout=layout)  # type: ignore[arg-type]


def _wide(model: str, device: str, gpus: int, k: int, mean: float, tp: int, seen: float, **more: object) -> Recipe:
    at: dict[str, object] = {"device": device, "gpus": gpus, "k": k, "mean": mean, "engine_tp": tp, "seen": seen}
    apart: dict[str, object] = {"engine_gpus": gpus // 2, "memory": 0.8} if k else {}
    fixed = {"model": model, "limit": 4096, "samples": (64, 32), "recompute": False, "passed": 2, "updates": 4}
    return Recipe(**{**at, **fixed, **apart, **more})  # type: ignore[arg-type]


_SMALL = "qwen3_30b_a3b"
RECIPES = (
    _deep("H100", 256, 0, 701, 32, 16, 134.0),
    _deep("H100", 512, 0, 697, 32, 32, 111.0),
    _deep("H100", 512, 1, 710, 32, 16, 64.1),
    _deep("H100", 512, 1, 721, 16, 16, 59.2, fp8=True, max_running=32),
    _deep("GB200", 128, 0, 711, 32, 16, 108.0, memory=0.3),
    _deep("GB200", 256, 0, 700, 32, 32, 98.7, memory=0.3),
    _deep("GB200", 256, 1, 708, 16, 16, 61.7),
    _large("H100", 128, 0, 5698, 16, 395.0),
    _large("H100", 256, 0, 5713, 16, 312.0),
    _large("H100", 256, 1, 5721, 8, 231.0),
    _large("GB200", 64, 0, 5709, 8, 286.0, memory=0.4),
    _large("GB200", 128, 0, 5693, 8, 345.0, memory=0.4),
    _large("GB200", 128, 1, 5705, 8, 278.0),
    _wide(_SMALL, "H100", 32, 0, 3203, 2, 192.0, layout=(1, 1, 8, 1)),
    _wide(_SMALL, "H100", 32, 1, 3201, 2, 152.0, layout=(1, 1, 8, 2)),
    _wide(_SMALL, "H100", 192, 8, 3206, 2, 34.5, layout=(1, 1, 8, 1), engine_gpus=64),
    _wide(_SMALL, "GB200", 16, 0, 3199, 1, 221.0, layout=(1, 1, 16, 1)),
    _wide(_SMALL, "GB200", 16, 1, 3197, 1, 301.0, layout=(1, 1, 8, 1)),
)
DENSE = (  # of v0.5.0
    _wide("llama31_8b", "H100", 16, 0, 1019, 1, 92.8, layout=(1, 1, 1, 2), recompute=True),
    _wide("llama31_8b", "H100", 16, 1, 1123, 1, 64.8, layout=(1, 1, 1, 1), recompute=True),
    _wide("qwen3_32b", "H100", 32, 0, 3251, 4, 376.0, layout=(4, 1, 1, 4), passed=1),
    _wide("qwen3_32b", "H100", 64, 1, 3252, 4, 200.0, layout=(4, 1, 1, 4), passed=1),
    _wide("llama31_8b", "GB200", 8, 0, 1066, 1, 91.0, layout=(1, 1, 1, 1), recompute=True),
    _wide("llama31_8b", "GB200", 8, 1, 1107, 1, 71.1, layout=(1, 1, 1, 1), recompute=True),
    _wide("qwen3_32b", "GB200", 16, 0, 3253, 1, 381.0, layout=(2, 1, 1, 1), passed=1),
    _wide("qwen3_32b", "GB200", 32, 1, 3258, 1, 210.0, layout=(2, 1, 1, 1), passed=1),
)


def recipe_time(shape: ModelShape, recipe: Recipe) -> StepTime:
    """The predicted time of a step of a NeMo-RL recipe."""
    return step_time(shape, recipe_setup(shape, recipe))


def recipe_setup(shape: ModelShape, recipe: Recipe) -> StepSetup:
    card = device(recipe.device)
    tp, cp, ep, pp = recipe.layout
    ranks = recipe.gpus - (recipe.engine_gpus or 0)
    first, last = recipe.ends or (None, None)
    parallel = ParallelConfig(
        tp=tp, cp=cp, ep=ep, pp=pp, dp=ranks // (tp * cp * pp), first_stage_layers=first, last_stage_layers=last
    )
    load = Workload(
        groups=recipe.samples[0],
        samples_per_group=recipe.samples[1],
        prompt=PROMPT,
        responses=lengths_with_mean(recipe.mean, recipe.limit - PROMPT),
        steps_per_rollout=recipe.updates,
    )
    train = TrainSetup(
        layer=LayerSetup(
            device=card, parallel=parallel, recompute="full" if recipe.recompute else "none", fp8=recipe.fp8
        ),
        pack_tokens=recipe.limit,
        pass_tokens=recipe.passed * recipe.limit,
        overlap_grads=True,
        overlap_params=True,
        gradient_bytes=2,
        passes=2,
        swaps=1,
    )
    engine, colocated = _engine(shape, recipe, card), recipe.engine_gpus is None
    bf16 = replace(engine, weight_bytes=2.0, expert_bytes=2.0)  # FP8 engines quantize what they receive
    publish = PublishSetup(path="ipc" if colocated else "distributed", device=card, ranks=ranks, engine=bf16)
    return StepSetup(
        train=train,
        publish=publish,
        sampler=engine,
        load=load,
        gpus=recipe.gpus,
        colocated=colocated,
        staleness=float(recipe.k),
        ahead=recipe.k - 1.0,
        rounds=recipe.k == 1,
        copies=PAGEABLE,
        engine_copies=True,
    )


def _engine(shape: ModelShape, recipe: Recipe, card: Device) -> EngineSetup:
    nbytes = 1.0 if recipe.fp8 else 2.0
    engine = EngineSetup(
        device=card,
        servers=(recipe.engine_gpus or recipe.gpus) // recipe.engine_tp,
        tp=recipe.engine_tp,
        weight_bytes=nbytes,
        expert_bytes=nbytes,
        fp8=recipe.fp8,
        max_running=recipe.max_running,
    )
    free = recipe.memory * card.memory - nbytes * shape.parameters / recipe.engine_tp - 3 * GIB
    return replace(engine, cache_tokens=cache_tokens(shape, engine, free))


def _named(recipe: Recipe) -> str:
    mode = "on-policy" if not recipe.k else f"{recipe.k}-off"
    return f"{recipe.model}, {recipe.gpus} {recipe.device}{', FP8' if recipe.fp8 else ''}, {mode}"


def nemo_rl(shapes: Shapes, recipes: tuple[Recipe, ...] = RECIPES) -> Iterator[Row]:
    """Seconds of a step."""
    for recipe in recipes:
        time = recipe_time(shapes[recipe.model], recipe)
        yield Row(
            source="NeMo-RL v0.6" if recipes is RECIPES else "NeMo-RL v0.5",
            name=_named(recipe),
            seen=recipe.seen,
            predicted=time.seconds,
            unit="s",
            decides=time.decides,
        )


def calibration(shapes: Shapes) -> dict[str, float]:
    """Device -> the REACHED that its dense runs give: the median over them of the predicted seconds before REACHED
    divides them, over the measured seconds without those that it does not divide."""
    found: dict[str, list[float]] = {}
    for recipe in DENSE:
        time, reached = recipe_time(shapes[recipe.model], recipe), REACHED[recipe.device]
        fixed = time.publish.seconds + time.turns.seconds
        found.setdefault(recipe.device, []).append((time.seconds - fixed) * reached / (recipe.seen - fixed))
    return {name: median(values) for name, values in found.items()}

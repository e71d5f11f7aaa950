"""The pipeline against simulated schedules, stages against megatron's, and the trainer against published pre-training.

Not covered: overlap of expert communication with other micro-batches.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.registry import family_of
from miles_like.device_table import device
from miles_like.timing.layers import LayerSetup, layer_time
from miles_like.timing.published.models import published_shapes
from miles_like.timing.rates.calibration import HOST
from miles_like.timing.rates.roofline import product_rate
from miles_like.timing.shape import model_shape
from miles_like.timing.train import (
    TrainSetup,
    parameters_of_rank,
    passes_time,
    sleep_time,
    stage_time,
    stages_of,
    train_time,
)
from miles_like.timing.workload import Lengths, Workload

ROOT = Path(__file__).parents[3]
V3 = model_shape(json.loads((ROOT / "configs/deepseek_v3/config.json").read_text()))
H100 = device("H100")


def one_f_one_b(stages: int, micro: int, forward: float, backward: float) -> float:
    """Seconds of a 1F1B schedule, event by event: a stage's next operation starts when the stage is free and its input
    is there."""
    orders = [
        ["F"] * min(stages - s, micro) + ["B", "F"] * max(0, micro - (stages - s)) + ["B"] * min(stages - s, micro)
        for s in range(stages)
    ]
    return _simulated(orders, [[0] * micro] * stages, stages, 1, micro, forward, backward)


def interleaved(stages: int, chunks: int, micro: int, forward: float, backward: float) -> float:
    """The same of the interleaved schedule of megatron-core's forward_backward_pipelining_with_interleaving: rank s
    warms up with 2 (p - s - 1) + (v - 1) p chunk passes, which take rounds of p micro-batches through each chunk."""
    total, orders, order_of_chunks = chunks * micro, [], []
    for s in range(stages):
        warm = min(total, 2 * (stages - s - 1) + (chunks - 1) * stages)
        orders.append(["F"] * warm + ["F", "B"] * (total - warm) + ["B"] * warm)
        order_of_chunks.append([k % (stages * chunks) // stages for k in range(total)])
    return _simulated(orders, order_of_chunks, stages, chunks, micro, forward / chunks, backward / chunks)


def _simulated(
    orders: list[list[str]],
    chunk_order: list[list[int]],
    stages: int,
    chunks: int,
    micro: int,
    forward: float,
    backward: float,
) -> float:
    done: dict[tuple[str, int, int], float] = {}  # (F or B, virtual stage, micro-batch) -> when
    free, at = [0.0] * stages, [0] * stages
    counts = [{"F": 0, "B": 0} for _ in range(stages)]
    last = stages * chunks - 1
    while any(at[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            kind = orders[s][at[s]]
            k = counts[s][kind]
            chunk = chunk_order[s][k] if kind == "F" else chunks - 1 - chunk_order[s][k]
            virtual = chunk * stages + s
            number = k // (stages * chunks) * stages + k % stages if chunks > 1 else k
            before = (kind, virtual - 1, number) if kind == "F" else (kind, virtual + 1, number)
            if kind == "F" and virtual == 0:
                ready = 0.0
            elif kind == "B" and virtual == last:
                if ("F", last, number) not in done:
                    continue
                ready = done["F", last, number]
            elif before not in done:
                continue
            else:
                ready = done[before]
            free[s] = max(free[s], ready) + (forward if kind == "F" else backward)
            done[kind, virtual, number] = free[s]
            counts[s][kind] += 1
            at[s] += 1
            moved = True
        assert moved, "the schedule waits for itself"
    return max(free)


@pytest.mark.parametrize(("stages", "micro"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 33)])
def test_the_bubble_is_that_of_a_simulated_1f1b_schedule(stages: int, micro: int) -> None:
    assert one_f_one_b(stages, micro, 1.0, 2.0) == pytest.approx((micro + stages - 1) * 3.0)
    assert _bubble_share(stages, 1, micro) == pytest.approx((stages - 1) / micro)


@pytest.mark.parametrize(("stages", "chunks", "micro"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 16)])
def test_the_bubble_is_that_of_a_simulated_interleaved_schedule(stages: int, chunks: int, micro: int) -> None:
    wanted = (micro + (stages - 1) / chunks) * 3.0
    assert interleaved(stages, chunks, micro, 1.0, 2.0) == pytest.approx(wanted)
    assert _bubble_share(stages, chunks, micro) == pytest.approx((stages - 1) / (chunks * micro))


def _bubble_share(stages: int, chunks: int, micro: int) -> float:
    """The bubble that `train_time` predicts over what its micro-batches take."""
    shape = replace(V3, layers=64, moe_layers=frozenset())
    p = ParallelConfig(pp=stages, vpp=chunks if stages > 1 else 1)
    found = train_time(shape, setup(p, pack_tokens=1000), load(micro, 1000)).terms
    micro_batches = sum(found.get(n, 0.0) for n in ("products", "attention", "activations", "host", "head"))
    return found.get("bubble", 0.0) / micro_batches


def setup(p: ParallelConfig, *, pack_tokens: int = 8192, **more: object) -> TrainSetup:
    layer = LayerSetup(device=H100, parallel=p, imbalance=1.0)
    return TrainSetup(layer=layer, pack_tokens=pack_tokens, **more)  # type: ignore[arg-type]


def load(samples: int, tokens: int, *, updates: int = 1) -> Workload:
    return Workload(
        groups=samples,
        samples_per_group=1,
        prompt=0.0,
        responses=Lengths((float(tokens),)),
        steps_per_rollout=updates,
    )


def test_stages_hold_the_layers_that_megatron_gives_them() -> None:
    p = ParallelConfig(tp=8, pp=8, dp=2, ep=16, first_stage_layers=7, last_stage_layers=6)
    stages = stages_of(V3, p)
    assert [(s.dense, s.moe) for s in stages] == [(3, 4), *[(0, 8)] * 6, (0, 6)]
    virtual = stages_of(replace(V3, layers=64, moe_layers=frozenset(range(3, 64))), ParallelConfig(pp=8, vpp=4, dp=8))
    assert [s.dense + s.moe for s in virtual] == [8] * 8
    assert [s.dense for s in virtual] == [2, 1, 0, 0, 0, 0, 0, 0]  # layers 0 and 1, then 2 and 3, on chunk 0


@pytest.mark.parametrize("tp", [1, 8])
def test_the_stages_of_all_ranks_hold_the_model_once(tp: int) -> None:
    """Experts over etp x ep ranks, others over tp ranks; routers and MLA's down projections are whole on each."""
    p = ParallelConfig(tp=tp, pp=8, dp=16 // tp, ep=16, first_stage_layers=7, last_stage_layers=6)
    stages = stages_of(V3, p)
    assert sum(s.experts for s in stages) * p.ep == pytest.approx(V3.routed)
    whole = V3.layers * V3.latent + V3.sparse * V3.router
    assert tp * (sum(s.others for s in stages) - whole) + whole == pytest.approx(V3.others)
    held, owned = parameters_of_rank(V3, setup(p))
    assert owned < held and held * 128 > V3.parameters


def test_the_last_stage_holds_and_computes_the_draft_layer() -> None:
    """Its elements are those of the checkpoint's tensors; on another stage than the first, also the embedding."""
    hf = json.loads((ROOT / "configs/deepseek_v3/config.json").read_text())
    family = family_of(hf)
    elements = family.parameter_count(hf, mtp=True) - family.parameter_count(hf)
    one = ParallelConfig()
    added = stages_of(V3, one, 1)[0].others + stages_of(V3, one, 1)[0].experts - V3.parameters
    assert added == pytest.approx(elements, rel=1e-3)
    p = ParallelConfig(pp=8, dp=16, ep=16, first_stage_layers=7, last_stage_layers=6)
    first, *_, last = zip(stages_of(V3, p), stages_of(V3, p, 1), strict=True)
    assert first[0] == first[1] and last[1].moe == last[0].moe + 1
    assert last[1].others - last[0].others > V3.hidden * V3.vocab
    plain, more = (
        stage_time(V3, replace(setup(one), layer=replace(setup(one).layer, mtp=mtp)), 4096, 4096.0**2) for mtp in (0, 1)
    )
    assert more.forward["head"] == 2 * plain.forward["head"] and more.backward["head"] == 2 * plain.backward["head"]
    layer = layer_time(V3, setup(one).layer, 4096, 4096.0**2, moe=True)
    inputs = more.forward["products"] - plain.forward["products"] - layer.forward["products"]
    assert inputs == pytest.approx(4 * 4096 * V3.hidden**2 / product_rate(H100, fp8=False), rel=0.01)


# Megatron-Bridge, docs/performance-summary-archive.md, 25.11: model, device, GPUs, FP8, samples, of a micro-batch, TP,
# PP, VPP, EP, tokens/s/GPU; pre-training at 4,096 tokens, dense models at 8,192, balanced experts.
PRETRAINING = (
    ("deepseek_v3", "GB200", 256, False, 4096, 1, 1, 4, 4, 64, 3139),
    ("qwen3_235b_a22b", "GB200", 256, False, 8192, 1, 1, 8, 3, 32, 4916),
    ("qwen3_235b_a22b", "H100", 256, True, 2048, 1, 2, 8, 4, 32, 1575),
    ("qwen3_30b_a3b", "GB200", 8, True, 512, 4, 1, 1, 1, 8, 23766),
    ("qwen3_235b_a22b", "B200", 64, True, 1024, 1, 1, 8, 2, 8, 3269),
    ("deepseek_v3", "B200", 256, True, 2048, 1, 1, 16, 1, 8, 2139),
    ("llama31_8b", "H100", 8, True, 128, 1, 1, 1, 1, 1, 14451),
    ("llama31_8b", "GB200", 8, True, 128, 2, 1, 1, 1, 1, 31508),
    ("llama31_8b", "B200", 8, True, 128, 2, 1, 1, 1, 1, 30624),
)


@pytest.mark.parametrize("row", PRETRAINING, ids=lambda r: f"{r[0]}-{r[1]}-{r[2]}")
def test_published_pre_training_is_predicted_within_40_percent(row: tuple[str | int | bool, ...]) -> None:
    """Without REACHED: a tuned pre-training loop is what the formulas describe."""
    model, name, gpus, fp8, samples, packed, tp, pp, vpp, ep, seen = row
    assert isinstance(gpus, int) and isinstance(tp, int) and isinstance(pp, int) and isinstance(vpp, int)
    assert isinstance(packed, int) and isinstance(samples, int) and isinstance(seen, int)
    shape = published_shapes(ROOT / "configs")[str(model)]
    more = -shape.layers % (pp * vpp)  # uneven stages of the recipe, as whole ones
    sparse = frozenset(range(shape.layers + more - shape.sparse, shape.layers + more))
    shape = replace(shape, layers=shape.layers + more, moe_layers=sparse)
    p = ParallelConfig.model_validate({"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "dp": gpus // (tp * pp)})
    length = 8192 if str(model).startswith("llama") else 4096
    layer = LayerSetup(device=device(str(name)), parallel=p, fp8=bool(fp8), imbalance=1.0)
    train = TrainSetup(layer=layer, pack_tokens=packed * length, overlap_grads=True, overlap_params=True)
    work = load(samples, length)
    assert work.tokens / train_time(shape, train, work).seconds / gpus == pytest.approx(seen, rel=0.4)


def test_gradients_and_weights_cross_the_links_once_an_update() -> None:
    p = ParallelConfig(dp=8)
    small = replace(V3, layers=2, moe_layers=frozenset())
    once = train_time(small, setup(p), load(64, 8192)).terms["parameters and gradients"]
    nbytes = (4 + 2) * (small.others)
    assert once == pytest.approx(nbytes * 7 / 8 / (0.8 * H100.intra), rel=0.01)
    twice = train_time(small, setup(p), load(64, 8192, updates=2)).terms["parameters and gradients"]
    assert twice == pytest.approx(2 * once)
    hidden = train_time(small, setup(p, overlap_grads=True, overlap_params=True), load(64, 8192)).terms
    assert hidden.get("parameters and gradients", 0.0) < once
    sharded = train_time(small, setup(p, fully_sharded=True), load(64, 8192)).terms
    # rounded, copied out of the gathered buffer twice, and gradients copied into FP32, in each of 8 micro-batches
    copied = 8 * small.others * (2 * (4 + 6 / 8) + 6 + 12 / 8) / (0.85 * H100.hbm)
    waited = max(0.0, once * 8 * 8 / 6 - _micro(small, p))
    assert sharded["parameters and gradients"] == pytest.approx(waited + copied)


def _micro(shape: object, p: ParallelConfig) -> float:
    """Seconds of the 8 micro-batches of a rank."""
    assert isinstance(shape, type(V3))
    time = stage_time(shape, setup(p), 8192, 8192.0**2)
    return 8 * (sum(time.forward.values()) + sum(time.backward.values()))


def test_an_optimizer_on_the_host_takes_longer_and_sleeps_lighter() -> None:
    p = ParallelConfig(tp=8, pp=8, dp=2, ep=16, first_stage_layers=7, last_stage_layers=6)
    near, far = setup(p), setup(p, offload=1.0)
    host = train_time(V3, far, load(64, 8192)).terms["optimizer on the host"]
    assert host > 5 * train_time(V3, near, load(64, 8192)).terms["optimizer"]
    held, owned = parameters_of_rank(V3, near)
    both_ways = 2 * (2 * held + 12 * owned) / (HOST * H100.host)
    assert sleep_time(V3, near).seconds == pytest.approx(both_ways)
    assert sleep_time(V3, far).seconds == pytest.approx(2 * 2 * held / (HOST * H100.host))


def test_passes_before_training_are_forwards() -> None:
    p = ParallelConfig(tp=2, pp=4, dp=4, ep=8, first_stage_layers=16, last_stage_layers=15)
    micro = stage_time(V3, setup(p), 8192, 8192.0**2)
    none, one = passes_time(V3, setup(p), load(64, 8192)), passes_time(V3, setup(p, passes=1.0), load(64, 8192))
    assert none.seconds == 0.0 and one.seconds == pytest.approx((16 + 3) * sum(micro.forward.values()))
    swapped = passes_time(V3, setup(p, passes=1.0, swaps=1.0), load(64, 8192))
    held, _ = parameters_of_rank(V3, setup(p))
    assert swapped.seconds - one.seconds == pytest.approx(3 * 2 * held / (HOST * H100.host))


def test_the_head_is_computed_for_tokens_with_loss() -> None:
    p = ParallelConfig(dp=8)
    small = replace(V3, layers=1, moe_layers=frozenset())
    whole, half = (train_time(small, setup(p, loss_share=x), load(64, 8192)).terms["head"] for x in (1.0, 0.5))
    assert half == pytest.approx(whole / 2)

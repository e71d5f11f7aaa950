"""Shipped configurations fit their devices, and one that once did not is refused."""

from __future__ import annotations

import pytest

from miles_like.config.load import load_config
from miles_like.planning.memory.allowances import ALLOWANCES
from miles_like.planning.memory.parts import GIB, gib, total
from miles_like.run.assemble import memory_refusal
from tests.support.plans import model_of, path_of, planned, shipped
from tests.support.refusals import check_refusal

SPARE = 0.08


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_configuration_fits_with_room_to_spare(name: str) -> None:
    plan = planned(name)
    assert plan.fits, plan.verdict()
    assert plan.spare >= SPARE, plan.verdict()


def test_deepseek_v3_with_its_optimizer_on_16_nodes_is_refused() -> None:
    """Stage 4's tensors are near the 113.7 GiB of the rank that was built; and what is proposed fits."""
    config = load_config(path_of("deepseek_v3_fp8"), ["kernels.offload_optimizer=0.0"])
    plan = planned("deepseek_v3_fp8", "kernels.offload_optimizer=0.0")
    assert not plan.fits and plan.worst.name in {f"trainer stage {n}" for n in range(1, 7)}
    named = {a.part for a in ALLOWANCES}
    parts = plan.stages[4].phases["training"]
    assert sum(n for part, n in parts.items() if part not in named) / GIB == pytest.approx(113.7, rel=0.02)
    sentence = memory_refusal(config, model_of(config), plan)
    check_refusal(sentence, "kernels.offload_optimizer", 1.0, "moments", "--force")
    assert "GiB while training, but an H100 has 79.6" in sentence


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3_30b_a3b_node", ("kernels.offload_optimizer=0.0",)),
        ("qwen3_30b_a3b_fp8_node", ("kernels.offload_optimizer=0.0",)),
        ("qwen3_30b_a3b_int4_qat_node", ("kernels.offload_optimizer=0.0",)),
        ("glm45_air", ("kernels.offload_optimizer=0.0",)),
        ("kimi_k2_int4_qat", ("kernels.offload_optimizer=0.0",)),
        ("qwen3_0_6b", ("cluster.device=RTX4090",)),
        ("qwen3_4b", ("cluster.gpus_per_node=1", "parallel.tp=1", "parallel.dp=1", "rollout.servers=1")),
    ],
)
def test_what_the_shipped_configurations_avoid_has_too_little_to_spare(name: str, overrides: tuple[str, ...]) -> None:
    assert planned(name, *overrides).spare < SPARE


ONE_GPU = (
    *("cluster.nodes=1", "cluster.gpus_per_node=1", "rollout.servers=1", "rollout.sglang.tp_size=1"),
    *("parallel.tp=1", "parallel.ep=1", "parallel.dp=1", "rollout.sglang.ep_size=1"),
)
ADAPTERS = (
    *("lora.rank=16", "kernels.spec=local", "kernels.grouped_gemm=false", "kernels.rope_fusion=false"),
    *("kernels.permute_fusion=false", "kernels.dispatcher=alltoall", "kernels.offload_optimizer=0.0"),
)


def test_qwen3_30b_fits_no_gpu_of_80_gb() -> None:
    """The figures of docs/plan.md."""
    on_80, on_141 = (
        planned("qwen3_30b_a3b_node", *ONE_GPU, *ADAPTERS, f"cluster.device={d}") for d in ("H100", "H200")
    )
    assert (on_80.fits, on_80.worst.worst, gib(on_80.worst.peak)) == (False, "publishing", "119.3")
    assert f"{on_141.spare:.0%}" == "15%"
    unrounded = ("precision.qat=false", "precision.allow_without_qat=true")
    int4 = planned("qwen3_30b_a3b_int4_qat_node", *ONE_GPU, *ADAPTERS, *unrounded)
    sums = {phase: gib(total(parts)) for phase, parts in int4.worst.phases.items()}
    assert not int4.fits and (sums["publishing"], sums["training"]) == ("80.5", "84.3")
    whole = planned("qwen3_30b_a3b_node", *ONE_GPU, "kernels.offload_optimizer=1.0", "kernels.dispatcher=alltoall")
    assert gib(whole.worst.phases["training"]["gradients"]) == "113.7"

"""Configurations proposed in place of one that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.device_table import device
from miles_like.planning.memory.parts import GIB
from miles_like.planning.nearby import Alternative, Model, changed, nearest, stage_ends
from miles_like.planning.plan import Plan
from miles_like.run.assemble import memory_plan
from tests.support.plans import model_of, path_of
from tests.support.refusals import refuses


def _found(name: str, *overrides: str) -> tuple[RunConfig, Plan, list[Alternative]]:
    config = load_config(path_of(name), overrides)
    model = model_of(config)

    def plan_of(other: RunConfig) -> Plan:
        return memory_plan(other, model_of(other))

    plan = plan_of(config)
    limits = Model(model.family.num_layers(model.hf), model.family.num_experts(model.hf))
    return config, plan, nearest(config, plan, limits, plan_of)


CASES = {
    "optimizer": ("qwen3_30b_a3b_fp8_node", "kernels.offload_optimizer=0.0"),
    "cache": ("qwen3_4b", "rollout.sglang.mem_fraction_static=0.95"),
    "no cache": ("qwen3_30b_a3b", "rollout.sglang.mem_fraction_static=0.3"),
    "activations": ("qwen3_4b", 'train.recompute="none"', "train.max_tokens_per_rank=65536"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_proposed_fits_on_the_same_gpus(case: str) -> None:
    config, plan, found = _found(*CASES[case])
    assert not plan.fits and found
    for alternative in found:
        other = changed(config, alternative.change)
        assert other.cluster == config.cluster
        assert other.parallel.world_size == config.parallel.world_size
        assert memory_plan(other, model_of(other)).fits
        assert f"{alternative.plan.spare:.0%} to spare" in alternative.described()
        rest = {key.split(".")[0] for key in alternative.change}
        assert rest <= {"kernels", "parallel", "rollout", "train"}


@pytest.mark.slow
def test_the_smallest_change_comes_first() -> None:
    _, _, found = _found(*CASES["optimizer"])
    assert dict(found[0].change) == {"kernels.offload_optimizer": 1.0}
    _, _, found = _found(*CASES["cache"])
    assert dict(found[0].change).keys() == {"rollout.sglang.mem_fraction_static"}


def test_an_optimizer_returns_to_the_devices_where_hosts_are_short() -> None:
    """Nodes of 350 GiB, whose GPUs have room: what is proposed first keeps as much on the host as fits."""
    config = load_config(path_of("qwen3_30b_a3b"), ["kernels.offload_optimizer=1.0"])
    model, small = model_of(config), replace(device("H100"), node_memory=350 * GIB)

    def plan_of(other: RunConfig) -> Plan:
        return memory_plan(other, model_of(other), on=small)

    plan = plan_of(config)
    assert plan.host.total > plan.host.memory and plan.worst.peak < plan.device.memory
    limits = Model(model.family.num_layers(model.hf), model.family.num_experts(model.hf))
    found = nearest(config, plan, limits, plan_of)
    assert [dict(one.change) for one in found[:2]] == [{"kernels.offload_optimizer": share} for share in (0.25, 0.0)]
    assert all(one.plan.host.total <= 350 * GIB for one in found)
    assert not plan_of(changed(config, {"kernels.offload_optimizer": 0.5})).fits


def test_a_change_that_the_configuration_refuses_is_an_error() -> None:
    config = load_config(path_of("qwen3_4b"))
    assert changed(config, {"parallel.tp": 4, "parallel.dp": 2}).parallel.tp == 4
    assert changed(config, {"train.recompute_modules": None}) == config
    with refuses(ValueError, "optimizer.lr"):
        changed(config, {"optimizer.lr": -1.0})


@pytest.mark.parametrize(("layers", "stages"), [(61, 8), (61, 2), (46, 4), (48, 8), (27, 2), (61, 16)])
def test_stages_between_the_ends_have_equal_layers(layers: int, stages: int) -> None:
    first, last = stage_ends(layers, stages)
    if first is None or last is None:
        assert layers % stages == 0
        return
    assert first >= 1 and last >= 1
    if stages > 2:
        assert (layers - first - last) % (stages - 2) == 0
    else:
        assert first + last == layers

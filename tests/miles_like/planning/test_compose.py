"""Which processes share a GPU, what they hold together, and what a step is planned with."""

from __future__ import annotations

import pytest

from miles_like.config.load import load_config
from miles_like.planning.compose import step_shape
from miles_like.planning.memory.parts import PHASES, total
from miles_like.planning.plan import Plan
from miles_like.planning.table import lines_of, plan_json
from tests.support.plans import path_of, planned

SPLIT = ("cluster.colocate=false", "cluster.nodes=32")


def _sums(plan: Plan, row: int = 0) -> dict[str, int]:
    return {phase: total(parts) for phase, parts in plan.stages[row].phases.items()}


def test_turns_share_a_gpu_and_split_pools_do_not() -> None:
    turns, split = planned("deepseek_v3_fp8"), planned("deepseek_v3_fp8", *SPLIT)
    assert [row.shared_with for row in turns.stages] == [("rollout",)] * 8
    assert [row.role for row in split.stages] == ["trainer"] * 8 + ["rollout"]
    assert sum(row.gpus for row in turns.stages) == 128 and sum(row.gpus for row in split.stages) == 256
    assert set(turns.stages[0].phases) == set(PHASES)
    assert set(split.stages[0].phases) == {"building", "training", "publishing"}
    assert set(split.stages[-1].phases) == {"publishing", "generating"}


def test_a_server_sleeps_while_the_trainer_computes_and_the_reverse() -> None:
    turns, split = planned("deepseek_v3_fp8"), planned("deepseek_v3_fp8", *SPLIT)
    trainer, server = _sums(split, 4), _sums(split, 8)
    both = _sums(turns, 4)
    engine = turns.engine
    assert engine is not None
    assert both["training"] == trainer["training"] + total(engine.asleep())
    asleep = both["generating"] - server["generating"]
    assert 0 < asleep < 5 << 30  # the trainer's context, buffers and what a step leaves
    parts = turns.stages[4].phases["publishing"]
    assert parts["engine weights"] == engine.weights and "KV cache" not in parts and "gradients" not in parts


def test_a_critic_shares_the_trainers_gpus_or_has_its_own() -> None:
    ppo = ["algorithm.name=ppo", "critic.lr=1e-5"]
    plain, beside = planned("qwen3_4b"), planned("qwen3_4b", *ppo)
    [row] = beside.stages
    assert row.shared_with == ("critic", "rollout")
    more = row.phases["training"]["moments"] / plain.stages[0].phases["training"]["moments"]
    assert more == pytest.approx(2.0, rel=0.1)


def test_lora_trains_little() -> None:
    lora = ("lora.rank=16", "lora.targets=['attention']", "kernels.spec=local", "kernels.rope_fusion=false")
    full, adapted = (
        planned("qwen3_4b").stages[0].phases["training"],
        planned("qwen3_4b", *lora).stages[0].phases["training"],
    )
    assert adapted["parameters"] == pytest.approx(full["parameters"], rel=0.02)
    for part in ("gradients", "masters", "moments"):
        assert adapted[part] < 0.02 * full[part]


def test_draft_layers_are_planned_where_they_are_trained() -> None:
    plain, mtp = planned("deepseek_v3_fp8"), planned("deepseek_v3_fp8", "train.mtp_coefficient=0.1")
    assert [row.parameters for row in plain.stages[:-1]] == [row.parameters for row in mtp.stages[:-1]]
    assert mtp.stages[-1].parameters > 1.1 * plain.stages[-1].parameters


def test_a_step_is_as_long_as_its_samples_may_be() -> None:
    """1,024 samples of at most 10,240 tokens: a pack of 16,384 has one; DP2 halves them."""
    step = step_shape(load_config(path_of("deepseek_v3_fp8")))
    assert (step.tokens, step.micro_batches, step.longest) == (16384, 512, 10240)
    short = step_shape(load_config(path_of("deepseek_v3_fp8"), ["rollout.max_new_tokens=2048", "parallel.vpp=1"]))
    assert short.micro_batches == 128
    several = step_shape(load_config(path_of("deepseek_v3_fp8"), ["train.steps_per_rollout=4"]))
    assert several.micro_batches == 128


def test_ranks_without_gpus_are_planned_and_never_refused() -> None:
    plan = planned("tiny")
    assert not plan.on_gpus and plan.engine is None and plan.fits and not plan.problems()
    assert plan.host.parts["ranks"] > 0
    assert "CPU ranks" in plan.verdict()


def test_a_larger_device_has_more_to_spare() -> None:
    spare = {name: planned("qwen3_4b", f"cluster.device={name}").spare for name in ("H100", "H200", "B200")}
    assert spare["H100"] < spare["H200"] and spare["H100"] < spare["B200"]


VLLM = ("rollout.engine=vllm", "rollout.vllm.tensor_parallel_size=2", "rollout.servers=4", "cluster.colocate=false")


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("tiny", (), "rollout servers (1 x embedded, on the host)"),
        (
            "tiny_bf16",
            ("rollout.embedded.tp_size=2", "rollout.embedded.ep_size=2"),
            "rollout servers (1 x embedded of 2 ranks each, on the host)",
        ),
        (
            "qwen3_4b",
            (*VLLM, "cluster.nodes=2", "publish.path=disk", "replay.mode=off"),
            "rollout servers (4 x vllm of 2 GPUs each, on GPUs)",
        ),
        ("opd_deepseek_v3", (), "servers of teachers (1)"),
    ],
)
def test_servers_that_are_not_planned_are_named(name: str, overrides: tuple[str, ...], sentence: str) -> None:
    """A plan that says of a run that it fits would otherwise be taken for one of all of its processes."""
    plan = planned(name, *overrides)
    assert plan.not_planned == (sentence,) and f"not planned: memory of {sentence}" in lines_of(plan)
    assert plan_json(plan)["not_planned"] == [sentence]
    assert plan.verdict().endswith(f"; not planned: {sentence}") == plan.on_gpus


def test_servers_of_stock_sglang_are_planned() -> None:
    plan = planned("qwen3_4b")
    assert not plan.not_planned and "not planned" not in "".join([plan.verdict(), *lines_of(plan)])

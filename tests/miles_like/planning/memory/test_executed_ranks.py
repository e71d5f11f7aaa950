"""The arithmetic against ranks that were executed: the trainer's own code on fake tensors (docs/plan/executed.json)."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_bridge.fake.records import ExecutedRank, read_records
from megatron_bridge.fake.stages import distinct_stages
from miles_like.config.load import load_config
from miles_like.config.ranks import trainer_config
from miles_like.planning.memory import state
from miles_like.planning.memory.parts import total
from miles_like.planning.memory.ranks import RankPlans
from miles_like.planning.memory.weights import Held
from tests.support import random_layouts
from tests.support.executed_plans import BOUND, deviations, step_of
from tests.support.plans import model_of, path_of, planned, shipped, trainer_ranks

DOCS = Path(__file__).parents[4] / "docs" / "plan"
RECORDS = read_records(DOCS / "executed.json")

LAYOUT = ("config", "overrides", "stage", "imbalance")
MIDDLE = 1  # a stage of DeepSeek-V3 that stands for those between the first and the last


def _name(record: ExecutedRank) -> str:
    return " ".join([record["config"], f"rank {record['rank']}", *(o.split(".", 1)[1] for o in record["overrides"])])


def _plans(record: ExecutedRank) -> RankPlans:
    return copy.copy(_made(record["config"], *record["overrides"], step=step_of(record), imbalance=record["imbalance"]))


_made = functools.cache(trainer_ranks)


@pytest.mark.parametrize("record", RECORDS, ids=_name)
def test_parts_and_peaks_are_those_of_the_executed_rank(record: ExecutedRank) -> None:
    assert deviations(record, _plans(record)) == []


@pytest.mark.parametrize("record", RECORDS, ids=_name)
def test_the_host_holds_what_the_executed_rank_did(record: ExecutedRank) -> None:
    """Copies while the rank sleeps, and an optimizer on the host."""
    from miles_like.planning.memory.host import PROCESS, rank_host

    plans, stage = _plans(record), record["stage"]
    found = rank_host(
        plans.stages[stage], plans.states[stage], plans.config, sleeps=plans.sleeps, copies=0, saves_aside=False
    )
    executed = max(sum(parts.values()) for phase, parts in record["host"].items() if phase != "building")
    assert sum(found.values()) - PROCESS == pytest.approx(executed, rel=BOUND, abs=1 << 28)


def test_every_kind_of_stage_of_the_shipped_configurations_was_executed() -> None:
    whole = {(r["config"], r["stage"]) for r in RECORDS if not r["overrides"]}
    for name in shipped():
        plans = trainer_ranks(name)
        kinds = {stage.number for stage in distinct_stages(plans.config, model_of(load_config(path_of(name))).hf)}
        assert {stage for config, stage in whole if config == name} == kinds, name


def test_forty_random_layouts_were_executed() -> None:
    """Those that the generator draws, whose ranks differ in every dimension of a layout."""
    drawn = json.loads((DOCS / "random_layouts.json").read_text(encoding="utf-8"))
    assert len(drawn) == random_layouts.COUNT and drawn == list(random_layouts.drawn(random_layouts.SEED, len(drawn)))
    executed = [tuple(r[key] for key in LAYOUT) for r in RECORDS]  # type: ignore[literal-required]
    assert all(tuple(layout[key] for key in LAYOUT) in executed for layout in drawn)
    assert {layout["imbalance"] for layout in drawn} == set(random_layouts.IMBALANCES)
    layouts = [trainer_config(load_config(path_of(at["config"]), at["overrides"]), Path()).parallel for at in drawn]
    for size in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"):
        assert {getattr(layout, size) > 1 for layout in layouts} == {False, True}, size


# planted errors


@pytest.fixture(scope="module")
def deepseek() -> ExecutedRank:
    """A middle stage of DeepSeek-V3."""
    return next(r for r in RECORDS if r["config"] == "deepseek_v3_fp8" and r["stage"] == MIDDLE)


def test_a_forgotten_optimizer_copy_is_seen() -> None:
    """Without moments the executed ranks differ, and a layout that cannot run would be taken."""
    name, overrides = "qwen3_30b_a3b_fp8_node", ("kernels.offload_optimizer=0.0",)
    right = planned(name, *overrides)
    with patch.object(state, "_MOMENTS", 0), patch.object(state, "_FP32", 4):
        wrong = planned(name, *overrides)
        record = next(r for r in RECORDS if r["config"] == "qwen3_30b_a3b_node" and not r["overrides"])
        found = trainer_ranks(record["config"], step=step_of(record))
        assert any(line.startswith("moments:") for line in deviations(record, found))
    assert wrong.worst.peak < right.worst.peak
    assert (right.fits, wrong.fits) == (False, True)


def test_an_expert_that_is_not_sharded_is_seen(deepseek: ExecutedRank) -> None:
    """Experts held whole on every expert-parallel rank: no configuration of them would fit."""
    plans = _plans(deepseek)
    ep = plans.config.parallel.ep

    def whole(held: Held) -> Held:
        return replace(held, count=held.count * ep) if held.kind == "expert" else held

    stage = plans.stages[MIDDLE]
    modules = tuple(tuple(map(whole, chunk)) for chunk in stage.modules)
    wrong = state.rank_state(replace(stage, modules=modules), plans.config)
    assert total(wrong.device) > 10 * total(plans.states[MIDDLE].device)
    plans.states = (*plans.states[:MIDDLE], wrong, *plans.states[MIDDLE + 1 :])
    found = deviations(deepseek, plans)
    assert any(line.startswith("parameters:") for line in found) and any("gradients" in line for line in found)

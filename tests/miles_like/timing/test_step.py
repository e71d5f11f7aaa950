"""A step is the sum of its phases, or less where they overlap, and names what it waits for.

Not covered: phases that slow each other down.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.plan.flops import train_flops
from miles_like.device_table import device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.layers import LayerSetup
from miles_like.timing.phase import NOTHING, Phase, together
from miles_like.timing.publish import PublishSetup
from miles_like.timing.rates.calibration import HOST, REACHED
from miles_like.timing.rollout import rollout_time
from miles_like.timing.shape import model_shape
from miles_like.timing.step import RewardSetup, StepSetup, overlap_of, step_time
from miles_like.timing.train import TrainSetup, train_time
from miles_like.timing.workload import Lengths, Workload

ROOT = Path(__file__).parents[3]
HF = json.loads((ROOT / "configs/qwen3_30b_a3b/config.json").read_text())
SMALL = model_shape(HF)
H100 = device("H100")


def setup(**more: object) -> StepSetup:
    layer = LayerSetup(device=H100, parallel=ParallelConfig(dp=16, ep=8))
    engine = EngineSetup(device=H100, servers=8, tp=2)
    base: dict[str, object] = {
        "train": TrainSetup(layer=layer, pack_tokens=8192, passes=1.0),
        "publish": PublishSetup(path="ipc", device=H100, ranks=16, engine=engine),
        "load": Workload(groups=32, samples_per_group=8, prompt=100.0, responses=Lengths((500.0, 1000.0, 4000.0))),
        "gpus": 16,
        "colocated": True,
    }
    return StepSetup(**(base | more))  # type: ignore[arg-type]


def test_a_synchronous_step_is_the_sum_of_its_phases() -> None:
    time = step_time(SMALL, setup(reward=RewardSetup(seconds=2.0, at_once=64)))
    assert time.overlap == "none" and time.seconds == pytest.approx(sum(p.seconds for p in time.phases.values()))
    assert all(p.seconds > 0 for p in time.phases.values())
    assert time.tokens_per_s_per_gpu == pytest.approx(time.tokens / time.seconds / 16)


def test_programs_reach_a_share_of_the_predicted_rate() -> None:
    time, one = step_time(SMALL, setup()), setup()
    share = REACHED["H100"]
    assert time.train.seconds == pytest.approx(train_time(SMALL, one.train, one.load).seconds / share)
    assert time.rollout.seconds == pytest.approx(rollout_time(SMALL, one.publish.engine, one.load).seconds / share)


def test_separate_pools_take_the_longer_side_and_the_publication() -> None:
    time = step_time(SMALL, setup(colocated=False, staleness=4.0))
    assert time.overlap == "beside" and time.turns is NOTHING
    longer = max(time.rollout.seconds, time.passes.seconds + time.train.seconds)
    assert time.seconds == pytest.approx(longer + time.publish.seconds)
    assert step_time(SMALL, setup(colocated=False)).overlap == "none"


def test_servers_that_load_beside_the_next_step_delay_sampling_and_not_training() -> None:
    disk = replace(setup().publish, path="disk")
    waits = setup(colocated=False, staleness=1.0, publish=disk)
    for passes in (0.01, 100.0):  # sampling, or training, takes longer
        one = replace(waits, train=replace(waits.train, passes=passes))
        time, beside = step_time(SMALL, one), step_time(SMALL, replace(one, loads_beside=True))
        load = time.publish.terms["reading"]
        longer = max(time.sampling + load, time.training + time.publish.seconds - load)
        assert beside.seconds == pytest.approx(longer) and beside.seconds < time.seconds
        assert beside.decides.split(":")[0] in (("passes", "train") if passes > 1 else ("rollout", "publish"))


def test_turns_with_partial_rollouts_wait_for_no_tail() -> None:
    sync, partial = step_time(SMALL, setup()), step_time(SMALL, setup(staleness=4.0))
    assert overlap_of(setup(staleness=4.0)) == "partial" and partial.rollout.seconds < sync.rollout.seconds
    assert partial.seconds < sync.seconds and partial.turns == sync.turns
    rounds = step_time(SMALL, setup(staleness=4.0, rounds=True))
    assert rounds.rollout.seconds == pytest.approx(sync.rollout.seconds)


def test_turns_move_the_trainer_s_state_both_ways() -> None:
    slow = step_time(SMALL, setup(copies=4e9)).turns.seconds
    assert slow == pytest.approx(step_time(SMALL, setup()).turns.seconds * HOST * H100.host / 4e9)
    assert step_time(SMALL, setup(engine_copies=True)).turns.seconds > step_time(SMALL, setup()).turns.seconds
    assert step_time(SMALL, setup(colocated=False)).turns.seconds == 0


def test_scores_are_waited_for_where_they_take_longer_than_sampling() -> None:
    quick = step_time(SMALL, setup(reward=RewardSetup(seconds=1.0, at_once=64)))
    assert quick.reward.seconds == 1.0  # the last one's
    slow = step_time(SMALL, setup(reward=RewardSetup(seconds=1000.0, at_once=64)))
    assert slow.reward.seconds == pytest.approx(256 * 1000 / 64 - slow.rollout.seconds)
    assert step_time(SMALL, setup()).reward is NOTHING


def test_the_deciding_phase_and_term_are_named() -> None:
    assert step_time(SMALL, setup()).decides.startswith("rollout: ")
    trained = setup(colocated=False, staleness=4.0, load=replace(setup().load, samples_per_group=512))
    one = step_time(SMALL, replace(trained, train=replace(trained.train, passes=8.0)))
    assert one.decides.split(":")[0] in ("passes", "train")
    published = setup()
    published = replace(published, publish=replace(published.publish, path="tensor"))
    assert step_time(SMALL, published).decides == "publish: encoding"


def test_utilization_counts_the_model_s_flops() -> None:
    one = setup()
    time = step_time(SMALL, one)
    lengths = [100 + n for n in (500, 1000, 4000)]
    flops = train_flops(HF, lengths) * 256 / 3 / 16
    assert time.train_mfu == pytest.approx(flops / time.train.seconds / H100.bf16, rel=0.001)
    assert 0.02 < time.train_mfu < 0.5


def test_phases_add_up_term_by_term() -> None:
    both = together([Phase({"a": 1.0, "b": 2.0}), Phase({"b": 3.0})])
    assert both.terms == {"a": 1.0, "b": 5.0} and both.decides == "b" and both.times(2).seconds == 12
    assert NOTHING.decides == "nothing" and NOTHING.seconds == 0

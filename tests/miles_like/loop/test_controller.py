"""The loop under fakes: order of events, staleness, and what happens when a part dies.

Not covered here: real trainers and servers (tests/e2e).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from miles_like.batch.packer import Packer
from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.ledger_audit import audit
from miles_like.experience.experience import Experience
from miles_like.loop.feed import NO_MORE
from miles_like.loop.recorder import Recorder
from miles_like.report.progress import PhaseBar
from miles_like.stopping import Stopped
from miles_like.types import Prompt, PublishReport, SampleGroup, TrainBatch
from tests.support.loop_world import World, group
from tests.support.refusals import Facts, refuses


def test_the_synchronous_loop_samples_from_the_weights_it_just_published() -> None:
    """With max_staleness = 0 nothing is off-policy: rollout s uses version s, after train s-1."""
    world = World(rollout_s=0.001, train_s=0.001)
    world.run(3, save_every=2)
    assert world.log == [
        "eval 0",
        *("rollout 0 with 0", "train 0"),
        *("rollout 1 with 1", "train 1", "save 2"),
        *("rollout 2 with 2", "train 2", "eval 3", "saved 2", "save 3", "saved 3"),
    ]
    assert set(world.staleness) == {0}
    assert [step for step, _ in world.rows] == [0, 1, 2, 3]
    assert [m["weight_version"] for _, m in world.rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("k", [1, 3])
def test_staleness_reaches_its_bound_and_never_exceeds_it(k: int) -> None:
    """A permit is held from "prompt taken" to "trained and published", so at most k versions can pass in between."""
    world = World(rollout_s=0.0, train_s=0.002)
    world.run(8, max_staleness=k)
    assert max(world.staleness) == k
    assert world.trained == [str(i) for i in range(16)]  # the oldest admitted first, none lost, none twice


def test_training_goes_on_while_a_checkpoint_is_written_and_the_run_ends_when_the_last_one_is() -> None:
    """A save is asked after once a step, and waited for only at the end."""
    world = World()
    world.run(5, save_every=2)
    about = [event for event in world.log if event.startswith(("train", "save"))]
    assert about == [
        *("train 0", "train 1", "save 2", "train 2", "saved 2"),
        *("train 3", "save 4", "train 4", "saved 4", "save 5", "saved 5"),
    ]


def test_models_that_sleep_after_a_publication_are_saved_before_it() -> None:
    """In a step that a boundary saves: `models 2 under 1` comes before version 2 is published. After the last step, and
    after a stop request that comes later, no publication follows, so nothing is saved twice."""
    world = World()
    world.run(5, save_every=2, models_first=True)
    about = [event for event in world.log if event.startswith(("train", "models", "save"))]
    assert about == [
        *("train 0", "train 1", "models 2 under 1", "save 2", "train 2", "saved 2"),
        *("train 3", "models 4 under 3", "save 4", "train 4", "saved 4", "save 5", "saved 5"),
    ]
    world = World(stop_at=3)
    with refuses(Stopped, 3, "--resume"):
        world.run(9, save_every=2, models_first=True)
    assert world.log[-3:] == ["rollout 3 with 3", "save 3", "saved 3"]


def test_a_resumed_loop_begins_at_its_step() -> None:
    world = World()
    world.run(5, first=3)
    assert [step for step, _ in world.rows] == [4, 5], "the row of step 3 was written before"
    assert world.log == ["rollout 0 with 3", "train 3", "rollout 1 with 4", "train 4", "eval 5", "save 5", "saved 5"]


def kept(samples: Path) -> dict[str, list[dict[str, Any]]]:
    return {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in sorted(samples.iterdir())}


def test_a_step_that_is_judged_too_bad_leaves_its_samples_and_no_weights(tmp_path: Path) -> None:
    """The samples show a user the cause; the weights of such a step are not served."""

    def judge(step: int, metrics: Mapping[str, float]) -> None:
        assert metrics == {"train/loss": 1.0}
        if step == 3:
            raise RuntimeError("step 3: too bad")

    world = World()
    with refuses(RuntimeError, 3):
        world.run(5, bounds=cast(Any, SimpleNamespace(check=judge)), samples=tmp_path)
    assert {name: len(rows) for name, rows in kept(tmp_path).items()} == {"step_1": 2, "step_2": 2, "step_3": 2}
    assert world.version == 2 and [step for step, _ in world.rows] == [0, 1, 2]


def test_samples_are_kept_as_they_were_sampled(tmp_path: Path) -> None:
    """A mask that training applies is not kept with them: readers and `verify` need every sampled token."""

    class Masked(Experience):
        async def score(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
            none = [replace(g.samples[0], loss_mask=torch.zeros(2, dtype=torch.bool)) for g in groups]
            return [replace(g, samples=(s,)) for g, s in zip(groups, none, strict=True)]

        async def learn(self, groups: Sequence[SampleGroup]) -> dict[str, float]:
            assert not any(s.loss_mask.any() for g in groups for s in g.samples)
            return {}

    world = World()
    world.run(1, experience=Masked, samples=tmp_path)
    assert [row["loss_mask"] for row in kept(tmp_path)["step_1"]] == [[0, 1], [0, 1]]


def test_asked_to_stop_while_it_waits_the_loop_saves_the_last_boundary() -> None:
    """The loop does not wait for the rollout; the weights have not moved since."""
    world = World(stop_at=3)
    with refuses(Stopped, 3, "--resume"):
        world.run(9, save_every=2)
    assert world.log[-3:] == ["rollout 3 with 3", "save 3", "saved 3"]
    assert [step for step, _ in world.rows] == [0, 1, 2, 3]


def test_asked_to_stop_while_a_checkpoint_is_written_the_loop_waits_for_it() -> None:
    """It is the one that the sentence names."""
    world = World(stop_at=2)
    with refuses(Stopped, 2, "--resume"):
        world.run(9, save_every=2)
    assert world.log[-3:] == ["save 2", "rollout 2 with 2", "saved 2"]


def test_asked_to_stop_in_a_step_the_loop_ends_it_and_saves() -> None:
    world = World()

    def judge(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            world.stop.ask("enough", 9)

    with refuses(Stopped, 2, "--resume") as stopped:
        world.run(9, bounds=cast(Any, SimpleNamespace(check=judge)))
    assert stopped.value.status == 9 and world.log[-3:] == ["train 1", "save 2", "saved 2"]


def test_asked_to_stop_before_anything_is_done_nothing_is_saved() -> None:
    world = World(stop_at=0)
    with refuses(Stopped, "enough"):
        world.run(9, save_every=1)
    assert not [e for e in world.log if e.startswith("save")]


@pytest.mark.parametrize("k", [0, 1])
def test_a_run_whose_prompts_end_ends_with_its_last_whole_step(k: int, tmp_path: Path) -> None:
    """It is evaluated and saved, and what is left over is discarded with that reason, in a ledger that is sound."""
    world = World(prompts=5)
    world.run(9, max_staleness=k, producer={"lockstep": True}, ledger=tmp_path / "ledger.jsonl")
    found = audit(tmp_path / "ledger.jsonl")
    assert found.wrong is None and found.reasons == {NO_MORE: 1}
    World(prompts=4).run(9, max_staleness=k, producer={"lockstep": True}, ledger=tmp_path / "none_left.jsonl")
    assert audit(tmp_path / "none_left.jsonl").wrong is None
    assert [step for step, _ in world.rows] == [0, 1, 2, 2] and world.trained == ["0", "1", "2", "3"]
    # saved first: a run resumed from there comes to the same end
    assert world.log[-3:] == ["save 2", "saved 2", "eval 2"] and "eval/x/avg@1" in world.rows[-1][1]
    assert world.ledger.metrics() == {
        "ledger/issued": 5.0,
        "ledger/trained": 4.0,
        "ledger/discarded": 1.0,
        "ledger/in_flight": 0.0,
    }


@pytest.mark.parametrize("k", [1, 2])
def test_in_lockstep_versions_follow_from_the_order_of_admission(k: int) -> None:
    """With a slow rollout and with a slow trainer. Everything sampled under old weights ends before new ones come."""
    logs = []
    for slow in ({"rollout_s": 0.003}, {"train_s": 0.003}):
        world = World(**slow)
        world.run(6, max_staleness=k, producer={"lockstep": True})
        assert [f"rollout {s} with {max(0, s - k)}" for s in range(6)] == [
            e for e in world.log if e.startswith("rollout") and int(e.split()[1]) < 6
        ]
        assert world.staleness == [min(s, k) for s in range(6) for _ in range(2)]
        logs.append(world.rows)
    drop = ("perf/", "wall_s")
    plain = [[(s, {n: v for n, v in m.items() if not n.startswith(drop)}) for s, m in rows] for rows in logs]
    assert plain[0] == plain[1]


def test_the_clock_of_a_resumed_run_goes_on_where_it_was_saved() -> None:
    """Otherwise each process reports the time of its steps only."""
    world = World()
    made: Any = {"sink": cast(Any, world), "ledger": Ledger(None), "progress": PhaseBar(4, Console(quiet=True))}
    recorder = Recorder(**made, earlier_s=1000.0)
    recorder.start()
    recorder.write_end(3, {})
    assert 1000.0 <= world.rows[-1][1]["wall_s"] < 1100.0


def test_a_rollout_reports_its_groups_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[tuple[int, int]]()
    monkeypatch.setattr("miles_like.loop.feed.SHOWN_EVERY_S", 0.001)
    monkeypatch.setattr(PhaseBar, "groups", lambda self, complete, needed: shown.append((complete, needed)))
    World(rollout_s=0.05).run(1)
    assert len(shown) > 5 and {needed for _, needed in shown} == {2}


def test_what_a_full_step_gave_up_is_aborted_before_anybody_is_examined() -> None:
    """To abort is to abort all that a server has: it would cut answers of an evaluation that has begun."""
    world = World()
    world.run(2, eval_every=1, producer={"over_sampling": 0.5})
    seen = [e.split()[0] for e in world.log if e.startswith(("eval", "aborted"))]
    assert seen == ["eval", *("aborted", "eval") * 2]


def test_a_rollout_that_dies_ends_the_run_with_its_own_sentence() -> None:
    """Not a hang: the loop waits for groups and for the producer's death alike."""
    world = World(fail_at=2)
    with refuses(RuntimeError, "http://x"):
        world.run(5)
    assert world.version == 2


class Unusable(World):
    """Real packing, of samples that cannot be trained."""

    def __init__(self, *, empty: bool, max_tokens: int, advantage: float) -> None:
        super().__init__()
        self.empty, self.max_tokens, self.advantage = empty, max_tokens, advantage

    async def groups(self, wave: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        for i, p in enumerate(prompts):
            yield i, group(p, self.version, empty=self.empty)

    async def abort(self) -> None:
        await asyncio.sleep(0.01)
        self.log.append("aborted")

    def advantages(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        return [[self.advantage for _ in g.samples] for g in groups]

    def pack(self, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]]) -> Sequence[TrainBatch]:
        return Packer(dp_size=1, max_tokens=self.max_tokens).steps(groups, advantages)


@pytest.mark.parametrize(
    ("case", "facts"),
    [
        ({"empty": True, "max_tokens": 9, "advantage": 1.0}, (0, 2)),
        ({"empty": False, "max_tokens": 0, "advantage": 1.0}, ("0/0", 1, 0)),
        ({"empty": False, "max_tokens": 9, "advantage": float("nan")}, (0, "[nan]")),
    ],
)
def test_a_step_that_cannot_be_trained_ends_the_loop_before_the_trainer_sees_it(case, facts: Facts) -> None:
    """A rollout of empty answers only is a broken server, not chance: going on would wait for nothing."""
    world = Unusable(**case)
    with refuses(ValueError, *facts):
        world.run(3)
    assert not any("train" in line for line in world.log) and world.version == 0


class Halves(Unusable):
    """Two optimizer steps a rollout."""

    def pack(self, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]]) -> Sequence[TrainBatch]:
        return Packer(dp_size=1, max_tokens=9, steps_per_rollout=2).steps(groups, advantages)


def test_a_rollout_is_published_once_whatever_its_optimizer_steps() -> None:
    """Versions, and with them staleness, count publications."""
    world = Halves(empty=False, max_tokens=9, advantage=1.0)
    world.run(3)
    assert world.steps == 6 and world.version == 3
    assert [m["weight_version"] for _, m in world.rows] == [0, 1, 2, 3]


def test_every_row_has_the_timings(tmp_path: Path) -> None:
    world = World(rollout_s=0.01, train_s=0.01)
    world.run(1)
    row = world.rows[-1][1]
    assert row["perf/rollout_s"] >= 0.009
    assert row["perf/train_s"] >= 0.009
    assert row["perf/step_s"] >= row["perf/rollout_s"] + row["perf/train_s"] - 1e-3
    assert row["sync/bytes"] == 3 and not row.keys() & {"sync/triton", "sync/packed", "rollout/triton"}


def test_a_row_has_the_shares_of_triton() -> None:
    class Encoding(World):
        async def publish(self, *, version: int) -> PublishReport:
            return replace(await super().publish(version=version), triton=0.75, packed=0.5, decoding=0.25)

    world = Encoding()
    world.run(1)
    row = world.rows[-1][1]
    assert (row["sync/triton"], row["sync/packed"], row["rollout/triton"]) == (0.75, 0.5, 0.25)

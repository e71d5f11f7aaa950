"""Ray's part of a step: each rank is handed its row of the grid, and of the row's routes only what it needs.

Ranks are stand-ins that tell what came to them, and in one test Megatron's. Not covered: several machines.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ray.exceptions import RayActorError

from megatron_bridge.convert.to_megatron import to_megatron
from miles_like.algorithms.registry import make_algorithm
from miles_like.batch.packing import pack
from miles_like.batch.unpacking import unpack
from miles_like.cluster.call_deadlines import CallDeadlines, format_ranks
from miles_like.cluster.factories import MegatronFactory
from miles_like.cluster.placement import Role, Slot
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.nodes.session import start_ray, stop_ray
from miles_like.types import REFERENCE, RanksLostError, TrainBatch
from routing_replay.align import pack_rows
from routing_replay.rank_routes import RankRoutes, fed_routes
from routing_replay.trace import RoutingTrace
from tests.support import layouts, standin_rank, toy
from tests.support.chosen import later
from tests.support.made_samples import LAYERS, TOP_K, group, sample
from tests.support.own_ray import this_node
from tests.support.refusals import Facts, refuses
from tests.support.standin_rank import PLACES, FailsToStart, InCollective, Stand
from tests.support.tiny_models import felt_tensors, write_checkpoint

HERE = "tests/miles_like/cluster/test_workers.py"
LONG = pytest.mark.long(beside=HERE)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, TrainBatch], Any]]:
    """(layout, batch) -> the step's metrics, and the row that came to each rank."""
    start_ray(None)
    logs = tmp_path_factory.mktemp("logs")

    def step(where: str, batch: TrainBatch) -> Any:
        async def run() -> Any:
            slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(2)]
            trainer = RayTrainer(Stand(where), slots, this_node(), len(batch.grid), Path(logs))
            report = await trainer.train([batch, batch])
            rows = await trainer._all("finish_save", [(True,)] * 2)
            await trainer.close()
            return report.metrics, rows

        return asyncio.run(run())

    yield step
    stop_ray()


def test_a_dead_rank_is_named_where_the_others_tell_of_a_lost_connection_first(ray: Any, tmp_path: Path) -> None:
    async def save() -> None:
        slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(2)]
        trainer = RayTrainer(Stand("DP2"), slots, this_node(), 2, tmp_path)
        try:
            await trainer.save(tmp_path / "checkpoint")
        finally:
            await trainer.close()

    with refuses(RuntimeError, "save", "logs/"):
        asyncio.run(save())


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        pytest.param("dies", ("critic rank 0", "worker process died"), marks=LONG),
        pytest.param("refuses", ("critic rank 2", "tp", 3), marks=LONG),
        pytest.param("breaks", ("critic rank 2", "illegal memory access"), marks=LONG),
    ],
)
def test_the_rank_that_fails_first_at_the_start_is_named(ray: Any, tmp_path: Path, how: str, facts: Facts) -> None:
    """Of three: not one that only tells of the lost connection, and not after those that wait for it."""
    slots = [Slot(role="critic", index=i, node=0, gpus=()) for i in range(3)]
    with refuses(RuntimeError, *facts):
        RayTrainer(FailsToStart(how), slots, this_node(), 1, tmp_path, timeout_s=100)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_that_dies_while_nothing_is_asked_of_it_is_seen_and_the_others_are_ended(
    ray: Any, tmp_path: Path
) -> None:
    """Also one that a signal has stopped, which cannot end when Ray asks it to. The end of closed ranks is no loss."""

    async def watch() -> None:
        slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(2)]
        trainer = RayTrainer(Stand("DP2"), slots, this_node(), 2, tmp_path)
        seen = asyncio.create_task(trainer.lost())
        os.kill(trainer._pids[0], signal.SIGSTOP)
        os.kill(trainer._pids[1], signal.SIGKILL)
        error = await asyncio.wait_for(seen, 60)
        assert [(one.role, one.index) for one in error.lost] == [("trainer", 1)] and "between two calls" in str(error)
        assert trainer.end() == [] and not any(map(runs, trainer._pids))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trainer.lost(), 1)

    asyncio.run(watch())


@pytest.mark.parametrize("how", later(["hangs", "is stopped"], ["hangs"], beside=HERE))
def test_a_rank_that_does_not_answer_is_named_and_its_stacks_are_kept(ray: Any, tmp_path: Path, how: str) -> None:
    """Within the deadline, with the place where it hangs, while the other is in a collective of gloo; the next call
    does not wait for it again."""

    async def ask() -> tuple[str, str]:
        slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(2)]
        factory = InCollective() if how == "hangs" else Stand("DP2")
        trainer = RayTrainer(factory, slots, this_node(), 2, tmp_path / "logs", timeout_s=60)
        trainer._deadlines = CallDeadlines(4)
        if how == "is stopped":
            os.kill(trainer._pids[1], signal.SIGSTOP)
        call = trainer.load_copy("copy", tmp_path) if how == "hangs" else trainer.evaluate(batch(dp=2))
        try:
            with pytest.raises(RanksLostError) as first:
                await call
            assert [one.index for one in first.value.lost] == ([0, 1] if how == "hangs" else [1])
            trainer._deadlines = CallDeadlines(3600)
            with pytest.raises(RuntimeError) as second:
                await trainer.finish_save(wait=True)
            return str(first.value), str(second.value)
        finally:
            await trainer.close()

    first, second = asyncio.run(ask())
    if how == "hangs":
        assert first.startswith(
            "load_copy: trainer ranks 0 and 1 of 2 did not answer within 4 s; rank 1 is outside of "
        )
        lines = inspect.getsourcelines(standin_rank.users_function)[1]
        place = f"{standin_rank.__file__}:{lines + 1} in users_function"
        assert f"rank 1 is outside of collectives at {place}, while 1 rank waits in one: the stacks" in first
    else:
        assert first.startswith("evaluate: trainer rank 1 of 2 did not answer within 4 s; rank 1 had been stopped by ")
    assert "cluster.timeout_s" in first and second == first
    for i in range(2):
        assert "most recent call first" in (tmp_path / "logs" / f"trainer_rank{i}.log").read_text()
    (report,) = tmp_path.glob("stacks/*")
    text = report.read_text()
    assert str(report) in first and text.count("\n==== ") == 3 and "==== driver, process" in text
    assert ("users_function" in text and "all_reduce" in text) == (how == "hangs")


def test_the_failure_of_one_rank_is_raised_while_another_has_not_answered() -> None:
    """The first rank never answers. Its future has no result yet, and asking for one would be another error."""

    async def ask() -> None:
        async def fails() -> None:
            raise RayActorError

        def rank(answer: Callable[[], Any]) -> Any:
            return SimpleNamespace(save=SimpleNamespace(remote=lambda *_: answer()))

        trainer: Any = object.__new__(RayTrainer)
        trainer._stuck, trainer._deadlines = None, CallDeadlines(60)
        trainer._ranks = [rank(asyncio.Event().wait), rank(fails)]
        trainer._role, trainer._addresses = "trainer", ["10.0.0.1"] * 2
        await asyncio.wait_for(trainer.save(Path("checkpoint")), 30)

    with refuses(RuntimeError, "save", "logs/"):
        asyncio.run(ask())


def test_a_deadline_grows_with_what_calls_have_taken() -> None:
    deadlines = CallDeadlines(600)
    assert deadlines.limit("train") == 600
    deadlines.note("train", 5)
    assert deadlines.limit("train") == 600
    deadlines.note("train", 100)
    deadlines.note("train", 90)
    assert deadlines.limit("train") == 1000 and deadlines.limit("save") == 600
    assert format_ranks([3]) == "rank 3" and format_ranks([0, 3, 5]) == "ranks 0, 3 and 5"


def batch(*, dp: int, routing: bool = True) -> TrainBatch:
    """Six samples of odd lengths in micro-batches of two or so, no two tokens alike."""
    samples = [
        sample("p", i, prompt_len=2 + i % 3, response_len=3, first_token=20 * i, routing=routing) for i in range(6)
    ]
    return pack([group(samples)], [[1.0] * 6], dp_size=dp, max_tokens=14)


@pytest.mark.parametrize("where", later(PLACES, ["PP2"], beside=HERE))
def test_a_rank_is_sent_its_rows_and_layers_alone(ray: Any, where: str) -> None:
    """Bytes counted where they arrive: the tokens that a rank feeds, times the layers it has, times K, one byte each,
    and four bytes of checksum for each row and pipeline stage. They are the rollout's for those tokens; ranks that need
    the same are counted once. Two optimizer steps."""
    sent = batch(dp=2 if where == "DP2" else 1)
    metrics, came = ray(where, sent)
    counted: dict[Any, int] = {}
    for (dp, part), (row, again) in zip(PLACES[where], came, strict=True):
        assert [m.samples for m in again] == [m.samples for m in row]
        counted[dp, part] = 0
        for whole, m in zip(sent.grid[dp], row, strict=True):
            rows = pack_rows(whole.cu_seqlens, part).rows
            rows = rows[rows >= 0]
            assert isinstance(m.routing, RankRoutes) and isinstance(whole.routing, RoutingTrace)
            assert m.routing.trace.experts.untyped_storage().nbytes() == len(rows) * len(part.layers) * TOP_K
            assert m.samples == whole.samples == m.routing.samples
            for name in ("tokens", "labels", "loss_mask", "advantages", "rollout_logprobs", "cu_seqlens"):
                assert torch.equal(getattr(m, name), getattr(whole, name))
            fed = fed_routes(m.routing, m.samples, m.tokens, m.cu_seqlens, part)
            real = pack_rows(whole.cu_seqlens, part).rows >= 0
            columns = [LAYERS.index(layer) for layer in part.layers]
            assert torch.equal(fed.experts[real], whole.routing.experts[rows][:, columns])
            counted[dp, part] += m.routing.nbytes
    tokens = sum(len(m.tokens) for row in sent.grid for m in row)
    assert metrics["routing/bytes"] / 2 == sum(counted.values())
    assert sum(counted.values()) == tokens * (len(LAYERS) * TOP_K + 4 * (len(LAYERS) if where == "PP2" else 1))
    if where in ("CP2", "PP2"):
        assert max(counted.values()) < 0.7 * sum(counted.values())


@LONG
def test_without_routes_none_are_counted(ray: Any) -> None:
    metrics, came = ray("TP2", batch(dp=1, routing=False))
    assert "routing/bytes" not in metrics and all(m.routing is None for rows in came for row in rows for m in row)


def _trained(hf: Path, weights: Path, batches: Sequence[TrainBatch], **layout: int) -> tuple[Any, ...]:
    """Metrics of each rollout, of Megatron ranks in a layout, under replay; then their log-probabilities of the first
    batch under their weights and under their initial ones, which are stored as "first"."""

    async def run() -> tuple[Any, ...]:
        config = toy.config(str(hf), **layout)
        slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(config.parallel.world_size)]
        trainer = RayTrainer(
            MegatronFactory(config, weights, layouts.WholeSamples()), slots, this_node(), 1, hf / "logs"
        )
        out = [dict((await trainer.train([b])).metrics) for b in batches]
        await trainer.load_copy("first", weights)
        of_weights = [unpack(batches[0].grid, await trainer.logprobs(batches[0], weights=w)) for w in (None, "first")]
        freed = await trainer.sleep()
        assert all(freed[part] > 1e6 for part in ("parameters", "gradients", "optimizer"))
        with refuses(RuntimeError, "logprobs", "wake"):
            await trainer.logprobs(batches[0])
        await trainer.wake()
        awake = unpack(batches[0].grid, await trainer.logprobs(batches[0]))
        assert all(awake[name].equal(x) for name, x in of_weights[0].items())
        await trainer.close()
        return out, *of_weights

    return asyncio.run(run())


@pytest.mark.long(beside="tests/laws/test_replay_layouts.py")
def test_ranks_that_get_parts_of_the_routes_train_as_one_that_gets_all(ray: Any, tmp_path: Path) -> None:
    """Two stages of two context-parallel ranks: each is sent a quarter of the routes or so, cut by the driver, and the
    step is the single rank's: every row replayed, the same loss and gradient norm, before and after an update. So are
    the log-probabilities that one rank of them all answers with, under the weights now and under a copy."""
    hf = write_checkpoint(tmp_path / "hf", layouts.MLA, felt_tensors(layouts.MLA))
    to_megatron(hf, tmp_path / "shards")
    batches = []
    for step in range(2):
        ((row,), tokens) = toy.grid(layouts.batch(step), dp=1, micros=4)
        batches.append(TrainBatch(grid=(tuple(row),), loss_tokens=tokens, versions=(0, 0)))
    alone, now, first = _trained(hf, tmp_path / "shards", batches)
    cut, now_cut, first_cut = _trained(hf, tmp_path / "shards", batches, pp=2, cp=2)
    for one, many in zip(alone, cut, strict=True):
        assert one["routing/replay_coverage"] == many["routing/replay_coverage"] == 1.0
        assert one.keys() == many.keys()
        for name in sorted(one.keys() - {"routing/bytes"}):
            # rows that a context-parallel cut parts are no neighbours, so this figure is of slightly other pairs
            parted = 0.05 if name.startswith("routing/neighbour_agreement") else 1e-5
            assert many[name] == pytest.approx(one[name], rel=1e-4, abs=parted), name
    assert alone[0]["train/loss"] != pytest.approx(alone[1]["train/loss"], rel=1e-3)
    assert len(first) == 16
    for name in first:
        torch.testing.assert_close(now_cut[name], now[name], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(first_cut[name], first[name], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(now[name], first[name], atol=1e-3)


@pytest.mark.long(beside="tests/miles_like/experience/test_experience.py")
def test_a_step_with_ranks_of_the_reference_is_the_step_with_its_weights_swapped_in(ray: Any, tmp_path: Path) -> None:
    """The second step, after the trained weights have moved. The ranks of the reference have no gradient buffer and no
    optimizer, and are two pipeline stages, while the trainer is one rank."""
    hf = write_checkpoint(tmp_path / "hf", layouts.MLA, felt_tensors(layouts.MLA))
    to_megatron(hf, tmp_path / "shards")
    loss = make_algorithm(AlgorithmConfig.model_validate({"kl_coefficient": 0.5}), CorrectionConfig()).loss
    batches = []
    for step in range(2):
        ((row,), tokens) = toy.grid(layouts.batch(step), dp=1, micros=2)
        batches.append(TrainBatch(grid=(tuple(row),), loss_tokens=tokens, versions=(0, 0)))

    def ranks(role: Role, **settings: Any) -> RayTrainer:
        config = toy.config(str(hf), **settings)
        slots = [Slot(role=role, index=i, node=0, gpus=()) for i in range(config.parallel.world_size)]
        return RayTrainer(MegatronFactory(config, tmp_path / "shards", loss), slots, this_node(), 1, tmp_path / role)

    def scored(batch: TrainBatch, logprobs: Sequence[Sequence[torch.Tensor]]) -> TrainBatch:
        row = [replace(m, streams={**m.streams, REFERENCE: x}) for m, x in zip(batch.grid[0], logprobs[0], strict=True)]
        return replace(batch, grid=(tuple(row),))

    async def run() -> tuple[list[Any], list[Any]]:
        swapping, trainer = ranks("trainer", reference=True), ranks("trainer")
        reference = ranks("reference", trains=False, pp=2, mode="off")
        wanted = [dict((await swapping.train([b])).metrics) for b in batches]
        found = [dict((await trainer.train([scored(b, await reference.logprobs(b))])).metrics) for b in batches]
        for each in (swapping, trainer, reference):
            await each.close()
        return wanted, found

    wanted, found = asyncio.run(run())
    assert abs(wanted[1]["train/kl_ref"]) > 1e-6
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name

"""How a run's configuration reaches its parts: which routes are asked for, kept, and held to their tokens' weights.

Nothing is started. Not covered: the run itself (tests/e2e).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from megatron_bridge.families.registry import family_of
from miles_like.algorithms.bounds import Bounds
from miles_like.algorithms.registry import make_algorithm
from miles_like.appended_file import AppendedFile, positions
from miles_like.config_io import load_config
from miles_like.driver_random import RANDOM, random_state
from miles_like.keep_policy import KeptBest
from miles_like.placement import plan_placement
from miles_like.preflight import check_over_sampling
from miles_like.reward_config import RewardConfig
from miles_like.rewards.load import Rewards, scored_by
from miles_like.run_state import RunState, save
from miles_like.tokenizer import load_tokenizer
from miles_like.train_stage import TrainStage
from miles_like.trainer_parts import LEDGER, METRICS
from miles_like.types import Prompt, SampleGroup, SamplingParams, Unit, VersionSpan
from miles_like.verify.findings import Cause, Finding, Profile, Report, gap_of
from miles_like.verify_live import Comparison
from rollout.kept import Kept
from rollout.unaborted import Around
from tests.miles_like.made_samples import group, sample

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
STALE_STOCK = ["rollout.engine=sglang", "buffer.max_staleness=1", "publish.pause_mode=retract"]


def stage(*settings: str) -> TrainStage:
    """One that knows its configuration and the model's, nothing more."""
    out = TrainStage.__new__(TrainStage)
    out.config = load_config(TINY, list(settings))
    assert out.config.model.make is not None
    hf: dict[str, Any] = json.loads(Path(out.config.model.make.config).read_text())
    checkpoint: Any = SimpleNamespace(config=hf)
    out.hf, out.family = checkpoint, family_of(hf)
    out.run_dir = out.served = Path("run")
    c = out.config
    out.algorithm = make_algorithm(c.algorithm, c.correction, c.mismatch)
    out.plan = plan_placement(out.config.cluster, out.config.parallel, out.config.rollout)
    return out


def test_teachers_are_stopped_where_the_run_s_own_servers_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their servers are processes of their own and would go on without the run."""
    happened: list[str] = []

    class Teaching:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda: happened.append(name)

    def none_start(version: int) -> Any:
        raise RuntimeError("rollout server 0: no port is free")

    monkeypatch.setattr("miles_like.train_stage.RunTeachers", Teaching)
    monkeypatch.setattr("miles_like.train_stage.check_nodes", lambda plan: None)
    made = stage()
    made.run_dir, made.console = tmp_path, Console(quiet=True)
    made.checkpoints, made.tokenizer = tmp_path / "checkpoints", load_tokenizer(TINY.with_name("tiny"))
    monkeypatch.setattr(made, "servers", none_start)
    with pytest.raises(RuntimeError, match="no port is free"):
        made.run(resume=False)
    assert happened == ["prepare", "launch", "stop"]
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    bare = {"train": str(tmp_path / "bare.jsonl")}
    made.config = made.config.model_copy(update={"data": made.config.data.model_copy(update=bare)})
    happened.clear()
    with pytest.raises(ValueError, match=r"no column 'answer'.* than 'exact_number'"):
        made.run(resume=False)
    assert not happened  # there is nothing to stop yet


def test_a_run_whose_sides_differ_is_refused_before_it_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence that names the cause: no metrics, no samples, no checkpoint of it, and no step is taken."""
    gap = gap_of([torch.tensor([0.0, -1.0])], [torch.tensor([0.0, -2.0])], [torch.tensor([False, True])])
    stale = Finding(step="weights", compared="hashes", before=gap, after=None, causes=((Cause.STALE, "w is older"),))
    none = torch.zeros(0)
    profile = Profile(position=none, delta=none, layers=(), agreement=none)
    found = Report(findings=(stale,), profile=profile, bounds=Bounds(), extra={})
    asked: list[int] = []

    async def short(self: Comparison, clients: Any, *, flush: bool) -> Report:
        asked.append(len(self.prompts))
        return found

    async def publish(version: int) -> None:
        assert version == 0

    monkeypatch.setattr(Comparison, "short", short)
    teaching: Any = None  # nobody is asked any more
    trainer: Any = SimpleNamespace(dp_size=1, connect=lambda recipe: None, publish=publish)
    source: Any = SimpleNamespace(all=lambda: [0] * 20)
    made = stage()
    made.run_dir, made.console, made.spec = tmp_path, Console(quiet=True), made.config.precision.spec()
    made.tokenizer, made.play = SimpleNamespace(eos_token_id=1), lambda engine: engine
    said = r"differ before the first step: weights: stale weights \(w is older\)\. `miles-like verify` says"
    with pytest.raises(ValueError, match=said) as refused:
        asyncio.run(made._loop(trainer, ["http://x"], source, Rewards(RewardConfig()), [], None, teaching))
    assert "\n" not in str(refused.value)
    assert asked == [8] and list(tmp_path.iterdir()) == []
    unchecked = stage("mismatch.check_prompts=0")
    unchecked.tokenizer, unchecked.console = made.tokenizer, made.console
    asyncio.run(unchecked._checks(trainer, [], source).at_start(0, None))
    assert asked == [8]


FILES = {METRICS: '{"step": %d}\n', LEDGER: '{"step":%d,"tickets":0}\n'}
DAMAGES = {
    "has 10 bytes": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "has other bytes": lambda path: path.write_text(path.read_text().replace("1", "7", 1)),
    "is missing": lambda path: path.unlink(),
}


def left_at_step_1(run_dir: Path) -> TrainStage:
    """A stage whose run was killed in step 3, with a checkpoint of step 1."""
    made = stage()
    made.run_dir, made.checkpoints = run_dir, run_dir / "checkpoints"
    made.console, made.kept_best = Console(quiet=True), KeptBest(None)
    files = {name: AppendedFile(run_dir / name) for name in FILES}
    for step in (1, 2):
        for name, file in files.items():
            file.write(FILES[name] % step)
        if step == 1:
            config = made.config.model_dump(mode="json")
            parts = {"config": config, "keep_best": made.kept_best.state(), "files": positions(files)}
            parts[RANDOM] = random_state()
            save(made.checkpoints, RunState(step=1, weight_version=1, tokens_total=9, parts=parts), keep=1)
    for file in files.values():
        file.close()
    return made


@pytest.mark.parametrize("said", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_not_the_run_s_are_named_and_all_stays_as_it_is(tmp_path: Path, name: str, said: str) -> None:
    """Cut back unseen, they would be the beginning of a file that no run ever wrote."""
    made = left_at_step_1(tmp_path)
    damaged = left_at_step_1(tmp_path / "damaged")
    DAMAGES[said](damaged.run_dir / name)
    before = {p: p.read_bytes() for p in damaged.run_dir.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=rf"{name} {said}.*: resume from a checkpoint before it was changed, or use"):
        damaged.resumed()
    assert before == {p: p.read_bytes() for p in damaged.run_dir.rglob("*") if p.is_file()}
    assert made.resumed() is not None
    assert {name: (tmp_path / name).read_text() for name in FILES} == {name: row % 1 for name, row in FILES.items()}


def test_the_deadline_knows_how_long_an_asynchronous_save_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning until `latest` names it: to begin it costs next to nothing."""
    made = left_at_step_1(tmp_path)
    made.config = load_config(TINY, ["checkpoint.asynchronous=true", "checkpoint.deadline_s=100"])
    made.files, made.tokens_total, made._saving, noted = {}, 9, None, list[float]()
    clock, written = [10.0], [False]
    monkeypatch.setattr("miles_like.trainer_parts.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    async def save(folder: Path, *, asynchronous: bool) -> None:
        assert asynchronous
        folder.mkdir(parents=True)
        clock[0] += 1.0

    async def finish_save(*, wait: bool) -> bool:
        return written[0] or wait

    trainer: Any = SimpleNamespace(save=save, finish_save=finish_save)
    made.deadline = cast(Any, SimpleNamespace(note=lambda save_s: noted.append(save_s)))

    async def saves() -> None:
        await made.save(trainer, 2, {})
        clock[0] += 20.0
        await made.finish_save(trainer, False)
        assert not noted and (tmp_path / "checkpoints" / "latest").read_text() == "step_1\n"
        clock[0] += 20.0
        written[0] = True
        await made.finish_save(trainer, False)
        assert noted == [41.0] and (tmp_path / "checkpoints" / "latest").read_text() == "step_2\n"

    asyncio.run(saves())


def test_routes_of_other_weights_are_refused_where_they_are_replayed_alone() -> None:
    whole = sample("p", 0, routing=True)
    assert whole.routing is not None
    late = replace(whole, index=1, routing=replace(whole.routing, versions=(VersionSpan(1, 0, len(whole.routing)),)))
    groups, advantages = [group([whole, late])], [[1.0, -1.0]]
    with pytest.raises(ValueError, match=r"sample p/1, .* computed under weight version 1, .* under version 0"):
        stage("replay.mode=r3")._pack(1, groups, advantages)
    for mode in ("r2", "off"):
        (batch,) = stage(f"replay.mode={mode}")._pack(1, groups, advantages)
        assert batch.loss_tokens == 6 and batch.grid[0][0].routing is not None


@pytest.mark.parametrize(("settings", "kept"), [([], True), ([*STALE_STOCK, "replay.mode=off"], False)])
def test_routes_are_asked_for_where_servers_keep_them_and_by_nobody_who_trains_on_none(
    settings: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to held-out prompts come from the same servers, without routes."""
    launched: list[Any] = []
    monkeypatch.setattr("miles_like.run_parts.RayServers", lambda launches, _logs, _limit: launched.extend(launches))
    made = stage(*settings)
    made.servers(0)
    assert [recipe.routed_experts for _, recipe in launched] == [kept] * len(launched) and launched
    for routing in (True, False):
        assert (made.client("http://x", routing=routing)._reader.routing is not None) == (kept and routing)


def test_a_group_that_is_handed_on_is_not_held_for_a_checkpoint_any_more() -> None:
    """It would be in it twice, and a run that resumes would keep the one that nobody asks for."""

    class Engine(Around):
        async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
            return [replace(group([sample(p.id, i) for i in range(n)]), prompt=p) for p in prompts]

    made = stage("train.samples_per_group=2")
    made.tokenizer = load_tokenizer(TINY.with_name("tiny"))
    made.resumes = 3
    made.kept = Kept(Engine.__new__(Engine))
    prompts = [Prompt(id=name, token_ids=(1,), answer="1") for name in "pqr"]

    async def held() -> list[int]:
        groups = made._rollout(made.kept, scored_by(lambda prompt, sample: 0.0), 0, prompts)
        return [len(made.kept.state()) async for _ in groups]

    assert asyncio.run(held()) == [2, 1, 0]


def test_groups_that_end_together_are_not_over_sampled_to_end_early() -> None:
    """All would be waited for all the same."""
    made = stage("buffer.over_sampling=0.5", "alignment.deterministic=false")
    reward = scored_by(lambda prompt, sample: 0.0)
    check_over_sampling(made.config, reward)
    with pytest.raises(ValueError, match=r"buffer.over_sampling = 0.5 .* all samples at once"):
        check_over_sampling(made.config, replace(reward, unit=Unit.BATCH))

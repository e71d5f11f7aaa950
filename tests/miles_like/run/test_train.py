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
from transformers import AutoTokenizer

from miles_like.algorithms.distillation import CandidateLoss, Distilled
from miles_like.algorithms.terms.bounds import Bounds
from miles_like.alignment.live import Comparison
from miles_like.alignment.report import Cause, Finding, Profile, Report, gap_of
from miles_like.batch.packer import Packer
from miles_like.checkpoint.random_state import RANDOM, random_state
from miles_like.checkpoint.run_state import RunState, save
from miles_like.checkpoint.writer import Snapshot
from miles_like.cluster.placement import plan_placement
from miles_like.config.load import load_config
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.reward import RewardConfig
from miles_like.loop.saver import Saver
from miles_like.preflight.checks import check_over_sampling
from miles_like.report.progress import PhaseBar
from miles_like.report.reward_calls import RewardTally
from miles_like.rewards.load import Rewards, scored_by
from miles_like.run.setup.delivery import TrainerPublication
from miles_like.run.setup.launcher import Launcher
from miles_like.run.setup.model_plan import ModelPlan, planned_model, run_algorithm
from miles_like.run.setup.prompts import Prompts
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.sampler import EngineSampler
from miles_like.run.setup.trainer_side import LEDGER, METRICS, RunFiles
from miles_like.run.train import TrainingRun, train
from miles_like.stopping import StopRequest
from miles_like.storage.appended_file import AppendedFile, positions
from miles_like.types import Prompt, SampleGroup, SamplingParams, Unit, VersionSpan
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.resuming import EngineWrapper
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
STALE_STOCK = ["rollout.engine=sglang", "buffer.max_staleness=1", "publish.pause_mode=retract"]


def plan_of(*settings: str, run_dir: Path = Path("run")) -> ModelPlan:
    """A plan of the tiny model, without a checkpoint."""
    config = load_config(TINY, list(settings))
    assert config.model.make is not None
    hf: dict[str, Any] = json.loads(Path(config.model.make.config).read_text())
    checkpoint: Any = SimpleNamespace(config=hf)
    return ModelPlan(
        config=config,
        run_dir=run_dir,
        served=Path("run"),
        weights=Path("run"),
        hf=checkpoint,
        model=planned_model(config, hf, Path("run")),
        placement=plan_placement(config.cluster, config.parallel, config.rollout),
        tokenizer=AutoTokenizer.from_pretrained(TINY.with_name("tiny")),
    )


def run_of(plan: ModelPlan, trainer: Any = None, **more: Any) -> TrainingRun:
    """A run of which nothing was started."""
    console = Console(quiet=True)
    parts: dict[str, Any] = {
        "rollout": (rollout := RolloutSide(plan=plan)),
        "servers": None,
        "algorithm": run_algorithm(plan.config),
        "runner": rollout.episode_runner(),
        "prompts": None,
        "files": RunFiles(plan, console),
        "resumed": None,
        "teachers": None,
        "critic": None,
        "console": console,
        "launcher": Launcher(),
    }
    run = TrainingRun(trainer=trainer, **parts | more)
    run.publication = TrainerPublication(rollout, trainer, goes_on=False)
    return run


@pytest.mark.slow
def test_teachers_are_stopped_where_the_run_s_own_servers_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their servers are separate processes and would outlive the run."""
    happened: list[str] = []

    class Teaching:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda: happened.append(name)

    class NoServers(Launcher):
        def check(self, plan: ModelPlan) -> None: ...

        def servers(self, rollout: RolloutSide, version: int, *, routing: bool = True) -> Any:
            raise RuntimeError("rollout server 0: no port is free")

    monkeypatch.setattr("miles_like.run.setup.teachers.RunTeachers", Teaching)
    plan, console = plan_of(run_dir=tmp_path), Console(quiet=True)
    with refuses(RuntimeError, "no port is free"):
        train(plan, console, resume=False, launcher=NoServers())
    assert happened == ["prepare", "launch", "stop"]
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    bare = {"train": str(tmp_path / "bare.jsonl")}
    config = plan.config.model_copy(update={"data": plan.config.data.model_copy(update=bare)})
    happened.clear()
    with refuses(ValueError, "answer", "exact_number"):
        train(replace(plan, config=config), console, resume=False, launcher=NoServers())
    assert not happened  # there is nothing to stop yet


@pytest.mark.parametrize(
    ("section", "change", "fact"),
    [
        ("algorithm", {"loss": "nowhere:loss"}, "algorithm.loss"),
        ("rollout", {"generate": "nowhere:generate"}, "rollout.generate"),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_is_refused_before_anything_is_written(
    tmp_path: Path, section: str, change: dict[str, str], fact: str
) -> None:
    """A resumed run cuts its metrics and its ledger back to the checkpoint, so plug-ins are loaded before."""

    class Fits(Launcher):
        def check(self, plan: ModelPlan) -> None: ...

    plan = plan_of(run_dir=tmp_path)
    now = getattr(plan.config, section)
    changed = AlgorithmConfig(**change) if section == "algorithm" else now.model_copy(update=change)
    plan = replace(plan, config=plan.config.model_copy(update={section: changed}))
    with refuses(ValueError, fact, "nowhere"):
        train(plan, Console(quiet=True), resume=True, launcher=Fits())
    assert list(tmp_path.iterdir()) == []


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

    async def short(self: Comparison, clients: Any, *, flush: bool, serving: Any) -> Report:
        asked.append(len(self.prompts))
        return found

    async def publish(version: int) -> None:
        assert version == 0

    monkeypatch.setattr(Comparison, "short", short)

    async def close() -> None: ...

    trainer: Any = SimpleNamespace(dp_size=1, connect=lambda recipe: None, publish=publish, close=close)
    source: Any = SimpleNamespace(all=lambda: [Prompt(id="a", token_ids=(1, 2, 3), answer="")] * 20)
    prompts = Prompts(source=source, held_out=[], rewards=Rewards(RewardConfig()), calls=RewardTally())

    async def start() -> None: ...

    teachers: Any = SimpleNamespace(teachers=lambda *of: SimpleNamespace(start=start, close=close), places=None)
    made = run_of(plan_of("publish.answer_tokens=0", run_dir=tmp_path), trainer, prompts=prompts, teachers=teachers)
    made._urls = {0: "http://x"}
    with refuses(ValueError, "w", "mismatch.check_prompts", 0) as refused:
        asyncio.run(made.run())
    assert "\n" not in str(refused.value)
    assert asked == [8] and list(tmp_path.iterdir()) == []
    unchecked = run_of(plan_of("mismatch.check_prompts=0", "publish.answer_tokens=0"), trainer, prompts=prompts)
    asyncio.run(unchecked.checks([]).at_start(0, None))
    assert asked == [8]


FILES = {METRICS: '{"step": %d, "wall_s": 8.5}\n', LEDGER: '{"step":%d,"tickets":0}\n'}
DAMAGES = {
    "short": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "other bytes": lambda path: path.write_text(path.read_text().replace("1", "7", 1)),
    "missing": lambda path: path.unlink(),
}


def left_at_step_1(run_dir: Path, *settings: str) -> RunFiles:
    """Files of a run that was killed in step 3, with a checkpoint of step 1."""
    plan = plan_of(*settings, run_dir=run_dir)
    made = RunFiles(plan, Console(quiet=True))
    files = {name: AppendedFile(run_dir / name) for name in FILES}
    for step in (1, 2):
        for name, file in files.items():
            file.write(FILES[name] % step)
        if step == 1:
            config = plan.config.model_dump(mode="json")
            parts = {"config": config, "keep_best": made.best.state(), "files": positions(files)}
            parts[RANDOM] = random_state()
            save(plan.checkpoints, RunState(step=1, weight_version=1, tokens_total=9, parts=parts), keep=1)
    for file in files.values():
        file.close()
    return made


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_not_the_run_s_are_named_and_all_stays_as_it_is(tmp_path: Path, name: str, damage: str) -> None:
    """Cut back unseen, they would be the beginning of a file that no run ever wrote."""
    made = left_at_step_1(tmp_path)
    damaged = left_at_step_1(tmp_path / "damaged")
    DAMAGES[damage](damaged.plan.run_dir / name)
    before = {p: p.read_bytes() for p in damaged.plan.run_dir.rglob("*") if p.is_file()}
    with refuses(ValueError, name, "--fresh"):
        damaged.resume()
    assert before == {p: p.read_bytes() for p in damaged.plan.run_dir.rglob("*") if p.is_file()}
    assert made.earlier_s == 0.0 and made.resume() is not None and made.earlier_s == 8.5
    assert {name: (tmp_path / name).read_text() for name in FILES} == {name: row % 1 for name, row in FILES.items()}


def test_the_deadline_knows_how_long_an_asynchronous_save_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning until `latest` names it: to begin it costs next to nothing."""
    made = left_at_step_1(tmp_path, "checkpoint.asynchronous=true", "checkpoint.deadline_s=100")
    noted = list[float]()
    clock, written = [10.0], [False]
    monkeypatch.setattr("miles_like.checkpoint.writer.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    async def save(folder: Path, *, asynchronous: bool) -> None:
        assert asynchronous
        folder.mkdir(parents=True)
        clock[0] += 1.0

    async def finish_save(*, wait: bool) -> bool:
        return written[0] or wait

    async def snapshot(step: int, whole: bool) -> Snapshot:
        return Snapshot(tokens_total=9)

    trainer: Any = SimpleNamespace(save=save, finish_save=finish_save)
    saver = Saver(
        state=cast(Any, SimpleNamespace(snapshot=snapshot)),
        checkpoints=made.checkpoints({"trainer": trainer}, None),
        stop=StopRequest(),
        deadline=cast(Any, SimpleNamespace(note=lambda save_s=None, step_s=0.0: noted.extend([save_s] * bool(save_s)))),
        progress=PhaseBar(3, Console(quiet=True)),
        every=1,
    )
    saver.begin(1)

    async def saves() -> None:
        await saver.boundary(2, last=False)
        clock[0] += 20.0
        await saver.checkpoints.finish(wait=False)
        assert not noted and (tmp_path / "checkpoints" / "latest").read_text() == "step_1\n"
        clock[0] += 20.0
        written[0] = True
        await saver.end(3)
        assert noted == [41.0] and (tmp_path / "checkpoints" / "latest").read_text() == "step_2\n"

    asyncio.run(saves())


def packs_of(mode: str) -> Packer:
    run = run_of(plan_of(f"replay.mode={mode}"), SimpleNamespace(dp_size=1))
    return run.packer()


def test_routes_of_other_weights_are_refused_where_they_are_replayed_alone() -> None:
    whole = sample("p", 0, routing=True)
    assert whole.routing is not None
    late = replace(whole, index=1, routing=replace(whole.routing, versions=(VersionSpan(1, 0, len(whole.routing)),)))
    groups, advantages = [group([whole, late])], [[1.0, -1.0]]
    with refuses(ValueError, "p/1", 1, 0):
        packs_of("r3").steps(groups, advantages)
    for mode in ("r2", "off"):
        (batch,) = packs_of(mode).steps(groups, advantages)
        assert batch.loss_tokens == 6 and batch.grid[0][0].routing is not None


@pytest.mark.parametrize(("settings", "kept"), [([], True), ([*STALE_STOCK, "replay.mode=off"], False)])
def test_routes_are_asked_for_where_servers_keep_them_and_by_nobody_who_trains_on_none(
    settings: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to held-out prompts come from the same servers, without routes."""
    launched: list[Any] = []
    monkeypatch.setattr("miles_like.run.setup.launcher.RayServers", lambda launches, *_: launched.extend(launches))
    monkeypatch.setattr(Launcher, "nodes", lambda _self, _plan: None)
    made = RolloutSide(plan=plan_of(*settings))
    Launcher().servers(made, 0)
    assert [launch.return_routed_experts for _, launch in launched] == [kept] * len(launched) and launched
    for routing in (True, False):
        assert (made.client("http://x", routing=routing)._reader.routing is not None) == (kept and routing)


@pytest.mark.slow
def test_a_group_that_is_handed_on_is_not_held_for_a_checkpoint_any_more() -> None:
    """The checkpoint would hold it twice, and a resumed run would keep the copy that no step requests."""

    class Engine(EngineWrapper):
        async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
            return [replace(group([sample(p.id, i) for i in range(n)]), prompt=p) for p in prompts]

    partial = PartialRollouts(Engine.__new__(Engine))
    sampler = EngineSampler(
        rollout=RolloutSide(plan=plan_of("train.samples_per_group=2")),
        engine=partial,
        partial=partial,
        reward=scored_by(lambda prompt, sample: 0.0),
        console=Console(quiet=True),
    )
    prompts = [Prompt(id=name, token_ids=(1,), answer="1") for name in "pqr"]

    async def held() -> list[int]:
        return [len(partial.state()) async for _ in sampler.groups(0, prompts)]

    assert asyncio.run(held()) == [2, 1, 0]


def test_groups_that_end_together_are_not_over_sampled_to_end_early() -> None:
    """All would be waited for all the same."""
    config = load_config(TINY, ["buffer.over_sampling=0.5", "alignment.deterministic=false"])
    reward = scored_by(lambda prompt, sample: 0.0)
    check_over_sampling(config, reward)
    with refuses(ValueError, "buffer.over_sampling", 0.5):
        check_over_sampling(config, replace(reward, unit=Unit.BATCH))


@pytest.mark.parametrize("mode", ["alone", "added"])
@pytest.mark.parametrize(("top_k", "beta"), [(0, None), (4, None), (4, 0.5)])
def test_a_run_is_composed_with_its_teachers(mode: str, top_k: int, beta: float | None) -> None:
    """Of sampled tokens, which is the default, and of candidates: the mode, the form and the divergence arrive."""
    settings = [f"distillation.mode='{mode}'", f"distillation.top_k={top_k}"]
    settings.append("distillation.teachers.t.url='http://127.0.0.1:9'")
    found = run_algorithm(load_config(TINY, settings + ([] if beta is None else [f"distillation.beta={beta}"])))
    assert isinstance(found, Distilled) and found.mode == mode and found.of_candidates == (top_k > 0)
    loss = found.loss
    assert isinstance(loss, CandidateLoss) == (top_k > 0)
    assert not isinstance(loss, CandidateLoss) or loss.beta == (1.0 if beta is None else beta)


def test_a_run_without_teachers_has_its_own_algorithm() -> None:
    assert not isinstance(run_algorithm(load_config(TINY, [])), Distilled)

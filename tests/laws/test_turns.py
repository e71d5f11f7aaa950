"""Law: a run whose servers and trainer take turns on their memory is, bit for bit, the run in which they do not.

Why it must hold: taking turns is about memory alone. Every release of a server drops its weights, its cache and its
samples in flight, and every sleep moves the trainer's state: what comes back must be what was there. The runs are small
and on plain processes (tests/support/local_run.py), which list the calls to all ranks in the order of the driver. Not
covered: GPUs, stock SGLang (tests/sglang_cpu/test_stock_contract.py).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.convert.directory.torch_dist import TorchDist
from miles_like.checkpoint.ledger_audit import audit
from tests.support.forked import tail
from tests.support.kill_points import Kill, witnesses
from tests.support.local_run import QUICK, TINY, Runs, untimed

HERE = "tests/laws/test_turns.py"
LONG = pytest.mark.long(beside=HERE)
KILLS = pytest.mark.long(beside="tests/laws/test_kills.py")
STEPS = 3
TURNS = "cluster.colocate=true"
PPO = ("algorithm.name=ppo", "algorithm.kl_coefficient=0.01", "critic.lr=1e-3")
CASES: dict[str, tuple[str, ...]] = {
    "deterministic": (),
    "a critic": PPO,
    "published on disk, two behind": ("publish.path=disk", "buffer.max_staleness=2"),
    "published on disk": ("publish.path=disk",),
    "a critic, ranks of the reference, on disk, two behind": (
        *PPO,
        "cluster.pools.reference.nodes=0",
        "publish.path=disk",
        "buffer.max_staleness=2",
        "checkpoint.asynchronous=true",
    ),
    "free of determinism": ("alignment.deterministic=false", "rollout.servers=1", "rollout.prompts_per_request=64"),
    "r3": ("alignment.deterministic=false", "replay.mode=r3", "rollout.prompts_per_request=64"),
    "two behind, in lockstep": ("buffer.max_staleness=2",),
    "checks and evaluations": (
        "eval.every=1",
        "mismatch.check_prompts=2",
        "mismatch.check_every=1",
        "mismatch.checksums_every=1",
    ),
    "a reference, two ranks": ("algorithm.kl_coefficient=0.01", "parallel.dp=2", "parallel.ep=2"),
    "a reference, and a teacher on the rollout's servers": (
        "algorithm.kl_coefficient=0.01",
        "distillation.mode=added",
        "distillation.teachers.own={kind='self',weights='current',prompt='{answer}. {prompt}'}",
    ),
}
OFTEN = ("a critic",)  # the case that has all that another has but checks and other ways to publish
FEWER = 2  # steps of these
CHECKED = "checks and evaluations"  # samples and scores after a publication, so that it publishes again


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("turns")) as started:
        yield started


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of all models in a checkpoint."""
    out = {}
    for model in sorted(p for p in checkpoint.iterdir() if p.is_dir()):
        source = TorchDist(model)
        for name in source.names():
            shape = source.stored(name).shape
            out[f"{model.name} {name}"] = source.read(name, (0,) * len(shape), shape)
        source.close()
    return out


def calls(where: Path, *methods: str) -> list[str]:
    """The calls to ranks of these methods, "ROLE METHOD", a publication with its version."""
    lines = (where / "calls.txt").read_text().splitlines()
    return [line for line in lines if line.split()[1] in methods]


def steps_of(name: str) -> int:
    return FEWER if name in OFTEN else STEPS


def same(a: Path, b: Path, steps: int) -> None:
    """Everything that a run leaves, but clocks and the setting itself."""
    for step in range(1, steps + 1):
        kept = [where / "rollouts" / f"step_{step}.jsonl" for where in (a, b)]
        assert kept[0].read_bytes() == kept[1].read_bytes(), f"samples of step {step}"
        found, want = (tensors(where / "checkpoints" / f"step_{step}") for where in (a, b))
        assert found.keys() == want.keys() and len(found) > 20
        for name, x in found.items():
            assert x.view(torch.uint8).equal(want[name].view(torch.uint8)), f"{name} of step {step}"
    assert (a / "ledger.jsonl").read_bytes() == (b / "ledger.jsonl").read_bytes()
    assert untimed(a / "metrics.jsonl") == untimed(b / "metrics.jsonl")


def rows(where: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def whole(runs: Runs, name: str, how: str) -> Path:
    """The run of a case, "turns" or "beside", made by the first test that asks for it."""
    where = runs.home / name.replace(" ", "-").replace(",", "") / how
    if not (where / "metrics.jsonl").exists():
        settings = [*CASES[name], f"train.steps={steps_of(name)}", *([TURNS] if how == "turns" else [])]
        assert runs.run(where, settings) == 0, tail(where / "driver.log")
    return where


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else [LONG]) for name in CASES])
def test_a_run_that_takes_turns_is_the_run_that_does_not(runs: Runs, name: str) -> None:
    home = whole(runs, name, "beside").parent
    whole(runs, name, "turns")
    steps = steps_of(name)
    same(home / "turns", home / "beside", steps)
    turned = [row for row in rows(home / "turns") if "perf/turn/changes" in row]
    assert len(turned) == steps and all(row["perf/turn/changes"] >= 2 for row in turned)
    assert all(row[f"perf/turn/{part}_s"] > 0 for row in turned for part in ("release", "wake", "sleep", "resume"))
    assert not any(key.startswith("perf/turn/") for row in rows(home / "beside") for key in row)
    published = Counter(calls(home / "turns", "publish"))
    assert published.keys() == {f"trainer publish {version}" for version in range(steps + 1)}
    assert name == CHECKED or set(published.values()) == {1}, "a version was published again"


def test_the_calls_of_each_step(runs: Runs) -> None:
    """Every step is saved, before its publication: one wake and one sleep of each model, one publication."""
    found = calls(whole(runs, "a critic", "turns"), "wake", "sleep", "train", "save", "publish")
    steps = [
        [
            *("trainer wake", "critic wake", "trainer train", "critic train", "trainer save", "critic save"),
            *("trainer sleep", "critic sleep", f"trainer publish {step + 1}"),
        ]
        for step in range(steps_of("a critic"))
    ]
    assert found == ["trainer sleep", "critic sleep", "trainer publish 0", *itertools.chain(*steps)]


@pytest.mark.parametrize(
    ("name", "victim", "point", "step", "where"),
    [
        pytest.param(
            "a critic", "driver", "generation", 1, 10, marks=pytest.mark.long(beside="tests/laws/test_kills.py")
        ),
        pytest.param("deterministic", "driver", "generation", 2, 10, marks=LONG),
        pytest.param("deterministic", "rank", "step", 2, "half", marks=LONG),
        # the models of the step are saved by then, its checkpoint is not whole
        pytest.param("a critic", "server", "publish", 2, 1, marks=LONG),
        pytest.param("a critic", "rank", "save", 2, "shards", marks=LONG),
        pytest.param("a critic", "driver", "save", 2, "run_state.json", marks=LONG),
        pytest.param("deterministic", "driver", "save", 2, "latest", marks=LONG),
    ],
)
def test_a_run_killed_between_turns_resumes_to_the_same_bits(
    runs: Runs, name: str, victim: str, point: str, step: int, where: Any
) -> None:
    steps = steps_of(name)
    settings = [*CASES[name], TURNS, f"train.steps={steps}"]
    home = runs.home / f"killed-{name}-{victim}-{point}-{where}".replace(" ", "-")
    assert runs.run(home, settings, Kill(victim=victim, point=point, step=step, where=where)) != 0
    assert len(witnesses(home)) == 1, tail(home / "driver.log")
    assert runs.run(home, settings) == 0, tail(home / "driver.log")
    same(home, whole(runs, name, "turns"), steps)


@LONG
def test_free_runs_lose_no_sample_to_the_turns(runs: Runs) -> None:
    """Without lockstep samples are in flight when the turn changes: they keep their tokens, and continue under the next
    weights; which weights sampled them follows from the clock."""
    home, steps = runs.home / "free", 5
    free = ("buffer.max_staleness=2", "buffer.lockstep=false", "rollout.max_new_tokens=48", f"train.steps={steps}")
    assert runs.run(home, [TURNS, *free]) == 0, tail(home / "driver.log")
    found = audit(home / "ledger.jsonl")
    assert found.wrong is None and found.unfinished == 0
    assert found.steps[-1].trained == steps * 8
    assert calls(home, "publish") == [f"trainer publish {version}" for version in range(steps + 1)]
    spans = [
        [v[0] for v in json.loads(line)["versions"]]
        for step in range(1, steps + 1)
        for line in (home / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    ]
    assert any(len(set(of)) > 1 for of in spans), "no sample was in flight at a turn"
    assert max(row.get("async/staleness/max", 0.0) for row in rows(home)) <= 2


@LONG
def test_early_aborts_and_turns_lose_no_sample(runs: Runs) -> None:
    """Surplus samples are aborted when a step is full, then the turn changes; which they are follows from the clock."""
    home = runs.home / "early"
    early = ("alignment.deterministic=false", "buffer.over_sampling=0.5", "rollout.max_rounds=4")
    assert runs.run(home, [TURNS, *early, f"train.steps={STEPS}"]) == 0, tail(home / "driver.log")
    found = audit(home / "ledger.jsonl")
    assert found.wrong is None and found.steps[-1].trained == STEPS * 8


def verified(run_dir: Path, home: Path, settings: tuple[str, ...]) -> int:
    """`verify` in turns, on the processes of a run; its report is written to `run_dir`/found.json."""
    from miles_like.cluster.rank import Rank
    from miles_like.config.load import load_config
    from miles_like.run.setup.model_plan import model_plan
    from miles_like.run.setup.rollout_side import RolloutSide
    from miles_like.run.verify import VerifyOptions, VerifyRun
    from tests.support.forked import Forked, answers
    from tests.support.local_parts import LocalLauncher
    from tests.support.local_run import _Server

    config, logs = load_config(TINY, [*QUICK, *settings]), run_dir / "logs"
    ranks = {"trainer": [Forked("trainer rank 0", answers(Rank), logs / "rank.log")]}
    servers = [Forked("rollout server 0", answers(_Server), logs / "server.log")]
    try:
        plan = model_plan(config, run_dir, home / "hf", home / "megatron")
        launcher = LocalLauncher(ranks, servers)
        run = VerifyRun(RolloutSide(plan=plan), VerifyOptions(prompts=4), launcher=launcher)
        run.report().write_json(run_dir / "found.json")
    finally:
        for process in (*ranks["trainer"], *servers):
            process.kill()
    return 0


def test_verify_takes_turns_and_finds_nothing(runs: Runs) -> None:
    found = {}
    for name, settings in (("beside", ()), ("turns", (TURNS,))):
        home = runs.home / f"verify-{name}"
        home.mkdir()
        assert runs.call(home / "driver.log", verified, home, runs.home, settings) == 0, tail(home / "driver.log")
        found[name] = json.loads((home / "found.json").read_text())
    assert found["turns"]["verdicts"] == [] and found["turns"] == found["beside"]

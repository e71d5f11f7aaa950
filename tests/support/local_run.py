"""A whole training run on plain processes: what tests/e2e starts through Ray in fifteen seconds starts here in one.

The driver, its trainer ranks and its rollout server are forked from a process that has imported everything (`Runs`).
Only two parts of a run are stand-ins: `LocalTrainer` calls ranks through pipes where RayTrainer calls actors, and
`LocalServers` holds server processes (local_parts.py). What they call is the real thing, and so is all else: the stage,
loop, buffer, checkpoints, clients, publisher, engine, Megatron.

Kills: `tests/support/kill_points.py` knows the pid of each process, and kills one of them at the requested point.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import functools
import itertools
import json
import os
import random
import runpy
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from miles_like.types import Observation, Sample, VersionSpan
from tests.support.forked import BUSY_S, USERS_ERRORS, Forked, Starter, answers, tail

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny.toml"
SMALL_MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
}
QUICK = (  # a deterministic run of little work, which still learns something at each step
    "alignment.deterministic=true",
    "precision.format=bf16",
    "precision.qat=false",
    "parallel.dp=1",
    "parallel.ep=1",
    "train.groups_per_step=4",
    "train.samples_per_group=2",
    "train.max_tokens_per_rank=1024",
    "data.max_prompt_tokens=64",
    "rollout.max_new_tokens=12",
    "rollout.request_timeout_s=60.0",
    "eval.max_prompts=4",
    "eval.every=2",
    "mismatch.check_prompts=0",
    "checkpoint.every=1",
    "checkpoint.keep=3",
    "publish.bucket_bytes=20000",
    "rollout.restarts=0",
    "cluster.rebuilds=0",
    "reward.name=tests.support.local_run:low_tokens",
)

COLUMNS = {  # runs whose steps add columns to the samples
    "a critic, a reference with its own ranks, its penalty in the reward": (
        "algorithm.name=ppo",
        "critic.lr=1e-3",
        "cluster.pools.reference.nodes=0",
        "algorithm.kl_in=reward",
        "algorithm.kl_coefficient=0.1",
    ),
    "a teacher: the policy with another prompt": (
        "distillation.mode=added",
        "distillation.teachers.own={kind='self',weights='current',prompt='{answer}. {prompt}'}",
    ),
}


def low_tokens(prompt: Any, sample: Any) -> float:
    """A reward that a random model gets different values of: the share of token ids below 64 in its answer."""
    answer = sample.token_ids[sample.loss_mask]
    return float((answer < 64).float().mean()) if len(answer) else 0.0


PLAYED = (  # episodes of several turns, of which some are in flight where a run is saved
    "rollout.environment=tests.support.local_run:Slow",
    "rollout.max_turns=4",
    "rollout.max_new_tokens=4",
    "rollout.max_episode_tokens=40",
    "algorithm.turn_credit=discounted",
    "algorithm.turn_discount=0.9",
)


class Slow:
    """An environment that answers each turn by its seed and its length, and takes its time. It rewards
    some turns, and ends some episodes."""

    seconds = 0.05

    def __init__(self, prompt: Any, *, seed: int) -> None:
        self.random, self.heard = random.Random(seed), 0

    async def __call__(self, sample: Any, turn: str) -> Observation:
        await asyncio.sleep(self.seconds)
        self.heard += len(turn) + 1
        reward = low_tokens(None, sample) if self.heard % 2 else None
        if self.random.random() < 0.2:
            return Observation(ends=True, reward=reward)
        return Observation(text=f"{self.heard + self.random.randrange(90)}=", reward=reward)


ROWED = (  # every second episode has two rows
    "rollout.generate=tests.support.local_run:in_rows",
    "rollout.max_new_tokens=6",
    "rollout.max_episode_tokens=24",
)


async def in_rows(engine: Any, prompt: Any, *, n: int, params: Any) -> Any:
    """A second row sees the first answer, which is under loss in the first row alone, and goes on after it."""
    (group,) = await engine.generate([prompt], n=n, params=params)
    return await asyncio.gather(*(_in_rows(engine, s, params) if s.index % 2 else _alone(s) for s in group.samples))


async def _alone(sample: Sample) -> Sample:
    return sample


async def _in_rows(engine: Any, sample: Sample, params: Any) -> list[Sample]:
    turn = await engine.continue_sample(sample, (3,), params=params)
    mask = turn.loss_mask.clone()
    mask[: sample.length] = False
    moved = int(mask.nonzero()[0]) - int(turn.loss_mask.nonzero()[0])
    spans = (VersionSpan(v.version, max(v.start - moved, 0), v.end - moved) for v in turn.versions)
    versions = tuple(v for v in spans if v.end > 0)
    logprobs = torch.where(mask, turn.logprobs, 0.0)
    return [sample, dataclasses.replace(turn, loss_mask=mask, logprobs=logprobs, versions=versions)]


class Slower(Slow):
    """Its episodes take longer than a step."""

    seconds = 2.0


def _ending_turns() -> None:
    """Half of the vocabulary are stop tokens, so that most turns of random weights end."""
    from miles_like.run.setup.rollout_side import RolloutSide

    sampling = RolloutSide.sampling

    def ending(self: RolloutSide, round_index: int) -> Any:
        return dataclasses.replace(sampling(self, round_index), stop_token_ids=tuple(range(1, 128, 2)))

    RolloutSide.sampling = ending  # type: ignore[method-assign]


def make_home(where: Path) -> None:
    """`where`/hf, which servers load, and `where`/megatron, which ranks load: a small model of random weights."""
    from megatron_bridge.convert.to_megatron import to_megatron
    from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

    hf = tiny(**SMALL_MODEL)
    write_checkpoint(where / "hf", hf, random_tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(TINY.parent / "tiny" / name, where / "hf" / name)
    to_megatron(where / "hf", where / "megatron")


class _Server:
    """A server's process: it gets the real command line."""

    def serve(self, arguments: Sequence[str]) -> None:
        from rollout.embedded.server import app as server

        os._exit(server.main(arguments))


# ---- the driver


def named(loop: str | None) -> Any:
    """The Controller of `loop`, the path of a file with one; None: the product's."""
    from miles_like.loop.controller import Controller

    if loop is None:
        return Controller
    found = runpy.run_path(loop).values()
    return next(c for c in found if isinstance(c, type) and issubclass(c, Controller) and c is not Controller)


def drive(
    run_dir: Path,
    home: Path,
    settings: Sequence[str],
    kill: Any,
    loop: str | None = None,
    *,
    in_server: Callable[[int], None] = lambda number: None,
    in_spare: Callable[[], None] = lambda: None,
    spares: int = 0,
    spare_ranks: int | None = None,
) -> int:
    """The driver's process: the run from where it stands, to its end; the exit status of the command line. kill: one,
    or several one after the other; ranks are there for as many losses, or for `spare_ranks`. in_server: called in the
    process of each server before it serves; in_spare: in those of the spares, which replace them."""
    from rich.console import Console

    from miles_like.config.load import load_config
    from miles_like.run import train as train_module
    from miles_like.run.setup import trainer_side
    from miles_like.run.setup.model_plan import model_plan
    from miles_like.stopping import Stopped
    from miles_like.storage.fencing import Fence
    from tests.support import kill_points
    from tests.support.local_parts import LocalLauncher, SealingRank

    vars(trainer_side).update(write_report=lambda run_dir: run_dir / "report.html")  # a page: 5 MB a run
    config = load_config(TINY, [*QUICK, *settings])
    if config.rollout.environment is not None:
        _ending_turns()
    kills = () if kill is None else kill if isinstance(kill, tuple) else (kill,)
    kill_points.arm(run_dir, kills)
    logs = run_dir / "logs"
    makes: dict[str, Any] = {"trainer": lambda: kill_points.watched_rank(SealingRank)}
    makes |= {"critic": SealingRank} if config.algorithm.has_critic else {}
    makes |= {"reference": SealingRank} if config.cluster.pools.reference else {}
    goes_back = any(rule.action == "rollback" for _, rule in config.alerts.rules())
    if spare_ranks is None:
        spare_ranks = len(kills) if config.cluster.rebuilds else 0
    starts_ranks_again = config.alerts.rollbacks if goes_back and config.takes_turns else 0
    ranks, *later = [
        {
            role: [
                Forked(f"{role} rank {i}", answers(make), logs / f"{role}_{i}.log")
                for i in range(config.parallel.world_size)
            ]
            for role, make in makes.items()
        }
        for _ in range(1 + spare_ranks + starts_ranks_again)
    ]

    def server(number: int) -> Any:
        in_server(number)
        return kill_points.watched_server(_Server)

    servers = [
        Forked(f"rollout server {i}", answers(functools.partial(server, i)), logs / f"server_{i}.log")
        for i in range(config.rollout.servers)
    ]

    def spare() -> Any:
        in_spare()
        return _Server()

    extra = [Forked(f"spare server {i}", answers(spare), logs / f"spare_{i}.log") for i in range(spares)]

    def introduce(started: Sequence[Forked]) -> None:
        if "trainer" in started[-1].label:
            kill_points.introduce(driver=os.getpid(), rank=started[-1].pid, server=servers[-1].pid)

    try:
        plan = model_plan(config, run_dir, home / "hf", home / "megatron", Fence.begin(run_dir))
        launcher = LocalLauncher(ranks, servers, extra, later, introduce)
        kill_points.watch_driver(launcher)
        console = Console(highlight=False, width=200)
        train_module.train(plan, console, resume=True, launcher=launcher, controller=named(loop))
    except Stopped as e:
        print(f"stopped: {e}", flush=True)
        return e.status
    except USERS_ERRORS as e:
        traceback.print_exc()
        print(f"error: {e}", flush=True)
        return 2
    finally:
        every = itertools.chain(*(of for roles in (ranks, *later) for of in roles.values()))
        for process in (*every, *servers, *extra):
            process.kill()
    return 0


# ---- the test's side


@functools.cache
def shared_starter() -> Starter:
    """What forks the drivers of all files that this process runs: to make it takes longer than a run."""
    starter = Starter("tests.support.local_parts", "tests.support.kill_points")
    atexit.register(starter.__exit__)  # before multiprocessing waits for its processes
    return starter


@functools.cache
def _shared_home() -> Path:
    """Where the small model of those files is."""
    home = Path(tempfile.mkdtemp(prefix="local_run_"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    assert shared_starter().call(home / "home.log", make_home, home) == 0, tail(home / "home.log")
    return home


class Runs:
    """A context manager that starts runs on the small model, which is found in `home` too."""

    def __init__(self, home: Path) -> None:
        self._starter, model = shared_starter(), _shared_home()
        self.home = home
        for part in ("hf", "megatron"):
            (home / part).symlink_to(model / part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The process that forks drivers serves other files."""

    def call(self, log: Path, fn: Callable[..., Any], *arguments: Any, timeout_s: float = BUSY_S) -> int:
        """As `Starter.call`."""
        return self._starter.call(log, fn, *arguments, timeout_s=timeout_s)

    def run(self, run_dir: Path, settings: Sequence[str] = (), kill: Any = None, loop: str | None = None) -> int:
        """From where the run stands: its last checkpoint, if it has one. loop: as in `named`."""
        return self.call(run_dir / "driver.log", drive, run_dir, self.home, settings, kill, loop)


# ---- what a run left


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that a trainer's checkpoint holds: weights, the optimizer's state, step numbers."""
    from megatron_bridge.convert.directory.torch_dist import TorchDist

    source = TorchDist(checkpoint)
    out = {}
    for name in source.names():
        shape = source.stored(name).shape
        out[name] = source.read(name, (0,) * len(shape), shape)
    source.close()
    return out


# metrics of publications and of servers, which a run with a server that fails does not have of the run without
OF_SERVERS = ("sync/", "rollout/servers_healthy", "rollout/restarts", "rollout/reissued")


def same_run(one: Path, other: Path) -> None:
    """Ledger, metrics, weights and optimizer state of the last checkpoint, rollouts: byte for byte."""
    last = int((one / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    assert (one / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    assert untimed(one / "metrics.jsonl") == untimed(other / "metrics.jsonl")
    for model in ("trainer", "critic"):
        kept = [where / "checkpoints" / f"step_{last}" / model for where in (one, other)]
        assert kept[0].is_dir() == kept[1].is_dir()
        if kept[0].is_dir():
            a, b = map(tensors, kept)
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    rollouts = [sorted(p.name for p in (where / "rollouts").iterdir()) for where in (one, other)]
    assert rollouts[0] == rollouts[1]
    for name in rollouts[0]:
        assert (one / "rollouts" / name).read_bytes() == (other / "rollouts" / name).read_bytes()


def untimed(metrics: Path, *more: str) -> bytes:
    """metrics.jsonl without its timings, without the bytes that were sent and how they were packed, which depend on
    what servers hold already and on the way of publication, and without the metrics that begin with `more`."""
    from miles_like.report.metrics import TIMINGS

    left_out = (*TIMINGS, "sync/bytes", "sync/packed", *more)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return "".join(
        json.dumps({k: v for k, v in row.items() if not k.startswith(left_out)}) + "\n" for row in rows
    ).encode()

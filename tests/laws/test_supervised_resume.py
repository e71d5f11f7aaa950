"""A run on given answers that is stopped and resumed is the run that never stopped, bit for bit.

One ends with its steps and gets more of them; the others receive SIGTERM in the middle of a step after which nothing
would have been saved.

The position in the data, the optimizer, the reference of DPO and the counters must all come back; otherwise a resumed
run silently trains on other examples or measures from other weights. The stage itself runs here, on one rank in its
process. Not covered: Ray and several ranks (tests/e2e), a kill in the middle of a save (test_faults).
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from megatron_bridge.weights.checkpoint_sums import DamagedFileError, verify_sums
from miles_like.checkpoint import run_state
from miles_like.stopping import Stopped
from miles_like.storage.checkpoint_files import SMALL as SMALL_FILE
from miles_like.types import StepReport, TrainBatch
from tests.support.chosen import chosen, later
from tests.support.refusals import refuses
from tests.support.spawn import free_port, run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("sft", "dpo", "kto", "orpo", "simpo", "reward_model", "process_reward")
SMALL = (
    *("parallel.dp=1", "parallel.ep=1", "train.groups_per_step=5", "eval.every=2", "eval.max_prompts=4"),
    *("checkpoint.every=2", "optimizer.lr=1e-3"),
)
CASES = later(NAMES, ("sft",), beside="tests/laws/test_supervised_resume.py")
STEPS = 4
TIMES = ("perf/", "wall_s")


class Alone:
    """A `Trainer` of one rank in this process."""

    def __init__(self, trainer: Any, sigterm_in: int | None) -> None:
        self.rank, self.version, self.sigterm_in = trainer, 0, sigterm_in

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        self.version += 1
        if self.version == self.sigterm_in:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)  # as long as ranks that are other processes take at least
        return self.rank.train([b.grid[0] for b in batches], [b.loss_tokens for b in batches], self.version)

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        return self.rank.evaluate(batch.grid[0], batch.loss_tokens)

    async def logprobs(self, batch: TrainBatch, *, weights: str | None = None) -> Sequence[Sequence[Any]]:
        return [self.rank.logprobs(batch.grid[0], weights=weights)]

    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        self.rank.save(path, asynchronous=asynchronous)

    async def finish_save(self, *, wait: bool) -> bool:
        return self.rank.finish_save(wait=wait)

    async def load(self, path: Path, *, version: int = 0) -> None:
        self.rank.load(path)
        self.version = version

    async def lost(self) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.bits = {name: x.clone() for name, x in self.rank.export()}
        self.rank.close()


def _checkpoint(where: Path) -> None:
    """`hf` and `megatron` under `where`, as the stages before training leave them."""
    from megatron_bridge.convert.to_megatron import to_megatron
    from megatron_bridge.families.registry import family_of
    from miles_like.hf.checkpoint import write_hf
    from miles_like.pipeline.warmup import random_weights

    hf = json.loads((CONFIGS / "tiny" / "model.json").read_text())
    shapes = {p.hf_name: p.shape for p in family_of(hf).bind(hf).places()}
    write_hf(where / "hf", random_weights(shapes, hf, 0), hf)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(CONFIGS / "tiny" / name, where / "hf" / name)
    to_megatron(where / "hf", where / "megatron")


def _stage(
    name: str, where: Path, run_dir: Path, *settings: str, resume: bool = False, sigterm_in: int | None = None
) -> dict[str, Any]:
    """One run of the stage: the weights it ends with."""
    from miles_like.cluster.factories import MegatronFactory
    from miles_like.config.load import load_config
    from miles_like.run import supervised as supervised_module
    from miles_like.run.setup import trainer_side
    from miles_like.run.setup.launcher import Launcher
    from miles_like.run.setup.model_plan import model_plan

    config = load_config(CONFIGS / f"tiny_{name}.toml", [*SMALL, *settings])
    run_dir.mkdir(exist_ok=True)
    made: list[Alone] = []

    class OneRank(Launcher):
        def check(self, plan: Any) -> None: ...

        def trainer(self, plan: Any, loss: Any) -> Any:
            factory = MegatronFactory(plan.model.trainer, plan.weights, loss)
            made.append(Alone(factory(0, 1, "127.0.0.1", free_port()), sigterm_in))
            return made[0]

    supervised_module.freeze_gc = lambda *_: None
    trainer_side.write_report = lambda run_dir: run_dir / "report.html"
    plan = model_plan(config, run_dir, where / "hf", where / "megatron")
    supervised_module.train_supervised(plan, Console(file=io.StringIO()), resume=resume, launcher=OneRank())
    return made[0].bits


def _runs(rank: int, world: int, port: int, where: Path, asked: Sequence[str]) -> dict[str, Any]:
    _checkpoint(where)
    out: dict[str, Any] = {}
    for name in asked:
        whole, cut = where / f"{name}-whole", where / f"{name}-cut"
        want = _stage(name, where, whole, f"train.steps={STEPS}")
        stopped = None
        if name == "sft":
            _stage(name, where, cut, "train.steps=2")
        else:
            try:
                _stage(name, where, cut, f"train.steps={STEPS}", sigterm_in=3)
            except Stopped as e:
                stopped = (e.status, str(e))
        got = _stage(name, where, cut, f"train.steps={STEPS}", resume=True)
        same = got.keys() == want.keys() and all(bool((got[k] == want[k]).all()) for k in want)
        states = [
            json.loads((d / "checkpoints" / f"step_{STEPS}" / "run_state.json").read_text()) for d in (whole, cut)
        ]
        for state in states:
            # torch's archives and times are not the same bytes twice; the configurations differ in where they are saved
            del state["files"], state["sum"], state["parts"]["files"], state["parts"]["config"]
        out["where"] = where
        out[name] = {"stopped": stopped, "weights": same, "states": states, "rows": [_rows(d) for d in (whole, cut)]}
        out[name]["wall_s"] = [row["wall_s"] for row in _read(cut)[1:]]
    return out


def _rows(run_dir: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in _read(run_dir)]


def _read(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asked = chosen(request, "name", NAMES)
    return run_ranks(_runs, 1, tmp_path_factory.mktemp("supervised"), asked, keep=True)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_one_that_never_stopped(found: dict[str, Any], name: str) -> None:
    """Weights, the run's state with the driver's generators, and every figure of every step but its times."""
    got = found[name]
    whole, cut = got["rows"]
    interrupted = (143, "SIGTERM: step 3 is saved, --resume continues from it")
    assert got["stopped"] == (None if name == "sft" else interrupted)
    assert got["weights"] and got["states"][0] == got["states"][1]
    assert [row["step"] for row in cut] == [0, 1, 2, 3, 4]
    assert cut == whole
    assert len(got["wall_s"]) == STEPS and sorted(got["wall_s"]) == got["wall_s"], "the clock goes on after a resume"


@pytest.mark.parametrize("name", CASES)
def test_held_out_examples_are_measured_at_start_on_the_interval_and_at_the_end(
    found: dict[str, Any], name: str
) -> None:
    """No rollout, no routes, no publication: their keys are absent. DPO begins at log 2 and KTO at a
    half, where all rewards are 0."""
    sets = {"sft": "heldout", "process_reward": "steps_heldout"}
    rows, key = found[name]["rows"][0], f"eval/{sets.get(name, 'pairs_heldout')}"
    assert [row["step"] for row in rows if f"{key}/loss" in row] == [0, 2, 4]
    more = (
        {"answer_prob"}
        if name == "sft"
        else {"accuracy"}
        if name in ("kto", "process_reward")
        else {"accuracy", "margin"}
    )
    assert all(f"{key}/{short}" in row for row in rows[::2] for short in more)
    assert not [k for row in rows for k in row if k.startswith(("rollout/", "sync/", "routing/", "mismatch/"))]
    assert rows[-1]["tokens_total"] > rows[1]["tokens_total"] > 0 and rows[-1]["weight_version"] == STEPS
    if name == "dpo":
        assert [rows[0][f"{key}/loss"], rows[1]["train/loss"]] == pytest.approx([math.log(2)] * 2, abs=1e-5)
        assert rows[-1]["preference/margin"] != 0
    if name == "kto":
        assert [rows[0][f"{key}/loss"], rows[1]["train/loss"]] == pytest.approx([0.5] * 2, abs=1e-5)
        assert rows[1]["preference/kl_baseline"] == pytest.approx(0, abs=1e-5)
        assert rows[-1]["preference/reward_chosen"] != 0


def _damages(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    whole = path.read_bytes()
    middle = len(whole) // 2
    yield "missing", path.unlink
    yield "cut", lambda: path.write_bytes(whole[:middle])
    yield "flipped", lambda: path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


def test_any_damage_to_any_file_is_named_and_the_checkpoint_before_is_offered(found: dict[str, Any]) -> None:
    """Removed, cut, one bit flipped: each file of a checkpoint of a real run, by the driver before anything is started;
    the bytes of the ranks' files are checked by the ranks, which read them anyway."""
    checkpoints = found["where"] / "sft-cut" / "checkpoints"
    folder = checkpoints / "step_4"
    names = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    assert {"run_state.json", "groups.safetensors", "checksums.json", "common.pt", "__0_0.distcp"} <= {
        p.name for p in names
    }
    for path in names:
        whole = path.read_bytes()
        for what, damage in _damages(path):
            if what == "flipped" and len(whole) > SMALL_FILE and path.parent != folder:
                continue  # see the test below
            damage()
            with refuses(
                ValueError, "damaged", path, "--from-step 2", unrecorded="it depends on the order of the files"
            ):
                run_state.load_latest(checkpoints)
            path.write_bytes(whole)
    (checkpoints / "latest").unlink()
    with refuses(ValueError, "latest", "2, 4", "--from-step", 4):
        run_state.load_latest(checkpoints)
    with refuses(ValueError, "--from-step", 3, "2, 4"):
        run_state.go_back(checkpoints, 3)
    run_state.go_back(checkpoints, 4)
    assert (checkpoints / "latest").read_text() == "step_4\n"


def test_ranks_refuse_what_the_driver_does_not_read(found: dict[str, Any]) -> None:
    trainer = found["where"] / "sft-cut" / "checkpoints" / "step_4" / "trainer"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify_sums(trainer, meet=lambda: None)
        for path in sorted(trainer.iterdir()):
            whole = path.read_bytes()
            for _, damage in _damages(path) if path.name != "checksums.json" else ():
                damage()
                files = "it names the files that torch made"
                with refuses(DamagedFileError, "step_4 is damaged", path.name, unrecorded=files) as raised:
                    verify_sums(trainer, meet=lambda: None)
                assert re.search(f"{re.escape(path.name)} (is missing|was changed)", str(raised.value))
                path.write_bytes(whole)
    finally:
        dist.destroy_process_group()

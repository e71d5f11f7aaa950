"""Where a run of tests/support/local_run.py is killed, and the witness that it was there.

The product has no code for this: each process wraps a function at the point, writes what it sees there into a witness
file, to disk, and sends SIGKILL to the victim.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from routing_replay.versions import step_of

VICTIMS = ("driver", "rank", "server")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """`step`: of the weights that generate, are trained, published (1 is the first) or saved. `where`: within the
    point; see the functions that watch it."""

    victim: str
    point: str  # generation, step, publish, save, random
    step: int
    where: Any = None


_kills: Sequence[Kill] = ()
_before = 0  # witnesses of earlier starts
_run_dir = Path()


def arm(run_dir: Path, kills: Sequence[Kill]) -> None:
    """In the driver, before its processes are forked. kills: one after the other, each once the one before is done."""
    global _kills, _before, _run_dir
    _kills, _before, _run_dir = kills, len(witnesses(run_dir)), run_dir


def _armed() -> Kill | None:
    """The kill that is next, in every process; None: all are done."""
    if not _kills:
        return None
    done = len(witnesses(_run_dir)) - _before
    return _kills[done] if done < len(_kills) else None


def introduce(**pids: int) -> None:
    """The victims. Called again where one is replaced."""
    new = _run_dir / "pids.new"
    new.write_text(json.dumps(pids))
    new.rename(_run_dir / "pids.json")
    with (_run_dir / "introduced.jsonl").open("a") as out:
        out.write(json.dumps(pids) + "\n")


def witnesses(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "witnesses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait() -> None:
    """Until the next kill is done."""
    while len(witnesses(_run_dir)) == _before:
        time.sleep(0.01)


def _at(point: str, step: int) -> Kill | None:
    kill = _armed()
    return kill if kill is not None and (kill.point, kill.step) == (point, step) else None


def _strike(**seen: Any) -> None:
    """The witness, then the kill; once."""
    kill = _armed()
    assert kill is not None
    victim = json.loads((_run_dir / "pids.json").read_text())[kill.victim]
    with (_run_dir / "witnesses.jsonl").open("a") as out:
        out.write(json.dumps({**asdict(kill), "by": os.getpid(), "pid": victim, "seen": seen}) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.kill(victim, signal.SIGKILL)
    if kill.victim == "driver":
        time.sleep(60)  # this process ends with it: what comes after the point does not happen


# ---- the server


def watched_server(target: Any) -> Any:
    """Of rollouts, not evaluations, sampled under version `step`, once `where` tokens of it are."""
    from rollout.embedded.engine.engine import Engine

    step, began = Engine.step, dict[str, int]()

    def watched(self: Engine) -> bool:
        worked = step(self)
        kill = _armed()
        if kill is None or kill.point != "generation" or step_of(int(self.version)) != kill.step:
            return worked
        specs = [self._admission.jobs[row].group.spec for row in self._active.tolist()]
        of_rollout = [s for s in specs if s.n > 1]
        if of_rollout and self.generated - began.setdefault(self.version, self.generated) >= kill.where:
            _strike(version=str(kill.step), generated=self.generated - began[self.version], running=len(of_rollout))
        return worked

    Engine.step = watched  # type: ignore[method-assign]
    return target()


# ---- a trainer rank


def watched_rank(rank_class: type) -> Any:
    return watched_class(rank_class)()


def watched_class(rank_class: type) -> type:
    """Of ranks that strike at their points."""
    originals = list[Any]()

    class Watched(rank_class):  # type: ignore[misc]
        def start(self, *arguments: Any) -> Any:
            place = super().start(*arguments)
            _watch_optimizer(self.trainer, self.rank)
            return place

        def publish(self, version: int) -> Any:
            if self.rank == 0 and _at("publish", step_of(version)):
                _watch_buckets(version)
            return super().publish(version)

        def save(self, path: Path, asynchronous: bool) -> None:
            """`where` "shards": when this rank has written one of its files, not all."""
            from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as writer

            originals.append(writer.write_preloaded_data)
            kill = _at("save", int(path.parent.name.removeprefix("step_")))
            mine = kill is not None and kill.where == "shards" and self.rank == 0

            def watched(transforms: Any, i: int, *rest: Any) -> Any:
                if mine and i == 1:
                    partial = path.with_name(path.name + ".partial")
                    _strike(files=sorted(p.name for p in partial.iterdir()), whole=path.exists())
                return originals[0](transforms, i, *rest)

            writer.write_preloaded_data = staticmethod(watched)
            super().save(path, asynchronous)

    return Watched


def _watch_optimizer(trainer: Any, rank: int) -> None:
    """`where` "before": the gradients are there, no value has changed. "half": the optimizer's own fp32 weights have
    moved, those of the model have not."""
    part = trainer.optimizer.chained_optimizers[-1]
    step, copy = part.step_with_ready_grads, part._copy_main_params_to_model_params

    held: Any = None

    def masters() -> list[Any]:
        return [p for group in part.optimizer.param_groups for p in group["params"]]

    def models() -> list[Any]:
        return [p for chunk in trainer.chunks for p in chunk.parameters()]

    def moved(before: list[Any], now: list[Any]) -> int:
        return sum(not a.equal(b) for a, b in zip(before, now, strict=True))

    def watched_step() -> Any:
        if rank == 0 and (kill := _at("step", trainer.steps_done)):
            nonlocal held
            held = [p.detach().clone() for p in masters()], [p.detach().clone() for p in models()]
            if kill.where == "before":
                _strike(
                    with_gradient=sum(p.grad is not None and bool(p.grad.any()) for p in masters()),
                    masters_moved=0,
                    models_moved=0,
                )
        return step()

    def watched_copy() -> Any:
        if held is not None and rank == 0 and (kill := _at("step", trainer.steps_done)) and kill.where == "half":
            _strike(masters_moved=moved(held[0], masters()), models_moved=moved(held[1], models()))
        return copy()

    part.step_with_ready_grads, part._copy_main_params_to_model_params = watched_step, watched_copy


def _watch_buckets(version: int) -> None:
    """After `where` requests with weights were answered; there are more."""
    from rollout.publish import servers
    from rollout.wire import endpoints

    change, sent = servers.ServerSet.change, 0

    def watched(self: Any, endpoint: str, body: Any, *settled: Any) -> None:
        nonlocal sent
        kill = _at("publish", step_of(version))
        if endpoint == endpoints.UPDATE_FROM_TENSOR and kill is not None and sent == kill.where:
            _strike(version=version, buckets_sent=sent, last=body["weight_version"] is not None)
        change(self, endpoint, body, *settled)
        sent += endpoint == endpoints.UPDATE_FROM_TENSOR

    servers.ServerSet.change = watched  # type: ignore[method-assign, assignment]


# ---- the driver


def watch_driver(launcher: Any) -> None:
    """`where`, of a save: the file of the checkpoint that is about to get its name. Random: so many seconds after
    version `step` was published, at the latest before the next is."""
    points = {kill.point for kill in _kills}
    if "save" in points:
        sys.addaudithook(_watch_files)
    if "random" in points:
        start = launcher.trainer

        def watched(plan: Any, loss: Any) -> Any:
            trainer = start(plan, loss)
            _watch_clock(trainer)
            return trainer

        launcher.trainer = watched


def _watch_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.rename" and (kill := _armed()) is not None and Path(str(arguments[1])).name == kill.where:
        checkpoints = _run_dir / "checkpoints"
        folder = checkpoints / f"step_{kill.step}"
        latest = checkpoints / "latest"
        if folder.exists() and not (latest.exists() and latest.read_text().strip() == folder.name):
            _strike(
                files=sorted(p.name for p in folder.iterdir()),
                latest=latest.read_text().strip() if latest.exists() else None,
            )


def _watch_clock(trainer: Any) -> None:
    publish = trainer.publish
    lock = threading.Lock()

    def strike(why: str) -> None:
        with lock:
            if _armed() is not None:
                _strike(under_way=trainer.under_way, version=trainer._version, why=why)

    async def watched(*, version: int) -> Any:
        kill = _armed()
        if kill is not None and version > kill.step:
            strike("the next version is about to be published")
        report = await publish(version=version)
        if kill is not None and version == kill.step:
            timer = threading.Timer(kill.where, strike, ["time"])
            timer.daemon = True
            timer.start()
        return report

    trainer.publish = watched

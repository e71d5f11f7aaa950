"""Saving under trouble: beside the training, on a full disk, without psutil, and with a rank killed in the middle.

Not covered: a rank that hangs (the driver limits the wait of its peers), slow disks (test_slow_disks.py), power loss.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.checkpoint import run_state
from miles_like.checkpoint.run_state import RunState
from tests.support import toy
from tests.support.refusals import check_refusal, refuses
from tests.support.spawn import free_port, run_ranks, warm_context

LONG = pytest.mark.long(beside="tests/megatron_bridge/weights/test_checkpoint.py")
LAYOUT = {"dp": 2, "ep": 2}
SMALL = 4096  # bytes a file may have on a "full disk": enough for metadata, not for weights
SOON_S = 60.0  # far from the 600 s that a collective waits
Found = dict[str, Any]


@contextmanager
def writers(change: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """This rank's file writer, changed."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    stock = FileSystemWriterAsync.write_preloaded_data
    FileSystemWriterAsync.write_preloaded_data = staticmethod(change(stock))
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(stock)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def everything(t: Any) -> list[Tensor]:
    """Weights and optimizer state of this rank, copied."""
    out = [x.detach().clone() for model in t.models for x in model.state_dict().values() if torch.is_tensor(x)]
    for part in t.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            out += [x.clone() for _, x in sorted(state.items()) if torch.is_tensor(x)]
    return out


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step(t: Any, i: int) -> dict[str, float]:
    rows, tokens = toy.grid(toy.samples(8, seed=i), dp=2, micros=1)
    return dict(t.step(rows[t.dp_rank], tokens, i + 1).metrics)


def refused(work: Callable[[], object]) -> tuple[str, str, float]:
    """(type, sentence, seconds) of the error that `work` ends in."""
    began = time.monotonic()
    try:
        work()
    except (RuntimeError, ValueError) as e:
        return type(e).__name__, str(e), time.monotonic() - began
    return "no error", "", 0.0


def _beside_the_training(t: Any, where: Path) -> Found:
    """The writers are held until a step is done and the weights are overwritten."""
    out: Found = {}
    step(t, 0)
    t.save(where / "sync")
    at_save, go = everything(t), threading.Event()

    def held(stock: Callable[..., None]) -> Callable[..., None]:
        return lambda *a: (go.wait(), stock(*a))[1]

    with writers(held):
        t.save(where / "async", asynchronous=True)
        out["held"] = t.finish_save(wait=False)
        out["next"] = step(t, 1)
        out["still held"] = t.finish_save(wait=False)
        out["named too early"] = (where / "async").exists()
        with torch.no_grad():
            for model in t.models:
                for p in model.parameters():
                    p.fill_(9.0)
        t.optimizer.reload_model_params()
        go.set()
        out["finished"] = t.finish_save(wait=True)
    out["named"] = (where / "async").is_dir() and not (where / "async.partial").exists()
    for name in ("sync", "async"):
        t.load(where / name)
        out[f"{name} as saved"] = same(everything(t), at_save)
        out[f"{name} next"] = step(t, 1)
        out[f"{name} weights"] = [float(x.double().sum()) for x in everything(t)]
    return out


def _on_a_full_disk(t: Any, rank: int, where: Path) -> Found:
    """One rank cannot write: its weights (sync and async), the common file, or the metadata at the very end."""
    out: Found = {}

    def save(asynchronous: bool) -> None:
        t.save(where / "full", asynchronous=asynchronous)
        t.finish_save(wait=True)

    for case, full_rank, size in (("sync", 1, SMALL), ("async", 1, SMALL), ("common file", 0, 16)):
        with files_up_to(size if rank == full_rank else resource.RLIM_INFINITY):
            out[case] = refused(lambda case=case: save(case == "async"))
    with writers(lambda stock: lambda *a: (stock(*a), resource.setrlimit(resource.RLIMIT_FSIZE, (16, -1)))[0]):
        out["metadata"] = refused(lambda: save(False))
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    out["left"] = sorted(p.name for p in where.iterdir() if p.name.startswith("full"))
    save(True)
    out["saved at last"] = (where / "full").is_dir()
    return out


def _lacking_psutil(t: Any, where: Path) -> Found:
    """As megatron finds it while it is imported."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async, "HAVE_PSUTIL", False)
        found = refused(lambda: t.save(where / "lacking"))
    return {"refused": found[:2], "left": [p.name for p in where.glob("lacking*")]}


def _trouble(rank: int, world: int, port: int, hf: str, where: Path, second_port: int) -> Found:
    # routing biases move: weights are views, which megatron's writer copies anyway, but a bias has its own storage
    with toy.trainer(toy.config(hf, router_bias_update_rate=1e-2, **LAYOUT), rank, world, port) as t:
        out = {"lacking psutil": _lacking_psutil(t, where)}
        out |= {"beside": _beside_the_training(t, where), "full": _on_a_full_disk(t, rank, where)}
    with toy.trainer(toy.config(hf, distributed_optimizer=False, **LAYOUT), rank, world, second_port) as t:
        return out | {"other optimizer": refused(lambda: t.load(where / "sync"))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    where = tmp_path_factory.mktemp("checkpoint")
    return run_ranks(_trouble, 2, toy.hf_dir(where / "hf"), where, free_port())


def test_the_state_of_the_other_kind_of_optimizer_is_refused(ranks: list[Found]) -> None:
    """The two store it under different names; half of it would be read as nothing."""
    for kind, message, _ in (r["other optimizer"] for r in ranks):
        assert kind == "ValueError"
        check_refusal(message, "distributed_optimizer", True, False)


def test_an_asynchronous_checkpoint_is_the_state_at_save_whatever_happens_next(ranks: list[Found]) -> None:
    """The writers start only after a step and an overwriting of every weight: had they been handed the tensors
    themselves, the file would hold those. Bitwise the synchronous one, and so is the run that resumes from it."""
    for found in (r["beside"] for r in ranks):
        assert found["sync as saved"] and found["async as saved"]
        assert found["sync next"] == found["async next"] == found["next"]
        assert found["sync weights"] == found["async weights"]


def test_a_directory_gets_its_name_when_every_writer_is_done(ranks: list[Found]) -> None:
    for found in (r["beside"] for r in ranks):
        assert not found["held"] and not found["still held"] and not found["named too early"]
        assert found["finished"] and found["named"]


@pytest.mark.parametrize(("case", "guilty"), [("sync", 1), ("async", 1), ("common file", 0), ("metadata", 0)])
def test_a_full_disk_on_one_rank_is_one_sentence_on_all(ranks: list[Found], case: str, guilty: int) -> None:
    """The rank that could write must not wait for the one that could not; nothing half-written stays."""
    for found in (r["full"] for r in ranks):
        kind, message, seconds = found[case]
        assert kind == "RuntimeError" and seconds < SOON_S
        check_refusal(message, guilty, 27, "full")
        assert "\n" not in message
        assert found["saved at last"]
    assert ranks[0]["full"]["left"] == []  # rank 0 removes it


def test_where_megatron_found_no_psutil_a_save_is_refused_on_every_rank(ranks: list[Found]) -> None:
    """Megatron's own save would wait for ever for writers that have died of the missing import."""
    kind, message = ranks[0]["lacking psutil"]["refused"]
    assert kind == "ValueError"
    check_refusal(message, "psutil", "pip install")
    assert [r["lacking psutil"] for r in ranks] == [{"refused": (kind, message), "left": []}] * 2


def _without_psutil(rank: int, world: int, port: int, hf: str, where: Path) -> Found:
    sys.modules["psutil"] = None  # type: ignore[assignment]  # importing it fails
    with toy.trainer(toy.config(hf), rank, world, port) as t:
        return {"refused": refused(lambda: t.save(where / "saved")), "left": [p.name for p in where.iterdir()]}


@LONG
def test_without_psutil_a_save_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """In a process that cannot import it."""
    hf = toy.hf_dir(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (found,) = run_ranks(_without_psutil, 1, hf, tmp_path / "out", timeout_s=SOON_S, cold=True)
    kind, message, _ = found["refused"]
    assert kind == "ValueError"
    check_refusal(message, "psutil", "pip install")
    assert found["left"] == []


def _killed(rank: int, port: int, hf: str, where: Path, asynchronous: bool, results: Any) -> None:
    """A whole checkpoint of step 1; in that of step 2, rank 1 dies between its first file and its second."""
    torch.set_num_threads(1)

    def dies(stock: Callable[..., None]) -> Callable[..., None]:
        def write(transforms: Any, i: int, *rest: Any) -> None:
            if i == 1:
                (where / "inside").write_text(" ".join(sorted(os.listdir(where / "step_2" / "trainer.partial"))))
                os.kill(os.getpid(), signal.SIGKILL)
            stock(transforms, i, *rest)

        return write if rank == 1 else stock

    with toy.trainer(toy.config(hf, **LAYOUT), rank, 2, port) as t:
        for n in (1, 2):
            step(t, n)
            state = RunState(step=n, weight_version=n, tokens_total=n)

            def save(n: int = n, state: RunState = state) -> None:
                t.save(run_state.step_folder(where, n) / "trainer", asynchronous=asynchronous)
                t.finish_save(wait=True)
                if rank == 0:
                    run_state.save(where, state, keep=2)

            if n == 1:
                save()
        with writers(dies):
            results.put(refused(save))


def _resumes(rank: int, world: int, port: int, hf: str, where: Path) -> int:
    with toy.trainer(toy.config(hf), rank, world, port) as t:
        t.load(where)
        return int(t.steps_done)


@pytest.mark.parametrize("damage", ["empty", "cut", "another file", "missing"])
def test_a_damaged_common_file_is_one_sentence(damage: str, tmp_path: Path) -> None:
    from megatron_bridge.weights.checkpoint import _common

    facts = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (tmp_path / "metadata.json").write_text(
        json.dumps(facts | {"common_backend": "torch", "common_backend_version": 1})
    )
    torch.save({"step": 3}, tmp_path / "common.pt")
    assert _common(tmp_path) == {"step": 3}
    whole = (tmp_path / "common.pt").read_bytes()
    bad = {"empty": b"", "cut": whole[: len(whole) // 2], "another file": b"hello world" * 20, "missing": None}[damage]
    (tmp_path / "common.pt").unlink()
    if bad is not None:
        (tmp_path / "common.pt").write_bytes(bad)
    with refuses(ValueError, "common.pt"):
        _common(tmp_path)


@pytest.mark.parametrize(
    "asynchronous",
    [
        pytest.param(False, id="sync", marks=LONG),
        pytest.param(True, id="async"),
    ],
)
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path, asynchronous: bool) -> None:
    """Its peer ends in bounded time with a sentence; what is half written has no name and is not the latest."""
    where, hf = tmp_path / "checkpoints", toy.hf_dir(tmp_path / "hf")
    where.mkdir()
    context = warm_context()
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=_killed, args=(r, port, hf, where, asynchronous, results)) for r in range(2)]
    for p in processes:
        p.start()
    try:
        kind, message, seconds = results.get(timeout=120)
        processes[1].join(10)
    except queue.Empty:
        raise AssertionError(f"no sentence within 120 s; exit codes {[p.exitcode for p in processes]}") from None
    finally:
        for p in processes:
            p.kill()
            p.join()
    assert processes[1].exitcode == -signal.SIGKILL
    assert "__1_0.distcp" in (where / "inside").read_text()  # the witness: its first file was there
    assert kind == "RuntimeError" and "\n" not in message, message
    check_refusal(message, "step_2/trainer", "another rank's connection was lost", "logs")
    assert seconds < SOON_S
    assert not (where / "step_2" / "trainer").exists()
    latest = run_state.load_latest(where)
    assert latest is not None and latest[1].step == 1
    run_state.clear_unfinished(where)
    assert not (where / "step_2").exists()
    assert run_ranks(_resumes, 1, hf, latest[0] / "trainer") == [1]

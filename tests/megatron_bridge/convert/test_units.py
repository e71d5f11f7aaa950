"""Units: what is whole is kept, whatever killed the run; nothing else is.

Not covered: a machine that loses power (files are synced before they are renamed, but no test pulls a plug).
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash

from megatron_bridge.convert.memory_limit import MIB, plan_memory
from megatron_bridge.convert.units import (
    HashedFile,
    building,
    files_of,
    finished_unit,
    run_units,
)
from tests.support.refusals import refuses
from tests.support.spawn import run_ranks


@dataclass(frozen=True)
class _Numbers:
    """Unit n: the text n, 50 times. `trouble`: what happens in unit `at`, to the first process that comes by."""

    count: int = 6
    trouble: str = ""
    at: int = 3
    salt: str = ""

    def file(self, number: int) -> str:
        return f"{number}.data"

    def proof(self, number: int) -> str:
        return f"{number}{self.salt}"

    def write(self, number: int, out: HashedFile) -> Any:
        out.write(str(number).encode() * 25)
        if number == self.at and self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.at and self.trouble == "bad":
            raise ValueError("tensor seven is bad")
        if number == self.at and self.trouble == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number == self.at and self.trouble == "bug":
            raise ZeroDivisionError("of ours")
        out.write(str(number).encode() * 25)
        return {"number": number}


def _build(job: _Numbers, out: Path, **how: Any) -> int:
    with building(out, job) as partial:
        return run_units(job, partial, **how)


def _content(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.iterdir()}


WHOLE = {f"{n}.data": str(n).encode() * 50 for n in range(6)}


def test_pieces_and_the_file_are_hashed_as_written(tmp_path: Path) -> None:
    """Small writes, large ones, none, a view of another type, and what torch.save does."""
    import torch  # not above: the worker processes of the other tests import this module

    path, want = tmp_path / "f", []
    big = torch.arange(1_000_000, dtype=torch.int32)
    with HashedFile(path) as out:
        for data in (b"abc", b"", bytes(3 * MIB), memoryview(big.numpy()), bytearray(b"xy") * 400_000):
            out.write(b"head")
            out.write(data)
            want.append(out.cut())
        torch.save(big, out)
        want.append(out.cut())
        fact = out.finish()
    whole = path.read_bytes()
    assert want == [(s, n, xxhash.xxh3_128(whole[s : s + n]).hexdigest()) for s, n, _ in want]
    assert [s for s, _, _ in want] == [0, *(s + n for s, n, _ in want[:-1])]
    assert (fact.size, fact.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert torch.equal(torch.load(io.BytesIO(whole[want[-1][0] :])), big)


def test_each_process_count_makes_the_same(tmp_path: Path) -> None:
    for workers in (1, 2):
        job, out = _Numbers(), tmp_path / str(workers)
        with building(out, job) as partial:
            assert run_units(job, partial, workers=workers) == 0
            assert [finished_unit(job, partial, n).facts["number"] for n in range(6)] == list(range(6))
            files = files_of(job, partial)
        assert _content(out) == WHOLE
        assert {n: hashlib.sha256(b).hexdigest() for n, b in WHOLE.items()} == {n: f.sha256 for n, f in files.items()}


@contextmanager
def _raises(kind: type[BaseException], *facts: object) -> Iterator[None]:
    """And every process that was started is gone."""
    before = set(psutil.Process().children())  # other tests' ranks may wait for the next
    with refuses(kind, *facts):
        yield
    mine = [p for p in set(psutil.Process().children()) - before if "resource_tracker" not in " ".join(p.cmdline())]
    assert not mine


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.long(beside="tests/megatron_bridge/convert/test_units.py"))]
)
def test_a_failure_is_said_and_what_is_whole_is_kept(workers: int, tmp_path: Path) -> None:
    """A bad input leaves nothing; a full disk, a killed worker, a fault of ours leave the units that were whole."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with _raises(ValueError, "tensor seven is bad"):
        _build(_Numbers(trouble="bad"), out, workers=workers)
    assert not list(tmp_path.iterdir())
    with _raises(OSError, 28, "disk full", out):
        _build(_Numbers(trouble="full"), out, workers=workers)
    assert partial.exists() and not out.exists()
    kind = RuntimeError if workers == 2 else ZeroDivisionError
    with _raises(kind, "of ours"):
        _build(_Numbers(trouble="bug", at=5), out, workers=workers)
    if workers == 2:
        (partial / "0.data.json").unlink(missing_ok=True)  # so that there are two units left to do
        with _raises(RuntimeError, "SIGKILL"):
            _build(_Numbers(trouble="kill", at=5), out, workers=workers)
    (partial / "stray.tmp").write_bytes(b"half")
    (partial / "folder").mkdir()
    (partial / "1.data").write_bytes(b"cut")
    (partial / "2.data.json").write_text('{"proof": ')
    kept = _build(_Numbers(), out, workers=workers)
    assert kept == 3 if workers == 1 else kept <= 3  # of two processes one may have been late
    assert _content(out) == WHOLE


def _parent_of_two(rank: int, world_size: int, port: int, out: str) -> None:
    """Dies as soon as both of its worker processes are in the middle of a unit."""

    def die() -> None:
        while len(list(Path(out + ".partial").glob("*.pid"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    _build(_Endless(where=out + ".partial"), Path(out), workers=2)


@dataclass(frozen=True)
class _Endless(_Numbers):
    where: str = ""

    def write(self, number: int, out: HashedFile) -> Any:
        pid = Path(self.where, f"{number}.part")
        pid.write_text(str(os.getpid()))
        pid.rename(pid.with_suffix(".pid"))
        time.sleep(600)


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    """However that ends: else they would write into a directory that the next run has taken."""
    with refuses(AssertionError, -9, 0):
        run_ranks(_parent_of_two, 1, str(tmp_path / "out"), timeout_s=120)
    pids = [int(p.read_text()) for p in (tmp_path / "out.partial").glob("*.pid")]
    assert len(set(pids)) == 2
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert _build(_Numbers(), tmp_path / "out") == 0
    assert _content(tmp_path / "out") == WHOLE


def test_units_of_other_inputs_are_made_again(tmp_path: Path) -> None:
    with refuses(OSError, 28, "disk full", tmp_path / "out"):
        _build(_Numbers(count=9, trouble="full", at=8), tmp_path / "out")
    with refuses(OSError, 28, "disk full", tmp_path / "out"):
        _build(_Numbers(salt="other", trouble="full"), tmp_path / "out")
    assert {p.name for p in (tmp_path / "out.partial").glob("*.data")} == {"0.data", "1.data", "2.data"}
    assert _build(_Numbers(salt="other"), tmp_path / "out") == 3
    assert _content(tmp_path / "out") == WHOLE


def test_one_builds_at_a_time(tmp_path: Path) -> None:
    job = _Numbers()
    with building(tmp_path / "out", job) as partial:
        with refuses(ValueError, tmp_path / "out"):
            _build(job, tmp_path / "out")
        run_units(job, partial)
    with refuses(ValueError, tmp_path / "out"):
        _build(job, tmp_path / "out")
    assert _content(tmp_path / "out") == WHOLE


def test_work_can_be_done_elsewhere(tmp_path: Path) -> None:
    """Only what is to be done is handed out, and it must be there when the others say so."""
    asked: list[int] = []

    def all_of_them(work: Callable[[int], None], numbers: Sequence[int]) -> None:
        asked.extend(numbers)
        for n in reversed(numbers):
            work(n)

    with refuses(OSError, 28, "disk full", tmp_path / "out"):
        _build(_Numbers(trouble="full", at=2), tmp_path / "out")
    assert _build(_Numbers(), tmp_path / "out", spread=all_of_them) == 2
    assert asked == [2, 3, 4, 5]
    assert _content(tmp_path / "out") == WHOLE
    job = _Numbers()
    with (
        refuses(RuntimeError, "0.data"),
        building(tmp_path / "two", job) as partial,
    ):
        run_units(job, partial, spread=lambda work, numbers: None)
        files_of(job, partial)


def test_memory_is_divided_or_refused() -> None:
    here = max(320 * MIB, psutil.Process().memory_info().rss)
    assert plan_memory(here + 40 * MIB, 1).chunk_bytes == 8 * MIB
    assert plan_memory(64 << 30, 8).chunk_bytes == 64 * MIB
    assert plan_memory(here + 2 * 320 * MIB + 20 * MIB, 2).chunk_bytes == 2 * MIB
    assert plan_memory(here + 320 * MIB + 40 * MIB, 1, separate_process=True).chunk_bytes == 8 * MIB
    assert plan_memory(here + 300 * MIB, 1, names=50_000).chunk_bytes < plan_memory(here + 300 * MIB, 1).chunk_bytes
    memory = "its numbers are this process's memory"
    with refuses(ValueError, "limit of 200 MiB is too small", "1 worker(s)", "MiB", unrecorded=memory):
        plan_memory(200 * MIB, 1)
    with refuses(ValueError, "is too small", "2 worker(s)", "fewer workers", unrecorded=memory):
        plan_memory(here + 500 * MIB, 2)
    with refuses(ValueError, "is too small", "1 worker(s)", "use a larger limit", unrecorded=memory):
        plan_memory(here + 40 * MIB, 1, least=9 * MIB)
    with refuses(ValueError, 0, 1):
        plan_memory(here, 0)

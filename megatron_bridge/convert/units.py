"""Runs long jobs that write a directory of files, split into units that survive a kill.

A unit is one file. It is written under a temporary name, synced and renamed; then its index FILE.json is written in the
same way: a hash of the unit's inputs, its size, its SHA-256, and its facts for the directory's manifest. The next run
keeps units whose index matches and removes everything else in the unfinished directory. The directory is built as
OUT.partial and renamed to OUT, so an OUT is complete; the indexes are removed after that.

Units are independent: they run in this process, in processes on this machine, or wherever `Spread` runs them. A machine
that does not see OUT.partial writes its units into another directory, and its indexes are brought here with the
machine's address: the file stays there, and OUT lists it in `ELSEWHERE`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import xxhash

from megatron_bridge.convert.directory.manifest import FileFact
from miles_like.hf.checkpoint import sync_path
from miles_like.limits.child_process import die_with_parent

ELSEWHERE = "elsewhere.json"  # in OUT: file -> [address, directory] where it is; absent where OUT holds all

_BUFFERED = 1 << 20  # smaller writes are buffered


class HashedFile:
    """A new file that is hashed while it is written; `torch.save` accepts it as a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)  # unbuffered, so that closing cannot fail to write
        self._all = hashlib.sha256()
        self._piece = xxhash.xxh3_128()
        self._gathered = bytearray()
        self._beside: ThreadPoolExecutor | None = None
        self._start = self.position = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`, which may be reused when this returns."""
        size = len(data) if isinstance(data, bytes | bytearray) else data.nbytes
        self.position += size
        if size < _BUFFERED:
            self._gathered += data
            if len(self._gathered) >= _BUFFERED:
                self.flush()
            return size
        self.flush()
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, "hash")
        view = memoryview(data).cast("B")
        hashed = self._beside.submit(self._hash, view)
        try:
            self._write(view)
        finally:
            hashed.result()
        return size

    def cut(self) -> tuple[int, int, str]:
        """(start, size, checksum) of the bytes written since the last call: a piece of the manifest."""
        self.flush()
        piece = (self._start, self.position - self._start, str(self._piece.hexdigest()))
        self._start = self.position
        self._piece = xxhash.xxh3_128()
        return piece

    def finish(self) -> FileFact:
        """Flush and sync the file; returns its size and hash."""
        self.flush()
        os.fsync(self._file.fileno())
        return FileFact(self.position, self._all.hexdigest())

    def flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._hash(memoryview(gathered))
            self._write(memoryview(gathered))

    def close(self) -> None:
        if self._beside is not None:
            self._beside.shutdown()
        self._file.close()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _hash(self, view: memoryview) -> None:
        self._piece.update(view)
        self._all.update(view)

    def _write(self, view: memoryview) -> None:
        while len(view):  # the kernel writes at most 2 GiB per call
            view = view[self._file.write(view) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The result of a conversion."""

    tensors: int  # of the source or the output, scales not counted
    skipped: tuple[str, ...]  # known tensors that are not trained or repeat one, and draft layers that were not trained
    bytes: int  # of all files in the output
    units: int
    units_kept: int  # units kept from an interrupted run


class Job(Protocol):
    """A picklable description of the output."""

    @property
    def count(self) -> int: ...

    def file(self, number: int) -> str:
        """Name of a unit's file in the directory."""

    def proof(self, number: int) -> str:
        """A hash of a unit's inputs and contents; a kept unit with an equal hash is reused."""

    def write(self, number: int, out: HashedFile) -> Any:
        """Write a unit; returns its facts for the manifest, as JSON values. Raises ValueError for a bad input."""


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Runs units of a job; picklable."""

    job: Job
    directory: Path

    def __call__(self, number: int) -> None:
        """Write a unit's file, then its index."""
        path = self.directory / self.job.file(number)
        # a unique name: a process of a killed run on another machine may still be writing
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        with HashedFile(temporary) as out:
            facts = self.job.write(number, out)
            file = out.finish()
        temporary.rename(path)
        index = {"proof": self.job.proof(number), "size": file.size, "sha256": file.sha256, "facts": facts}
        _write_index(temporary, _index_path(self.directory, path.name), index)


Spread = Callable[[UnitWork, Sequence[int]], None]
"""(work, numbers of the units to run): returns when all are done."""
Watch = Callable[[Path, int], AbstractContextManager[object]]
"""(a directory, bytes that its files will have): a context in which they are written, which shows the progress."""


def unwatched(directory: Path, nbytes: int) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class UnitIndex:
    """The index of a finished unit. holder: (address, directory) of the machine that has the file; None: it is in the
    directory of the index."""

    file: FileFact
    facts: Any
    holder: tuple[str, str] | None = None


@contextmanager
def building(out: Path, job: Job) -> Iterator[Path]:
    """A context with exclusive use of OUT.partial, which is renamed to `out` when the block ends.

    Raises ValueError when `out` exists or another process builds it, and OSError naming `out` when the disk is full.
    After a ValueError in the block everything is removed; after any other error finished units are kept.
    """
    _refuse_existing(out)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is converting into {out}: wait for it, or choose another directory"
            ) from None
        _refuse_existing(out)  # it may have been finished while the directory was opened
        with _kept_or_removed(out, partial):
            yield partial
            os.fsync(descriptor)
            partial.rename(out)
        sync_path(out.parent)
        for number in range(job.count):
            _index_path(out, job.file(number)).unlink()
    finally:
        os.close(descriptor)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists: convert into a new directory, or remove it")


@contextmanager
def _kept_or_removed(out: Path, partial: Path) -> Iterator[None]:
    try:
        yield
    except ValueError:
        shutil.rmtree(partial)
        raise
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            e.errno,
            f"disk full: {out} was not written; free some space and run again (converted parts are kept), or choose a "
            "directory on another disk",
        ) from e


def run_units(
    job: Job,
    partial: Path,
    *,
    workers: int = 1,
    spread: Spread | None = None,
    watched: AbstractContextManager[object] | None = None,
) -> int:
    """Run all unfinished units; returns the number of units kept. Other files in `partial` are removed. watched: a
    context of the work, entered when they are.

    Raises as `job.write`, and RuntimeError when a worker process dies.
    """
    kept = {number for number in range(job.count) if read_unit(job, partial, number) is not None}
    known = {name for n in kept for name in (job.file(n), _index_path(partial, job.file(n)).name)}
    for path in partial.iterdir():
        if path.name not in known:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    todo = [number for number in range(job.count) if number not in kept]
    work = UnitWork(job, partial)
    with watched or nullcontext():
        if spread is not None:
            spread(work, todo)
        elif workers > 1 and len(todo) > 1:
            _in_processes(work, todo, workers)
        else:
            for number in todo:
                work(number)
    return len(kept)


def read_unit(job: Job, directory: Path, number: int, *, elsewhere: bool = False) -> UnitIndex | None:
    """A finished unit's index; None for an unfinished unit or one with another hash. elsewhere: also of a unit whose
    file another machine holds, as `note_elsewhere` has stored it."""
    name = job.file(number)
    try:
        index = json.loads(_index_path(directory, name).read_text(encoding="utf-8"))
        holder = index.get("holder")
        here = holder is None and (directory / name).stat().st_size == index["size"]
        if index["proof"] == job.proof(number) and (here or (elsewhere and holder is not None)):
            found = None if holder is None else (str(holder[0]), str(holder[1]))
            return UnitIndex(FileFact(index["size"], index["sha256"]), index["facts"], found)
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        pass  # killed before the unit was finished
    return None


def finished_unit(job: Job, directory: Path, number: int) -> UnitIndex:
    """A finished unit's index. Raises RuntimeError when it is missing although its worker has finished."""
    unit = read_unit(job, directory, number, elsewhere=True)
    if unit is None:
        raise RuntimeError(
            f"{directory / job.file(number)} is incomplete, although its worker has finished: put {directory} on "
            "a file system that all workers share, and run again"
        )
    return unit


def finished_indexes(directory: Path) -> dict[str, str]:
    """File -> text of its index, for each unit in a directory whose file has the size that its index states."""
    found = {}
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else ():
        try:
            text = path.read_text(encoding="utf-8")
            if path.with_suffix("").stat().st_size == json.loads(text)["size"]:
                found[path.stem] = text
        except (OSError, ValueError, KeyError, TypeError):
            continue  # killed while it was written
    return found


def note_elsewhere(directory: Path, file: str, index: str, holder: tuple[str, str]) -> None:
    """Store the index of a unit whose file is in the directory `holder`[1] of the machine with address `holder`[0]."""
    path = _index_path(directory, file)
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        _write_index(temporary, path, {**json.loads(index), "holder": list(holder)})


def files_of(job: Job, directory: Path) -> Mapping[str, FileFact]:
    """Size and hash of all units' files."""
    return {job.file(number): finished_unit(job, directory, number).file for number in range(job.count)}


def write_file(path: Path, data: bytes) -> FileFact:
    """Write and sync a small file that is not a unit."""
    with HashedFile(path) as out:
        out.write(data)
        return out.finish()


def _index_path(directory: Path, file: str) -> Path:
    return directory / f"{file}.json"


def _write_index(temporary: Path, path: Path, index: Mapping[str, Any]) -> None:
    temporary = temporary.with_suffix(".json.tmp")
    write_file(temporary, json.dumps(index).encode())
    temporary.rename(path)


# processes


def _in_processes(work: Callable[[int], None], numbers: Sequence[int], workers: int) -> None:
    """Run units in processes, each of which gets the next unit when it finishes one."""
    context = multiprocessing.get_context("spawn")
    todo = iter(numbers)
    ends: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(numbers))):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(work, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()  # so that the pipe closes when the process ends
            ends[ours] = process
            ours.send(next(todo))
        busy = dict(ends)
        while busy:
            for end in wait(list(busy)):
                assert isinstance(end, Connection)
                error = _answer(end, busy[end])
                if error is not None:
                    raise error
                number = next(todo, None)
                if number is None:
                    del busy[end]
                else:
                    end.send(number)
    finally:
        for end, process in ends.items():
            end.close()
            process.kill()
            process.join()


def _answer(end: Connection, process: BaseProcess) -> BaseException | None:
    try:
        answer: BaseException | None = end.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return RuntimeError(
            f"a worker process {how} (out of memory?): run again, converted parts are kept; fewer workers need less "
            "memory"
        )
    return answer


def _serve(work: Callable[[int], None], end: Connection, parent: int) -> None:
    """The main function of a worker process, which ends when its parent does."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends this process
    if torch := sys.modules.get("torch"):  # if the job uses it
        torch.set_num_threads(1)
    while True:
        try:
            number = end.recv()
        except EOFError:
            return
        try:
            work(number)
        except (ValueError, OSError) as e:
            end.send(e)
        except Exception as e:  # process boundary: the parent raises it
            traceback.print_exc()
            end.send(RuntimeError(f"a worker process failed: {type(e).__name__}: {e}"))
        else:
            end.send(None)

"""Copies files to node-local storage, verified by checksum. Runs on every node, so it is self-contained.

Each file is read once: it is hashed while it is copied, by one of several threads. A copy that was cut short continues
from its last whole chunk. A file that has been verified is trusted, while its inode, size and modification time are
those in the node's record, a JSON file beside the copies; so a second run reads no data. Damage that keeps all three (a
disk that returns other bytes) is not detected here, but when a rank loads: each piece of the shards has a checksum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypedDict

import xxhash

BLOCK = 16 << 20  # bytes read at once by a thread
CHUNK = 64 << 20  # bytes of a chunk, whose checksum is kept while the copy is incomplete
_THREADS = 8
_TICK_S = 0.5  # between two reports of progress
_SAVE_S = 5.0  # between two writes of the record while files are copied
_RECORD_FORMAT = 1


class FileSum(TypedDict):
    """A file's part of a completion marker that is used here."""

    size: int
    sha256: str


class Staged(TypedDict):
    """Result of one node, in bytes."""

    node: str
    copied_bytes: int  # read from the source
    skipped_bytes: int  # of files that were there
    hashed_bytes: int  # read of files that were there, to verify them


class Source(Protocol):
    """Where the files of a `Copy` are read; picklable."""

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        """A function (offset, bytes) -> those bytes of a file, fewer at its end. Raises OSError, at once or when it is
        called."""


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A directory that this machine sees."""

    root: Path

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        path = self.root / name

        def read(offset: int, size: int) -> bytes:
            with path.open("rb", buffering=0) as f:
                f.seek(offset)
                return f.read(size)

        return read


@dataclass(frozen=True, slots=True)
class Copy:
    """Files to copy from `source` to the directory `target`: relative name -> size and checksum."""

    source: Source
    target: Path
    files: Mapping[str, FileSum]

    @property
    def nbytes(self) -> int:
        return sum(fact["size"] for fact in self.files.values())


class _Known(TypedDict):
    """A verified file of the record."""

    inode: int
    size: int
    mtime_ns: int
    sha256: str


def record_of(data: Path) -> Path:
    """The node's record of verified files for the copies below `data`. Nodes that share a disk have one each."""
    return data.with_name(f".{data.name}.{socket.gethostname()}.verified.json")


def read_record(data: Path) -> dict[str, _Known]:
    """Name relative to `data` -> verified file; empty where there is no record, or none of this format."""
    try:
        found = json.loads(record_of(data).read_text(encoding="utf-8"))
        files = found["files"] if found["format"] == _RECORD_FORMAT else {}
        return {str(name): _known(**known) for name, known in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _known(*, inode: int, size: int, mtime_ns: int, sha256: str) -> _Known:
    return {"inode": inode, "size": size, "mtime_ns": mtime_ns, "sha256": sha256}


def verified_sums(data: Path) -> dict[str, tuple[int, str]]:
    """(size, SHA-256) of the files below `data` that are unchanged since they were verified."""
    return {
        name: (known["size"], known["sha256"])
        for name, known in read_record(data).items()
        if _same_file(data / name, known)
    }


@dataclass(frozen=True, slots=True)
class StageFiles:
    """The copies of one node, all below the directory `data`; picklable."""

    data: Path
    copies: tuple[Copy, ...]
    threads: int = _THREADS

    def __call__(self, alive: Callable[[], None] = lambda: None) -> Staged:
        """Copy the files that are missing or differ. Raises ValueError for a wrong checksum, an unreadable source or a
        full disk, once every thread has ended.

        alive: called from this thread while bytes are read.
        """
        state = _State(self.data)
        jobs = [(c, name) for c in self.copies for name in c.files]
        jobs.sort(key=lambda job: -job[0].files[job[1]]["size"])  # so that no thread is left alone with a large one
        with ThreadPoolExecutor(max(1, min(self.threads, len(jobs))), "stage") as pool:
            running = [pool.submit(_stage_file, state, c, name) for c, name in jobs]
            try:
                _watch(running, state, alive)
            finally:
                state.stopped.set()
                for future in running:
                    future.cancel()
        state.save()
        return {
            "node": socket.gethostname(),
            "copied_bytes": state.copied,
            "skipped_bytes": state.skipped,
            "hashed_bytes": state.hashed,
        }


@dataclass
class _State:
    """What the threads of one call share."""

    data: Path
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    copied: int = 0
    skipped: int = 0
    hashed: int = 0

    def __post_init__(self) -> None:
        self.known = read_record(self.data)
        self._changed = False

    def count(self, **more: int) -> None:
        """Add to `copied`, `skipped` or `hashed`. Raises _Stopped once another thread has failed."""
        if self.stopped.is_set():
            raise _Stopped
        with self.lock:
            for name, n in more.items():
                setattr(self, name, getattr(self, name) + n)

    def note(self, path: Path, sha256: str) -> None:
        """Record a file that has been verified."""
        st = path.stat()
        known = _known(inode=st.st_ino, size=st.st_size, mtime_ns=st.st_mtime_ns, sha256=sha256)
        with self.lock:
            self.known[str(path.relative_to(self.data))] = known
            self._changed = True

    def is_trusted(self, path: Path, fact: FileSum) -> bool:
        known = self.known.get(str(path.relative_to(self.data)))
        return known is not None and known["sha256"] == fact["sha256"] and _same_file(path, known)

    def save(self) -> None:
        """Write the record if it changed; atomically, and under a name of this process first."""
        with self.lock:
            if not self._changed:
                return
            text = json.dumps({"format": _RECORD_FORMAT, "files": self.known}, sort_keys=True)
            self._changed = False
        path = record_of(self.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        with temporary.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)


class _Stopped(Exception):
    """Another thread has failed."""


def _same_file(path: Path, known: _Known) -> bool:
    try:
        st = path.stat()
    except OSError:
        return False
    return (st.st_ino, st.st_size, st.st_mtime_ns) == (known["inode"], known["size"], known["mtime_ns"])


def _watch(running: Sequence[Future[None]], state: _State, alive: Callable[[], None]) -> None:
    """Wait for all; report progress, and keep the record of what is verified meanwhile. Raises the first failure."""
    left, seen, saved = set(running), -1, time.monotonic()
    while left:
        done, left = wait(left, timeout=_TICK_S, return_when="FIRST_EXCEPTION")
        read = state.copied + state.hashed + state.skipped
        if read != seen:
            seen = read
            alive()
        for future in done:
            if (error := future.exception()) is not None and not isinstance(error, _Stopped):
                state.stopped.set()
                wait(running)
                state.save()
                raise error
        if time.monotonic() - saved >= _SAVE_S:
            state.save()
            saved = time.monotonic()


def _stage_file(state: _State, copy: Copy, name: str) -> None:
    fact, path = copy.files[name], copy.target / name
    if state.is_trusted(path, fact) or _verify(state, path, fact):
        state.count(skipped=fact["size"])
        return
    # of this host: nodes may share the disk, and each copies what it does not find
    partial = path.with_name(f"{path.name}.{socket.gethostname()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(state, partial) as out:
            if _verify(state, path, fact):  # another process of this host has copied it meanwhile
                _discard(partial)
                state.count(skipped=fact["size"])
                return
            _copy(state, copy.source.reader(name), out, _sums_of(partial), fact, name)
            os.replace(partial, path)
            _sums_of(partial).unlink(missing_ok=True)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            _discard(partial)
            raise ValueError(
                f"{socket.gethostname()}: no space left for {path} ({fact['size']} bytes): free some space, or "
                "set cluster.stage_dir to a larger disk"
            ) from None
        raise ValueError(
            f"{socket.gethostname()}: {name} -> {path}: {e.strerror or e}: run again, copied files are kept"
        ) from None
    except _DamagedError:
        _discard(partial)
        raise
    state.note(path, fact["sha256"])


def _discard(partial: Path) -> None:
    for left in (partial, _sums_of(partial)):
        left.unlink(missing_ok=True)


class _DamagedError(ValueError):
    """The source has other bytes than its marker."""


@contextlib.contextmanager
def _exclusive(state: _State, partial: Path) -> Iterator[IO[bytes]]:
    """The partial file, locked against other processes of this host; the kernel releases the lock of one that ends."""
    while True:
        with partial.open("a+b", buffering=0) as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                state.count(copied=0)
                state.stopped.wait(_TICK_S)
                continue
            # another process may have renamed it between `open` and `flock`
            if _is_at(out, partial):
                yield out
                return


def _is_at(out: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(out.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _verify(state: _State, path: Path, fact: FileSum) -> bool:
    """Whether a file has the size and the checksum; it is then recorded."""
    try:
        if path.stat().st_size != fact["size"]:
            return False
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as f:
            while block := f.read(BLOCK):
                digest.update(block)
                state.count(hashed=len(block))
    except OSError:
        return False
    if digest.hexdigest() != fact["sha256"]:
        return False
    state.note(path, fact["sha256"])
    return True


def _copy(
    state: _State, read: Callable[[int, int], bytes], out: IO[bytes], sums: Path, fact: FileSum, name: str
) -> None:
    """Append to the partial file until it is whole, after what is left of an earlier copy has been verified."""
    at, digest = _continue(state, out, sums)
    with sums.open("a", encoding="ascii") as noted:
        while at < fact["size"]:
            chunk, end = xxhash.xxh3_128(), min(fact["size"], at + CHUNK)
            while at < end:
                block = read(at, min(BLOCK, end - at))
                if not block:
                    raise _DamagedError(_differs(name, f"ends at byte {at} of {fact['size']}"))
                digest.update(block)
                chunk.update(block)
                _write(out, block)
                at += len(block)
                state.count(copied=len(block))
            noted.write(f"{chunk.hexdigest()}\n")
            noted.flush()
    os.fsync(out.fileno())
    if digest.hexdigest() != fact["sha256"]:
        raise _DamagedError(
            _differs(name, f"has sha256 {digest.hexdigest()[:12]}.., but its marker has {fact['sha256'][:12]}..")
        )


def _differs(name: str, how: str) -> str:
    return (
        f"{socket.gethostname()}: {name} {how}: the source was changed or is damaged; repeat the stage that writes it"
    )


def _sums_of(partial: Path) -> Path:
    """The checksums of a partial file's chunks, a line each."""
    return partial.with_name(partial.name.removesuffix(".partial") + ".sums.partial")


def _continue(state: _State, out: IO[bytes], sums: Path) -> tuple[int, Any]:
    """Keep the whole chunks that an earlier copy left and whose checksums are right, and cut off the rest; returns
    their bytes and their running SHA-256. A machine that lost power may have kept a file's length but not its bytes."""
    try:
        noted = sums.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        noted = []
    digest, good = hashlib.sha256(), 0
    out.seek(0)
    for wanted in noted:
        longer, chunk, size = digest.copy(), xxhash.xxh3_128(), 0
        while size < CHUNK and (block := out.read(min(BLOCK, CHUNK - size))):
            longer.update(block)
            chunk.update(block)
            size += len(block)
            state.count(hashed=len(block))
        if size < CHUNK or chunk.hexdigest() != wanted:
            break
        digest, good = longer, good + 1
    if out.seek(0, os.SEEK_END) != good * CHUNK:
        out.truncate(good * CHUNK)
    sums.write_text("".join(f"{line}\n" for line in noted[:good]), encoding="ascii")
    return good * CHUNK, digest


def _write(out: IO[bytes], block: bytes) -> None:
    view = memoryview(block)
    while len(view):  # the kernel writes at most 2 GiB per call
        view = view[out.write(view) :]

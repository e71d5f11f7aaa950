"""Completion markers and verified copies: an output is whole exactly when its marker says so and fits."""

import errno
import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles_like.storage import verified_copy
from miles_like.storage.completion import MARKER, file_sha256, files_under, input_key, why_incomplete, write_marker
from miles_like.storage.verified_copy import Copy, LocalSource, StageFiles, record_of, verified_sums
from tests.support.refusals import refuses


@pytest.fixture
def output(tmp_path: Path) -> Path:
    root = tmp_path / "out" / "data"
    root.mkdir(parents=True)
    (root / "a.bin").write_bytes(b"a" * 1000)
    (root / "sub").mkdir()
    (root / "sub" / "b.bin").write_bytes(b"b" * 10)
    write_marker(root.parent, stage="s", key="k", root=root, files=files_under(root))
    return root


def rewrite(root: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    marker = root.parent / MARKER
    marker.write_text(json.dumps(change(json.loads(marker.read_text()))))


def touch_later(path: Path) -> None:
    st = path.stat()
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns + 10**9))


def test_a_whole_output_is_whole(output: Path) -> None:
    assert why_incomplete(output.parent, "k") is None
    touch_later(output / "a.bin")  # copied by rsync, say: time moved, bytes did not
    assert why_incomplete(output.parent, "k") is None


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda root: (root / "a.bin").unlink(), "a.bin is missing"),
        (lambda root: (root / "a.bin").write_bytes(b"a" * 999), "999 bytes, not 1000"),
        (lambda root: ((root / "a.bin").write_bytes(b"a" * 999 + b"x"), touch_later(root / "a.bin")), "was changed"),
        (lambda root: (root.parent / MARKER).unlink(), "incomplete"),
        (lambda root: (root.parent / MARKER).write_text("{"), "its marker .complete.json is damaged"),
        (lambda root: (root.parent / MARKER).write_text("[" * 100_000), "is damaged"),
        (lambda root: rewrite(root, lambda m: m | {"files": {"../a.bin": m["files"]["a.bin"]}}), "is damaged"),
        (lambda root: rewrite(root, lambda m: m | {"files": {"/etc/passwd": m["files"]["a.bin"]}}), "is damaged"),
        (lambda root: rewrite(root, lambda m: m | {"files": {"a.bin": 5}}), "is damaged"),
        (lambda root: rewrite(root, lambda m: m | {"root": 5}), "is damaged"),
    ],
)
def test_any_harm_makes_it_incomplete_with_the_reason(output: Path, harm, reason: str) -> None:
    """Trusting a damaged output is how a run trains on half a model."""
    harm(output)
    assert reason in str(why_incomplete(output.parent, "k"))


def test_hashes_that_the_writer_knows_are_taken_from_it(output: Path) -> None:
    """A converted model of 1.3 TB is not read again; a file of another size than the writer says is."""
    known = {"a.bin": (1000, "a" * 64), "sub/b.bin": (11, "b" * 64), "none.bin": (1, "c" * 64)}
    write_marker(output.parent, stage="s", key="k", root=output, files=files_under(output), known=known)
    files = json.loads((output.parent / MARKER).read_text())["files"]
    assert files["a.bin"]["sha256"] == "a" * 64
    assert files["sub/b.bin"]["sha256"] == file_sha256(output / "sub" / "b.bin")
    assert len(files) == 2


def test_other_inputs_make_another_key(output: Path) -> None:
    assert why_incomplete(output.parent, "other") == "configuration changed"
    assert input_key("s", {"a": 1}) != input_key("s", {"a": 2})
    assert input_key("s", {"a": 1}) != input_key("t", {"a": 1})
    assert input_key("s", {"a": 1, "b": 2}) == input_key("s", {"b": 2, "a": 1})


def test_nothing_there_is_told_from_half_written(tmp_path: Path) -> None:
    assert why_incomplete(tmp_path / "none", "k") == "no cached copy"


def copy_of(output: Path, target: Path) -> StageFiles:
    files = json.loads((output.parent / MARKER).read_text())["files"]
    return StageFiles(target, (Copy(LocalSource(output), target / "hf", files),))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_copy, "BLOCK", 64)
    monkeypatch.setattr(verified_copy, "CHUNK", 256)


def test_staging_copies_once_and_trusts_what_it_has_verified(output: Path, tmp_path: Path) -> None:
    """A resumed run reads nothing of 2 TB; a file that was replaced or touched since is hashed again."""
    work, data = copy_of(output, tmp_path / "node"), tmp_path / "node" / "hf"
    first = work()
    assert (first["copied_bytes"], first["hashed_bytes"]) == (1010, 0)
    assert file_sha256(data / "sub" / "b.bin") == file_sha256(output / "sub" / "b.bin")
    assert verified_sums(tmp_path / "node")["hf/a.bin"] == (1000, file_sha256(output / "a.bin"))
    second = work()
    assert (second["copied_bytes"], second["hashed_bytes"], second["skipped_bytes"]) == (0, 0, 1010)
    touch_later(data / "a.bin")
    third = work()
    assert (third["copied_bytes"], third["hashed_bytes"], third["skipped_bytes"]) == (0, 1000, 1010)
    (data / "a.bin").write_bytes(b"x" * 1000)  # as large, but damaged
    fourth = work()
    assert (fourth["copied_bytes"], fourth["skipped_bytes"]) == (1000, 10)
    record_of(tmp_path / "node").write_text("[" * 100_000)  # a damaged record is none
    assert work()["hashed_bytes"] == 1010


def test_damage_that_keeps_inode_size_and_time_is_not_seen(output: Path, tmp_path: Path) -> None:
    """The stated limit of the record."""
    work, file = copy_of(output, tmp_path / "node"), tmp_path / "node" / "hf" / "a.bin"
    work()
    st = file.stat()
    with file.open("r+b") as f:
        f.write(b"x")
    os.utime(file, ns=(st.st_atime_ns, st.st_mtime_ns))
    assert work()["skipped_bytes"] == 1010


class _Breaks:
    """A source that fails after some bytes, as a machine whose power is cut."""

    def __init__(self, root: Path, after: int) -> None:
        self.root, self.left = root, after

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        read = LocalSource(self.root).reader(name)

        def broken(offset: int, size: int) -> bytes:
            if self.left <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.left -= size
            return read(offset, size)

        return broken


@pytest.mark.parametrize("harm", ["nothing", "a bit of a chunk", "the last bytes", "the checksums"])
def test_a_copy_that_was_cut_short_continues_from_its_last_good_chunk(
    output: Path, tmp_path: Path, small_chunks: None, harm: str
) -> None:
    """Of 1000 bytes the first 600 had come: two chunks of 256 and a part of one."""
    whole, data = copy_of(output, tmp_path / "node"), tmp_path / "node" / "hf"
    files = {"a.bin": whole.copies[0].files["a.bin"]}
    with refuses(ValueError, "a.bin"):
        StageFiles(tmp_path / "node", (Copy(_Breaks(output, 600), data, files),))()
    partial = next(data.glob("a.bin.*.partial"))
    sums = next(data.glob("a.bin.*.sums.partial"))
    partial = next(p for p in data.glob("a.bin.*.partial") if p != sums)
    assert 512 <= partial.stat().st_size < 1000 and not (data / "a.bin").exists()
    if harm == "a bit of a chunk":
        with partial.open("r+b") as f:
            f.seek(300)
            f.write(b"x")
    elif harm == "the last bytes":
        os.truncate(partial, 500)
    elif harm == "the checksums":
        sums.write_text("not hex\n")
    kept = {"nothing": 512, "a bit of a chunk": 256, "the last bytes": 256, "the checksums": 0}[harm]
    again = StageFiles(tmp_path / "node", (Copy(LocalSource(output), data, files),))()
    assert again["copied_bytes"] == 1000 - kept
    assert file_sha256(data / "a.bin") == file_sha256(output / "a.bin")
    assert files_under(data) == [data / "a.bin"] and not list(data.glob("*.partial"))


def test_files_are_read_by_several_threads_and_progress_is_reported(output: Path, tmp_path: Path) -> None:
    """Two files wait for each other: one thread could not read both."""
    both, told = threading.Barrier(2, timeout=30), []

    class Meeting:
        def reader(self, name: str) -> Callable[[int, int], bytes]:
            both.wait()
            return LocalSource(output).reader(name)

    (whole,) = copy_of(output, tmp_path / "node").copies
    StageFiles(tmp_path / "node", (Copy(Meeting(), whole.target, whole.files),))(lambda: told.append(None))
    assert told


def test_a_source_that_no_longer_fits_its_marker_is_refused_and_leaves_nothing(output: Path, tmp_path: Path) -> None:
    work = copy_of(output, tmp_path / "node")
    (output / "a.bin").write_bytes(b"x" * 1000)
    with refuses(ValueError, "a.bin", "sha256"):
        work()
    assert not list((tmp_path / "node" / "hf").glob("a.bin*"))
    (output / "a.bin").write_bytes(b"x" * 900)
    with refuses(ValueError, "a.bin", 900, 1000):
        work()


def test_nodes_that_share_a_disk_copy_the_same_files_at_once(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes its own file until it is whole: here the second copies all while the first is about to rename its
    file. Processes of one host wait for each other."""
    work, rename, data = copy_of(output, tmp_path / "node"), os.replace, tmp_path / "node" / "hf"

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr("os.replace", rename)
        with monkeypatch.context() as other:
            other.setattr("socket.gethostname", lambda: "other")
            assert work()["copied_bytes"] == 1010
        rename(source, target)

    monkeypatch.setattr("os.replace", late)
    StageFiles(work.data, work.copies, threads=1)()
    assert files_under(data) == [data / "a.bin", data / "sub" / "b.bin"]
    assert work()["skipped_bytes"] == 1010
    (data / "a.bin").unlink()
    with ThreadPoolExecutor(2) as hosts:
        done = list(hosts.map(lambda _: work(), range(2)))
    assert sum(d["copied_bytes"] for d in done) == 1000


def test_a_full_disk_is_one_sentence_and_leaves_nothing(output: Path) -> None:
    """/dev/full refuses every write with ENOSPC, as a full disk does."""
    target = output.parent / "full"
    (target / "hf").mkdir(parents=True)
    (target / "hf" / f"a.bin.{socket.gethostname()}.partial").symlink_to("/dev/full")
    with refuses(ValueError, "a.bin", 1000):
        copy_of(output, target)()
    assert not list((target / "hf").glob("a.bin*"))

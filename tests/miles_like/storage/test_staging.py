"""Completion markers and staging: an output is whole exactly when its marker says so and fits."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_like.storage.completion import MARKER, file_sha256, files_under, input_key, why_incomplete, write_marker
from miles_like.storage.staging import Copy, StageFiles
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
        (lambda root: (root.parent / MARKER).unlink(), "half-written"),
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
    assert why_incomplete(output.parent, "other") == "made from other inputs"
    assert input_key("s", {"a": 1}) != input_key("s", {"a": 2})
    assert input_key("s", {"a": 1}) != input_key("t", {"a": 1})
    assert input_key("s", {"a": 1, "b": 2}) == input_key("s", {"b": 2, "a": 1})


def test_nothing_there_is_told_from_half_written(tmp_path: Path) -> None:
    assert why_incomplete(tmp_path / "none", "k") == "not there"


def copy_of(output: Path, target: Path) -> StageFiles:
    return StageFiles((Copy(output, target, json.loads((output.parent / MARKER).read_text())["files"]),))


def test_staging_copies_once_and_skips_what_is_there(output: Path, tmp_path: Path) -> None:
    work = copy_of(output, tmp_path / "node")
    assert work()["copied_bytes"] == 1010
    assert file_sha256(tmp_path / "node" / "sub" / "b.bin") == file_sha256(output / "sub" / "b.bin")
    (tmp_path / "node" / "a.bin").write_bytes(b"x" * 1000)  # as large, but damaged
    again = work()
    assert (again["copied_bytes"], again["skipped_bytes"]) == (1000, 10)


def test_a_source_that_no_longer_fits_its_marker_is_refused_and_leaves_nothing(output: Path, tmp_path: Path) -> None:
    work = copy_of(output, tmp_path / "node")
    (output / "a.bin").write_bytes(b"x" * 1000)
    with refuses(ValueError, "a.bin", "sha256"):
        work()
    assert not list((tmp_path / "node").glob("a.bin*"))


def test_nodes_that_share_a_disk_copy_the_same_files_at_once(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes its own file until it is whole: here the second copies all while the first is about to rename its
    file."""
    work, rename = copy_of(output, tmp_path / "node"), os.replace

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr("os.replace", rename)
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: -1)
            assert work()["copied_bytes"] == 1010
        rename(source, target)

    monkeypatch.setattr("os.replace", late)
    work()
    assert files_under(tmp_path / "node") == [tmp_path / "node" / "a.bin", tmp_path / "node" / "sub" / "b.bin"]
    assert work()["skipped_bytes"] == 1010


def test_a_full_disk_is_one_sentence_and_leaves_nothing(output: Path) -> None:
    """/dev/full refuses every write with ENOSPC, as a full disk does."""
    target = output.parent / "full"
    target.mkdir()
    (target / f"a.bin.{socket.gethostname()}-{os.getpid()}.partial").symlink_to("/dev/full")
    with refuses(ValueError, "a.bin", 1000):
        copy_of(output, target)()
    assert not (target / "a.bin").exists()

"""The directory for compiled kernels on a node's own disk: kept from run to run, and no other user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from miles_like.nodes.facts import Device
from miles_like.nodes.reservation import node_facts
from miles_like.nodes.scratch import scratch_directory


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"miles-like-{os.getuid()}"


def test_a_node_s_facts_name_a_directory_that_only_its_user_can_enter(usual: Path) -> None:
    assert node_facts("127.0.0.1", ()).scratch is None and not usual.exists()  # a run on CPU compiles nothing
    held = (Device(index=0, uuid="GPU-0"),)
    assert node_facts("127.0.0.1", held).scratch == scratch_directory() == str(usual)
    assert usual.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_is_not_used(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that another user has made, nor a link: what is compiled there is loaded."""
    usual.mkdir()
    usual.chmod(0o777)
    found = {scratch_directory()}
    usual.rmdir()
    usual.symlink_to(usual.parent)
    found.add(scratch_directory())
    usual.unlink()
    usual.mkdir(mode=0o700)
    other = os.getuid() + 1
    usual.rename(usual.with_name(f"miles-like-{other}"))
    monkeypatch.setattr(os, "getuid", lambda: other)
    found.add(scratch_directory())
    assert len(found) == 3 and not {str(usual), str(usual.with_name(f"miles-like-{other}"))} & found
    for path in found:
        assert path is not None and Path(path).parent == usual.parent and Path(path).stat().st_mode & 0o777 == 0o700


def test_without_a_temporary_directory_there_is_none(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(usual / "gone"))
    assert scratch_directory() is None

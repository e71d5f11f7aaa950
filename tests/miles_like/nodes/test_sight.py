"""A node sees a directory of the driver exactly where it reads what the driver wrote, or knows, there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_like.nodes.sight import PROBE, existing, probe_in, probe_of


def test_a_file_with_a_random_content_is_there_while_it_is_looked_for(tmp_path: Path) -> None:
    """A directory of the same path on another machine has no such file, or one of another driver."""
    with probe_in(tmp_path) as probe, probe_in(tmp_path) as other:
        assert probe.is_seen() and other.is_seen() and probe.path.name.startswith(PROBE)
        probe.path.write_text(other.path.read_text())
        assert not probe.is_seen()
        other.path.unlink()
        assert not other.is_seen()
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError), probe_in(tmp_path / "none"):
        pass


def test_a_directory_that_is_only_read_is_known_by_one_of_its_files(tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text("{}")
    probe = probe_of(file)
    assert probe.is_seen()
    (tmp_path / "copy").write_text("{}")
    os.replace(tmp_path / "copy", file)  # equal, and another file
    assert not probe.is_seen()


def test_a_directory_that_is_not_made_yet_is_judged_by_the_one_above_it(tmp_path: Path) -> None:
    assert existing(tmp_path / "runs" / "a") == tmp_path
    (tmp_path / "runs").mkdir()
    assert existing(tmp_path / "runs" / "a") == tmp_path / "runs"
    assert existing(Path("/nowhere/at/all")) == Path("/")

"""A file that is cut back and written on is the file that was written in one go; another file is refused.

Not covered: that bytes reach the disk.
"""

from __future__ import annotations

import hashlib

import pytest

from miles_like.appended_file import AppendedFile, cut_back
from miles_like.checkpoint_files import DamagedError


def test_a_position_is_of_all_that_is_there_and_what_comes_later_can_be_cut_off(tmp_path):
    path = tmp_path / "new" / "lines"
    first = AppendedFile(path)
    first.write("ä\n")
    early = first.position
    first.write("two\n")
    first.sync()
    assert (early.bytes, early.sha256) == (3, hashlib.sha256("ä\n".encode()).hexdigest())
    whole = first.position
    first.write("half a li")
    first.close()
    cut_back(path, whole)
    second = AppendedFile(path)
    assert second.position == whole
    second.write("four\n")
    assert second.position.sha256 == hashlib.sha256("ä\ntwo\nfour\n".encode()).hexdigest()
    second.close()
    cut_back(path, early)
    assert path.read_text() == "ä\n"


def test_another_file_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "lines"
    file = AppendedFile(path)
    file.write("one\ntwo\n")
    at = file.position
    file.close()
    path.write_text("one\ntw2\nmore")
    with pytest.raises(DamagedError, match="lines has other bytes than when the checkpoint was saved: resume from"):
        cut_back(path, at)
    assert path.read_text() == "one\ntw2\nmore"
    path.write_text("one\n")
    with pytest.raises(DamagedError, match="lines has 4 bytes, 8 were written"):
        cut_back(path, at)
    path.unlink()
    with pytest.raises(DamagedError, match="lines is missing, 8 were written"):
        cut_back(path, at)
    file = AppendedFile(path)
    nothing = file.position
    file.close()
    path.unlink()
    cut_back(path, nothing)
    assert not path.exists()
